"""Unfinished: a word of warning where the state of a model is read that is still one worker's own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist
from torch import nn

from headway.errors import HeadwayWarning
from headway.strategies.partial_all_reduce.rounds import Ending

if TYPE_CHECKING:
    from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
    from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

W = TypeVar("W", bound=nn.Module)


class Unfinished(Generic[W]):
    """Warns once where ``state_dict()`` of a wrapped model, or of the module in it, is not that of all workers.

    ``say`` gives the words for it; "" where the model is that of all.
    """

    def __init__(self, wrapped: W, say: Callable[[W], str]) -> None:
        assert isinstance(wrapped.module, nn.Module)
        self._wrapped, self._say = weakref.ref(wrapped), say
        self._handle = wrapped.module.register_state_dict_pre_hook(_Hook(self))
        self.is_quiet = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """The block wants this worker's own."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def over(self) -> None:
        """From now on the model is whose it is."""
        self._handle.remove()

    def warn(self) -> None:
        """Say whose model it is, unless all have the same."""
        wrapped = self._wrapped()
        if wrapped is None or self.is_quiet or not (words := self._say(wrapped)):
            return
        self.is_quiet = True
        warnings.warn(words, HeadwayWarning, stacklevel=4)


def of_partial_all_reduce(wrapped: PartialAllReduce) -> str:
    """Whose model ``wrapped`` is, unless all workers have the same."""
    last = wrapped.last_round
    if not wrapped.iteration:
        if not wrapped.is_trained_unseen:
            return ""
        return (
            f"state_dict() of a model under partial all-reduce is worker {wrapped.member.worker}'s own: no step of an "
            "optimizer on its parameters was seen, so it was never averaged with others"
        )
    size = dist.get_world_size() if dist.is_initialized() else 0
    now = (wrapped.iteration, 0, size)
    if last is not None and (last.iteration, last.staleness, len(last.members)) == now:
        return ""
    averaged = "never averaged with others"
    if last is not None and last.ending is Ending.COMMITTED:
        others = ", ".join(str(each) for each in last.members if each != wrapped.member.worker)
        averaged = f"last averaged with {others} after {last.iteration}"
    return (
        f"state_dict() of a model under partial all-reduce is worker {wrapped.member.worker}'s own after "
        f"{wrapped.iteration} steps, {averaged}. At the end of training, headway.finish(model) on every rank "
        "makes all workers' models one"
    )


def of_hosts(wrapped: HostDataParallel) -> str:
    """Whose model ``wrapped`` is, unless all hosts have the same."""
    if wrapped.worker is None or not wrapped.iteration or wrapped.worker.is_common:
        return ""
    host = wrapped.hosts.number_of(dist.get_rank())
    ranks = ", ".join(map(str, wrapped.hosts.ranks[host]))
    return (
        f"state_dict() of a model under partial all-reduce is that of host {host} alone (ranks {ranks}) after "
        f"{wrapped.iteration} steps. At the end of training, headway.finish(model) on every rank makes all hosts' "
        "models one"
    )


class _Hook:
    """Called before each ``state_dict()``. A copy of it, as part of a copied module, does nothing."""

    def __init__(self, unfinished: Unfinished[Any] | None = None) -> None:
        self._unfinished = unfinished

    def __call__(self, *_args: Any) -> None:
        if self._unfinished is not None:
            self._unfinished.warn()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()
