"""Activation recomputation: modules free their activations, and recompute them when backward needs them.

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
    """The memory that each region saves between forward and backward. Raises UnsupportedError unless called once."""
    return {region: call.kept_bytes for region, call in _calls(memory, regions).items()}


def recomputed_memory(memory: PassMemory, model: ModelSpec, regions: Sequence[str]) -> PassMemory:
    """``memory`` with ``regions`` recomputed. Raises UnsupportedError for a region that is not called exactly once."""
    calls = _calls(memory, regions)
    open_ = dict(calls)  # regions not yet recomputed
    backward = []
    owners = {parameter.name: parameter.module for parameter in model.parameters}
    for name, held_bytes in memory.backward:
        region = region_of(owners.get(name, ""), regions)
        open_.pop(region, None)
        saved_bytes = sum(call.kept_bytes for call in open_.values())
        backward.append((name, max(0, held_bytes - saved_bytes)))
    return memory.model_copy(
        update={
            "forward_bytes": max(_forward_bytes(memory, calls), default=memory.forward_bytes),
            "backward": tuple(backward),
            "modules": (),  # recorded without recomputation, so no longer valid
        }
    )


def _calls(memory: PassMemory, regions: Sequence[str]) -> dict[str, ModuleMemory]:
    call_of_region = {}
    for region in regions:
        calls = [module for module in memory.modules if module.module == region]
        if len(calls) != 1:
            raise UnsupportedError(
                "recomputation can only be predicted for modules that forward calls once",
                got=f"{region}, called {len(calls)} times" if calls else f"no call of {region}",
                fix="Name modules that forward calls once.",
            )  # fmt: skip
        (call_of_region[region],) = calls
    return call_of_region


def _forward_bytes(memory: PassMemory, calls: dict[str, ModuleMemory]) -> Iterator[int]:
    """Yield the peak during each call outside and inside regions, and the memory at the end of forward."""
    regions = tuple(calls)
    gone_bytes = end_bytes = 0
    for call in memory.modules:
        region = region_of(call.module, regions)
        if region == call.module:
            inner = [
                module for module in memory.modules if module is not call and lies_in(module.module, region)
            ]
            rise_bytes = max(
                (inner_call.peak_bytes - inner_call.begin_bytes for inner_call in inner), default=0
            )
            yield call.begin_bytes - gone_bytes + max(rise_bytes, call.output_bytes)
            gone_bytes += call.kept_bytes
        elif not region and not any(lies_in(path, call.module) for path in regions):
            yield call.peak_bytes - gone_bytes
        end_bytes = calls.get(region, call).end_bytes
    yield max(0, end_bytes - gone_bytes)


def recomputing(regions: Sequence[str]) -> Callable[[Timeline], Timeline]:
    """A function that changes a step's timeline: each region's forward is repeated before its first gradient."""

    def change(timeline: Timeline) -> Timeline:
        walk = _Walk(regions)
        for item in timeline.items:
            walk.add(item)
        return Timeline(timeline.rank, timeline.step, tuple(walk.all_items()), timeline.background_ns)

    return change


def forward_times_ns(computation: Computation, regions: Sequence[str]) -> dict[str, int]:
    """The forward time of each region, in the first step of the first rank."""
    timeline = next(iter(computation.timelines.values()))[0]
    walk = _Walk(regions)
    for item in timeline.items:
        walk.add(item)
    return {region: walk.longest_ns.get(region, 0) for region in regions}


class _Walk:
    """Walks through a step: sums the forward times of regions, and inserts them into the following backward."""

    def __init__(self, regions: Sequence[str]) -> None:
        self.longest_ns: dict[str, int] = {}
        self._regions = regions
        self._items: list[Item] = []
        self._pending: dict[str, int] = {}
        self._current = ""  # the current region
        self._in_backward = False
        self._at = 0  # where to insert a recomputation before the next gradient

    def add(self, item: Item) -> None:
        match item.kind:
            case Point.USE if not self._in_backward:
                self._current = region_of(item.name, self._regions)
            case Part.FORWARD if item.duration_ns:
                self._leave_backward()
                if self._current:
                    before_ns = self._pending.get(self._current, 0)
                    self._pending[self._current] = before_ns + item.duration_ns
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
        """The changed step."""
        self._leave_backward()
        return self._items

    def _leave_backward(self) -> None:
        """At its end, recompute regions without a ready gradient, as when gradients are accumulated."""
        if self._in_backward:
            for region in list(self._pending):
                self._at = len(self._items)
                self._insert(region)
            self._in_backward = False

    def _insert(self, region: str) -> None:
        if (duration_ns := self._pending.pop(region, 0)) > 0:
            self._items.insert(self._at, Item(Part.BACKWARD, "", duration_ns))


def checkpoint(root: nn.Module, path: str) -> None:
    """Make the module at ``path`` in ``root`` recompute.

    Raises UnsupportedError if there is none, or if another pass has changed it.
    """
    give_forward(module_at(root, path, "recompute"), repr(path), recomputed)


def recomputed(forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` of ``module``, keeping only its inputs for backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpointed(forward, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _as_before(module, _save_buffers(module))


class _SavedBuffer(NamedTuple):
    """A buffer before forward. ``copy`` is None if forward is known not to change it."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    training: bool
    copy: torch.Tensor | None

    def is_steady(self) -> bool:
        """Whether forward left it unchanged."""
        now = getattr(self.owner, self.name)
        same = now is self.buffer and version_of(now) == self.version
        return same and (self.copy is None or torch.equal(now, self.copy))


_steady: WeakKeyDictionary[nn.Module, dict[bool, frozenset[str]]] = WeakKeyDictionary()
"""For each module, the buffers that its first forward left unchanged, by training mode."""


def _save_buffers(module: nn.Module) -> list[_SavedBuffer]:
    """The current buffers of ``module``, with copies of those that its forward may change."""
    saved = []
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            copy = None if name in _steady.get(submodule, {}).get(submodule.training, ()) else buffer.clone()
            saved.append(_SavedBuffer(submodule, name, buffer, version_of(buffer), submodule.training, copy))
    return saved


@contextmanager
def _as_before(module: nn.Module, saved: list[_SavedBuffer]) -> Iterator[None]:
    """Recompute with the buffers from before forward, and afterwards restore those that forward left.

    Forward may read buffers that it changes, like spectral norms and codebooks; running means must change only once.
    """
    for entry in saved:
        if entry.copy is None and not entry.is_steady():
            raise UnsupportedError(
                "cannot recompute: forward changed a buffer that it left unchanged at first",
                got=f"{entry.name} of a {type(entry.owner).__name__}", fix="Leave its module out of recompute.",
            )  # fmt: skip
    for owner, training in {(entry.owner, entry.training) for entry in saved}:
        steady = _steady.setdefault(owner, {})
        if training not in steady:
            steady[training] = frozenset(
                entry.name for entry in saved if entry.owner is owner and entry.is_steady()
            )
    left = [(entry, getattr(entry.owner, entry.name)) for entry in saved if entry.copy is not None]
    for entry, _ in left:
        setattr(entry.owner, entry.name, entry.copy)
    try:
        yield
    finally:
        for entry, buffer in left:
            setattr(entry.owner, entry.name, buffer)


SHARES = (0.25, 0.5, 1.0)


class Recompute(Pass):
    """Runs the forward of each of ``modules`` under ``torch.utils.checkpoint``, which keeps only their inputs.

    Gradients are bitwise the same, and so are random numbers, as in dropout.
    """

    name: ClassVar[str] = "recompute"
    saves_memory_alone: ClassVar[bool] = True

    modules: tuple[str, ...] = Field(min_length=1, max_length=4096)
    """Paths of modules in the wrapped model, as in ``named_modules``; none may lie within another."""

    @field_validator("modules")
    @classmethod
    def _apart(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        return check_apart(modules)

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """A quarter, half and all of the model's repeated modules, in order of memory saved per time."""
        if len(job.stages) > 1 or job.computation is None or job.model.pass_memory is None:
            return ()
        regions = _repeated(job.model, job.model.pass_memory)
        if not regions:
            return ()
        saved_bytes = savings_bytes(job.model.pass_memory, regions)
        times_ns = forward_times_ns(job.computation, regions)
        regions.sort(key=lambda region: -saved_bytes[region] / max(1, times_ns[region]))
        counts = dict.fromkeys(max(1, round(share * len(regions))) for share in SHARES)
        return tuple(cls(modules=tuple(regions[:count])) for count in counts)

    def rewrite(self, job: Job) -> Job:
        """Add the modules' forward times to backward, and subtract their activations.

        A module's forward lasts from its first use of one of its parameters until another module uses one. Raises
        UnsupportedError for recordings without memory of modules, and for modules without trained parameters.
        """
        model = whole_model(job, "recomputation")
        memory = model.pass_memory
        check_trained(self.modules, model)
        if memory is None or not memory.modules:
            raise UnsupportedError(
                "the recording lacks the memory that modules keep for backward", got=self.describe(),
                expected="a recording of stock DDP with memory",
                fix="Record the job again, without torch.compile and with one forward per step.",
            )  # fmt: skip
        changed = model.model_copy(update={"pass_memory": recomputed_memory(memory, model, self.modules)})
        again = with_timelines(job, recomputing(self.modules))
        return replace(again, stages=(changed,))

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Make the modules recompute; returns ``module``. Raises UnsupportedError for unknown paths."""
        del optimizer

        for path in self.modules:
            checkpoint(module, path)
        return module

    def describe(self) -> str:
        """The module to recompute, or the number of modules."""
        return f"recompute {in_few_words(self.modules)}"


def _repeated(model: ModelSpec, memory: PassMemory) -> list[str]:
    """Sibling modules that train and are called once: of all parents, those that keep most for backward."""
    calls = [module.module for module in memory.modules]
    siblings: dict[str, list[str]] = {}
    for call in memory.modules:
        trains = any(lies_in(parameter.module, call.module) for parameter in model.parameters)
        if trains and call.kept_bytes and calls.count(call.module) == 1:
            siblings.setdefault(call.module.rpartition(".")[0], []).append(call.module)
    kept_bytes = {module.module: module.kept_bytes for module in memory.modules}

    def saved(paths: Sequence[str]) -> int:
        return sum(kept_bytes[path] for path in paths)

    several = [paths for paths in siblings.values() if len(paths) > 1]
    return max(several, key=saved, default=[])
