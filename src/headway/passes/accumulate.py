"""Gradient accumulation at the same batch: it is split, and its parts are trained one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from headway.errors import UnsupportedError
from headway.job import Job
from headway.passes.accumulated import accumulating, in_parts
from headway.passes.base import Pass
from headway.passes.computation import whole_model, with_timelines

if TYPE_CHECKING:
    from torch import nn

COUNTS = (2, 4)


class Accumulate(Pass):
    """Each batch is split into ``micro_batches``, and one of them at a time has activations.

    Forward computes all of them and keeps nothing but what comes out, of which the script makes its loss as ever.
    Backward computes each again, and then its gradients, which add up: they are communicated once, while the last one
    is computed.
    """

    name: ClassVar[str] = "accumulate"
    saves_memory_alone: ClassVar[bool] = True

    micro_batches: int = Field(ge=2, le=4096)
    """Into how many parts a batch is split, of sizes that differ by one sample at most."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """Two and four parts, where memory was watched and no batch norm is known."""
        known = len(job.stages) == 1 and job.computation is not None and job.model.pass_memory is not None
        if not known or (job.model.chain is not None and job.model.chain.batch_norms):
            return ()
        return tuple(cls(micro_batches=count) for count in COUNTS)

    def rewrite(self, job: Job) -> Job:
        """Forward is computed twice, gradients are ready only in the last part's backward, and activations divided.

        A part is taken to need its share of the batch's time; small parts need more. Raises UnsupportedError where
        no memory was watched, for steps of several forwards, and for batch norm.
        """
        model = whole_model(job, "gradient accumulation")
        if model.chain is not None and model.chain.batch_norms:
            raise UnsupportedError(
                "a batch with batch norm cannot be split: each part would have other statistics",
                got=self.describe(), fix="Leave the pass out of the plan, or use recompute.",
            )  # fmt: skip
        memory = model.pass_memory
        if memory is None or not memory.modules or memory.gradients_accumulate:
            raise UnsupportedError(
                "it is not known what a pass of the whole batch holds", got=self.describe(),
                expected="a recording of stock DDP with one forward a step that has watched its memory",
                fix="Record the job again.",
            )  # fmt: skip
        changed = model.model_copy(update={"pass_memory": in_parts(memory, model, self.micro_batches)})
        again = with_timelines(job, accumulating(self.micro_batches))
        return replace(again, stages=(changed,))

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, whose forward splits what it is given.

        Raises UnsupportedError for batch norm. The first forward raises it for a model that mixes samples, or does not
        put out tensors of samples.
        """
        del optimizer
        from headway.passes.split_batch import split

        split(module, self.micro_batches)
        return module

    def describe(self) -> str:
        """Say how many parts there are."""
        return f"accumulate {self.micro_batches} micro-batches"
