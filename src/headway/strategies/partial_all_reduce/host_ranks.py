"""The ranks of one host that are a worker together: the first one averages, the others take over what came of it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from headway.coordination.generator import Worker
from headway.errors import UnsupportedError, UserError
from headway.strategies.live import checkpoint
from headway.strategies.live.averaged import Layout, Policy, training_layout, whole_layout
from headway.strategies.live.checksum import checksum
from headway.strategies.live.stepping import Stepping, weakly
from headway.strategies.partial_all_reduce import observing
from headway.strategies.partial_all_reduce.finishing import Finished
from headway.strategies.partial_all_reduce.handing_down import HandingDown, Told, Word
from headway.strategies.partial_all_reduce.options import JOIN_LIMIT_S
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

BUFFERS: Policy = "averaged"


class FirstOfHost(PartialAllReduce):
    """The worker of a host of several ranks: it hands down what comes of each step, and of ``flush`` and ``finish``."""

    is_called: ClassVar[bool] = False

    def __init__(
        self, module: nn.Module, coordinator: Any, optimizer: Optimizer | None, *, down: HandingDown, hosts: int,
        **options: Any,
    ) -> None:  # fmt: skip
        self._down, self._hosts = down, hosts
        super().__init__(module, coordinator, optimizer, buffers=BUFFERS, **options)

    @property
    def is_common(self) -> bool:
        """Whether all hosts have the same model."""
        last = self.last_round
        if last is None:
            return not self.iteration
        return (last.iteration, last.staleness, len(last.members)) == (self.iteration, 0, self._hosts)

    @property
    def optimizer(self) -> Optimizer | None:
        """The model's, once it is known."""
        return self._stepping.optimizer

    def flush(self) -> None:
        """As ``PartialAllReduce.flush``, on all ranks of the host."""
        with self._down.failure_told():
            committed = self._averaging.committed
            super().flush()
            self._hand_down(Word.FLUSHED, committed)

    def finish(self, source: Worker | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """As ``PartialAllReduce.finish``, on all ranks of the host."""
        with self._down.failure_told():
            finished = super().finish(source, timeout_s)
            layout = whole_layout(self.module, buffers=BUFFERS)
            workers = (*finished.workers, finished.given_by)
            self._down.tell(Word.FINISHED, self.iteration, layout, is_common=True, numbers=workers)
        return finished

    def tell_joined(self) -> None:
        """Let the other ranks of the host go on: this one has joined the job."""
        self._down.tell(Word.JOINED, self.iteration, numbers=numbers_of(self.module, self._earlier))

    def _after_step(self) -> None:
        with self._down.failure_told():
            committed = self._averaging.committed
            super()._after_step()
            self._hand_down(Word.STEPPED, committed)

    def _hand_down(self, word: Word, committed: int) -> None:
        changed = self._averaging.committed > committed
        self._down.tell(word, self.iteration, self._layout() if changed else None, is_common=self.is_common)


class OtherOfHost:
    """Another rank of a host: after each step it holds what the first one does."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, *, down: HandingDown, moments: Policy
    ) -> None:
        self.module = module
        self._down, self._moments = down, moments
        self.iteration = 0
        self._earlier: set[str] = set()  # parameters that have been averaged
        self.is_common = True
        self.is_closed = False
        self._stepping = Stepping(
            module,
            lambda _: None,
            weakly(self, OtherOfHost._refuse_closed),
            weakly(self, OtherOfHost._after_step),
        )
        weakref.finalize(self, self._stepping.close).atexit = False
        observing.follows(self)
        if optimizer is not None:
            self._stepping.bind(optimizer)

    @property
    def optimizer(self) -> Optimizer | None:
        """The model's, once it is known."""
        return self._stepping.optimizer

    def joined(self) -> None:
        """Wait until the first rank has joined the job."""
        told = self._down.hear(Word.JOINED, self._layout)
        self.iteration = told.iteration
        self._earlier = set(named(self.module, told.numbers))

    def changes(self) -> None:
        """Nobody takes this rank's state."""

    def updated_by(self, optimizer: Optimizer) -> None:
        """As of ``PartialAllReduce``."""
        self._stepping.bind_once(optimizer)

    def flush(self) -> None:
        """Take over what the first rank finishes."""
        self._heard(self._down.hear(Word.FLUSHED, self._layout, self.iteration))

    def finish(self, source: Worker | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """Take over the final model. ``source`` and ``timeout_s`` are the first rank's matter."""
        del source, timeout_s
        self._refuse_closed()
        self.flush()
        try:
            final = whole_layout(self.module, buffers=BUFFERS)
            told = self._down.hear(Word.FINISHED, lambda: final, self.iteration)
        finally:
            self.close()
        self._heard(told)
        *workers, given_by = told.numbers
        return Finished(tuple(workers), given_by)

    def checkpoint(self) -> dict[str, Any]:
        """As of ``PartialAllReduce``."""
        self.flush()
        saved = checkpoint.saved(self.module, self.optimizer, self.iteration)
        return {**saved, "averaged": sorted(self._earlier)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """As of ``PartialAllReduce``."""
        self.iteration = checkpoint.restore(state, self.module, self.optimizer)
        self._earlier.update(state.get("averaged", ()))

    def close(self, *, leave: bool = True) -> None:
        """Follow no more steps."""
        del leave
        self.is_closed = True
        self._stepping.close()

    def _after_step(self) -> None:
        self.iteration += 1
        self._layout()  # notes, as the first rank does after each step, what is averaged from now on
        self._heard(self._down.hear(Word.STEPPED, self._layout, self.iteration))

    def _heard(self, told: Told) -> None:
        self.is_common = told.is_common

    def _layout(self) -> Layout:
        layout = training_layout(
            self.module, self.optimizer, buffers=BUFFERS, moments=self._moments, earlier=self._earlier
        )
        self._earlier |= layout.parameters
        return layout

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise UnsupportedError(
                "the model has finished or was closed", fix="Train its .module, or wrap that again."
            )


def numbers_of(module: nn.Module, names: Collection[str]) -> list[int]:
    """Parameters as their places among all of ``module``."""
    return [number for number, (name, _) in enumerate(module.named_parameters()) if name in names]


def named(module: nn.Module, numbers: Collection[int]) -> list[str]:
    """The names of those parameters."""
    return [name for number, (name, _) in enumerate(module.named_parameters()) if number in numbers]


def check_same(rank: FirstOfHost | OtherOfHost, down: HandingDown) -> None:
    """Raise UserError on all ranks of a host where they were not restored from the same state."""
    state = [] if rank.optimizer is None else [rank.optimizer.state[key] for key in rank.optimizer.state]
    moments = [value for own in state for value in own.values() if hasattr(value, "element_size")]
    tensors = [each for each in (*rank.module.parameters(), *moments) if each.element_size() > 1]
    if not down.agree((checksum(tensors) + 7 * rank.iteration) % 2**62):
        raise UserError(
            "ranks of one host were restored from different checkpoints",
            expected="the same model, optimizer and iteration on all ranks of a host",
            fix="Restore all of them from the checkpoint of one.",
        )  # fmt: skip
