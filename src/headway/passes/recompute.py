"""Activation recomputation: what modules keep for backward is let go, and computed again when backward needs it.

After Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from pydantic import Field, field_validator
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from headway.errors import UnsupportedError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.model import ModelSpec, ModuleMemory, PassMemory
from headway.passes.base import (
    Pass,
    check_apart,
    check_trained,
    in_few_words,
    lies_in,
    region_of,
    whole_model,
    with_timelines,
)
from headway.passes.other_forward import give_forward, module_at
from headway.torch_private import version_of


def savings_bytes(memory: PassMemory, regions: Sequence[str]) -> dict[str, int]:
    """What each region no longer keeps from forward to backward. Raises UnsupportedError for one not called once."""
    return {region: call.kept_bytes for region, call in _calls(memory, regions).items()}


def recomputed_memory(memory: PassMemory, model: ModelSpec, regions: Sequence[str]) -> PassMemory:
    """``memory`` as it is where each of ``regions`` recomputes. Raises UnsupportedError for one not called once."""
    calls = _calls(memory, regions)
    open_ = dict(calls)  # those that have not been computed again
    backward = []
    owners = {parameter.name: parameter.module for parameter in model.parameters}
    for name, held_bytes in memory.backward:
        region = region_of(owners.get(name, ""), regions)
        open_.pop(region, None)
        saved_bytes = sum(each.kept_bytes for each in open_.values())
        backward.append((name, max(0, held_bytes - saved_bytes)))
    return memory.model_copy(
        update={
            "forward_bytes": max(_forward_bytes(memory, calls), default=memory.forward_bytes),
            "backward": tuple(backward),
            "modules": (),  # of what was watched, and is not so any more
        }
    )


def _calls(memory: PassMemory, regions: Sequence[str]) -> dict[str, ModuleMemory]:
    found = {}
    for region in regions:
        calls = [module for module in memory.modules if module.module == region]
        if len(calls) != 1:
            raise UnsupportedError(
                "recomputation is predicted of modules that a forward calls once",
                got=f"{region}, which is called {len(calls)} times" if calls else f"no call of {region}",
                fix="Name modules that forward calls once.",
            )  # fmt: skip
        (found[region],) = calls
    return found


def _forward_bytes(memory: PassMemory, calls: dict[str, ModuleMemory]) -> Iterator[int]:
    """The most during each call outside of regions and within, and what is there at the end of forward."""
    regions = tuple(calls)
    gone_bytes = end_bytes = 0
    for call in memory.modules:
        region = region_of(call.module, regions)
        if region == call.module:
            inner = [
                module for module in memory.modules if module is not call and lies_in(module.module, region)
            ]
            rise_bytes = max((each.peak_bytes - each.begin_bytes for each in inner), default=0)
            yield call.begin_bytes - gone_bytes + max(rise_bytes, call.output_bytes)
            gone_bytes += call.kept_bytes
        elif not region and not any(lies_in(each, call.module) for each in regions):
            yield call.peak_bytes - gone_bytes
        end_bytes = calls.get(region, call).end_bytes
    yield max(0, end_bytes - gone_bytes)


def recomputing(regions: Sequence[str]) -> Callable[[Timeline], Timeline]:
    """How a step changes where the forward of each of ``regions`` is computed again before its first gradient."""

    def change(timeline: Timeline) -> Timeline:
        walk = _Walk(regions)
        for item in timeline.items:
            walk.goes_on(item)
        return Timeline(timeline.rank, timeline.step, tuple(walk.all_items()), timeline.background_ns)

    return change


def forward_times_ns(computation: Computation, regions: Sequence[str]) -> dict[str, int]:
    """What the forward of each region takes in the first step of the first rank that is known."""
    timeline = next(iter(computation.timelines.values()))[0]
    walk = _Walk(regions)
    for item in timeline.items:
        walk.goes_on(item)
    return {region: walk.longest_ns.get(region, 0) for region in regions}


class _Walk:
    """Goes through a step: notes what regions take in a forward, and inserts that into the backward behind it."""

    def __init__(self, regions: Sequence[str]) -> None:
        self.longest_ns: dict[str, int] = {}
        self._regions = regions
        self._items: list[Item] = []
        self._pending: dict[str, int] = {}
        self._current = ""  # the region that computes
        self._in_backward = False
        self._at = 0  # where a recomputation begins if it precedes the next gradient

    def goes_on(self, item: Item) -> None:
        match item.kind:
            case Point.USE if not self._in_backward:
                self._current = region_of(item.name, self._regions)
            case Part.FORWARD if item.duration_ns:
                self._leave_backward()
                if self._current:
                    known_ns = self._pending.get(self._current, 0)
                    self._pending[self._current] = known_ns + item.duration_ns
                    self.longest_ns[self._current] = self._pending[self._current]
            case Part.BACKWARD if not self._in_backward:
                self._in_backward, self._current = True, ""
                self._at = len(self._items)
            case Point.READY:
                self._insert(region_of(item.name.rpartition(".")[0], self._regions))
            case Point.BACKWARD_END | Point.STEP:
                self._leave_backward()
        self._items.append(item)
        if item.kind == Point.READY:
            self._at = len(self._items)

    def all_items(self) -> Iterable[Item]:
        """The step as it became."""
        self._leave_backward()
        return self._items

    def _leave_backward(self) -> None:
        """Recompute at its end whatever has shown no gradient, as where it adds to gradients that are there."""
        if self._in_backward:
            for region in list(self._pending):
                self._at = len(self._items)
                self._insert(region)
            self._in_backward = False

    def _insert(self, region: str) -> None:
        if (duration_ns := self._pending.pop(region, 0)) > 0:
            self._items.insert(self._at, Item(Part.BACKWARD, "", duration_ns))


def checkpoint(root: nn.Module, path: str) -> None:
    """Have the module at ``path`` in ``root`` recompute.

    Raises UnsupportedError where there is none, or where another pass has changed it.
    """
    give_forward(module_at(root, path, "recompute"), repr(path), recomputed)


def recomputed(forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What ``forward`` of ``module`` gives, kept for backward as no more than what it is given."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpointed(forward, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _as_before(module, _found(module))


class _Found(NamedTuple):
    """A buffer as a forward found it. ``copy`` is None where forward is known to leave it as it is."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    training: bool
    copy: torch.Tensor | None

    def is_steady(self) -> bool:
        """Whether forward has left it as it was."""
        now = getattr(self.owner, self.name)
        same = now is self.buffer and version_of(now) == self.version
        return same and (self.copy is None or torch.equal(now, self.copy))


_steady: WeakKeyDictionary[nn.Module, dict[bool, frozenset[str]]] = WeakKeyDictionary()
"""The buffers of each module that its forward leaves as they are, as its first one showed: in training, and not."""


def _found(module: nn.Module) -> list[_Found]:
    """The buffers that ``module`` has now, with copies of those that its forward may change."""
    found = []
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            copy = None if name in _steady.get(each, {}).get(each.training, ()) else buffer.clone()
            found.append(_Found(each, name, buffer, version_of(buffer), each.training, copy))
    return found


@contextmanager
def _as_before(module: nn.Module, found: list[_Found]) -> Iterator[None]:
    """Compute again with the buffers that forward found, and leave those that it left.

    Forward may use what it changes, as spectral norms and codebooks do, and running means are to be changed once.
    """
    for each in found:
        if each.copy is None and not each.is_steady():
            raise UnsupportedError(
                "a buffer that forward did not change at first has changed, so it cannot be computed again",
                got=f"{each.name} of a {type(each.owner).__name__}", fix="Leave its module out of recompute.",
            )  # fmt: skip
    for owner, training in {(each.owner, each.training) for each in found}:
        known = _steady.setdefault(owner, {})
        if training not in known:
            known[training] = frozenset(
                each.name for each in found if each.owner is owner and each.is_steady()
            )
    left = [(each, getattr(each.owner, each.name)) for each in found if each.copy is not None]
    for each, _ in left:
        setattr(each.owner, each.name, each.copy)
    try:
        yield
    finally:
        for each, buffer in left:
            setattr(each.owner, each.name, buffer)


SHARES = (0.25, 0.5, 1.0)


class Recompute(Pass):
    """The forward of each of ``modules`` is run under ``torch.utils.checkpoint``: it keeps only what it is given.

    Gradients stay the same to the last bit, and so do random numbers, such as those of dropout.
    """

    name: ClassVar[str] = "recompute"
    saves_memory_alone: ClassVar[bool] = True

    modules: tuple[str, ...] = Field(min_length=1, max_length=4096)
    """Paths of the modules within the wrapped model, as ``named_modules`` has them. None lies within another."""

    @field_validator("modules")
    @classmethod
    def _apart(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        return check_apart(modules)

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """A quarter, half and all of the model's repeated modules, those first that keep most for their time."""
        if len(job.stages) > 1 or job.computation is None or job.model.pass_memory is None:
            return ()
        regions = _repeated(job.model, job.model.pass_memory)
        if not regions:
            return ()
        saved_bytes = savings_bytes(job.model.pass_memory, regions)
        times_ns = forward_times_ns(job.computation, regions)
        regions.sort(key=lambda each: -saved_bytes[each] / max(1, times_ns[each]))
        counts = dict.fromkeys(max(1, round(share * len(regions))) for share in SHARES)
        return tuple(cls(modules=tuple(regions[:count])) for count in counts)

    def rewrite(self, job: Job) -> Job:
        """Backward takes as much longer as the modules' forwards take, and holds less.

        A module's forward lasts from when it first needs a parameter of its own until another module needs one. Raises
        UnsupportedError where no memory of modules was recorded, and for modules that do not train.
        """
        model = whole_model(job, "recomputation")
        memory = model.pass_memory
        check_trained(self.modules, model)
        if memory is None or not memory.modules:
            raise UnsupportedError(
                "it is not known what modules keep for backward", got=self.describe(),
                expected="a recording of stock DDP that has watched its memory",
                fix="Record the job again, without torch.compile and with one forward a step.",
            )  # fmt: skip
        changed = model.model_copy(update={"pass_memory": recomputed_memory(memory, model, self.modules)})
        again = with_timelines(job, recomputing(self.modules))
        return replace(again, stages=(changed,))

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, of which the modules recompute. Raises UnsupportedError for one that it does not have."""
        del optimizer

        for path in self.modules:
            checkpoint(module, path)
        return module

    def describe(self) -> str:
        """Say how many modules recompute, or which one."""
        return f"recompute {in_few_words(self.modules)}"


def _repeated(model: ModelSpec, memory: PassMemory) -> list[str]:
    """Modules of one parent, of those parents whose modules keep most; they train, and are called once."""
    calls = [module.module for module in memory.modules]
    siblings: dict[str, list[str]] = {}
    for call in memory.modules:
        trains = any(lies_in(parameter.module, call.module) for parameter in model.parameters)
        if trains and call.kept_bytes and calls.count(call.module) == 1:
            siblings.setdefault(call.module.rpartition(".")[0], []).append(call.module)
    kept_bytes = {each.module: each.kept_bytes for each in memory.modules}

    def saved(paths: Sequence[str]) -> int:
        return sum(kept_bytes[path] for path in paths)

    several = [paths for paths in siblings.values() if len(paths) > 1]
    return max(several, key=saved, default=[])
