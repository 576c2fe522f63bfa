"""Activation recomputation: what modules keep for backward is let go, and computed again when backward needs it.

After Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, field_validator

from headway.errors import UnsupportedError
from headway.job import Job
from headway.model import ModelSpec, PassMemory
from headway.passes.base import Pass
from headway.passes.computation import whole_model, with_timelines
from headway.passes.recomputed_memory import recomputed_memory, savings_bytes
from headway.passes.recomputed_times import forward_times_ns, recomputing
from headway.passes.regions import check_apart, check_trained, in_few_words, lies_in

if TYPE_CHECKING:
    from torch import nn

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
        from headway.passes.checkpointed import checkpoint

        for path in self.modules:
            checkpoint(module, path)
        return module

    def describe(self) -> str:
        """Say how many modules recompute, or which one."""
        return f"recompute {in_few_words(self.modules)}"


def _repeated(model: ModelSpec, memory: PassMemory) -> list[str]:
    """Modules of one parent, of those parents whose modules keep most; they train, and are called once."""
    calls = [each.module for each in memory.modules]
    siblings: dict[str, list[str]] = {}
    for call in memory.modules:
        trains = any(lies_in(each.module, call.module) for each in model.parameters)
        if trains and call.kept_bytes and calls.count(call.module) == 1:
            siblings.setdefault(call.module.rpartition(".")[0], []).append(call.module)
    kept_bytes = {each.module: each.kept_bytes for each in memory.modules}

    def saved(paths: Sequence[str]) -> int:
        return sum(kept_bytes[each] for each in paths)

    several = [paths for paths in siblings.values() if len(paths) > 1]
    return max(several, key=saved, default=[])
