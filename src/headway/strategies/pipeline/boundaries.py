"""What stages are given and hand on: every rank checks, before anything is trained, that neighbours agree about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from headway.errors import UserError
from headway.torch_private.pipelining import PipelineSteps, tensors_in

Given = Mapping[str, Any]
Shapes = tuple[tuple[int, ...], ...]
_LONGEST = 2**16  # of what a rank says, in bytes


class BatchCheck:
    """Holds the micro-batches of every step against each other, and against those of the first step."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._first: dict[str, Shapes] = {}

    def trouble(self, given: Given) -> str:
        """What is wrong with the micro-batches that a step of this rank is given; "" where nothing is."""
        for name, what in (("arg_mbs", "batch"), ("kwarg_mbs", "batch"), ("target_mbs", "target")):
            shapes = [_shapes(each) for each in given.get(name) or ()]
            if shapes and (found := self._trouble(what, name, shapes)):
                return found
        return ""

    def _trouble(self, what: str, name: str, shapes: Sequence[Shapes]) -> str:
        count = self._micro_batches
        if len(shapes) != count or any(0 in shape for own in shapes for shape in own):
            return f"the {what} has fewer samples than the {count} micro-batches that it is to be split into"
        if any(own != shapes[0] for own in shapes):
            sizes = ", ".join(str(own[0][0]) if own and own[0] else "?" for own in shapes)
            return f"the {what} cannot be split into {count} micro-batches of one size: they have {sizes} samples"
        first = self._first.setdefault(name, shapes[0])
        if first != shapes[0]:
            return (
                f"the {what} has micro-batches of other shapes ({_said(shapes[0])}) than in the first step "
                f"({_said(first)})"
            )
        return ""


def agree(steps: PipelineSteps, trouble: str) -> None:
    """Raise UserError on all ranks of a pipeline where one of them has ``trouble`` with what its step is given."""
    for rank, said in enumerate(_from_every_rank(steps, {"trouble": trouble})):
        if said["trouble"]:
            refuse(f"rank {rank}: {said['trouble']}")


def refuse(trouble: str) -> None:
    """Raise UserError for a batch with ``trouble``."""
    raise UserError(
        "a step of a pipeline was given what it cannot train on",
        got=trouble,
        expected="micro-batches of one size, the same in every step",
        fix="Leave out what is left at the end of an epoch (drop_last=True in a DataLoader), or choose another number "
        "of micro-batches.",
    )


def check(steps: PipelineSteps) -> None:
    """Raise UserError on all ranks where a stage expects something else than the one before it hands on.

    Every rank calls it in the same step, when its stages are prepared. Raises it too for stages that hand on what no
    message carries as it is: torch receives a DTensor of ranks that do not take part as an empty tensor.
    """
    own = {
        str(stage): {"in": steps.given_to(stage), "out": steps.handed_on_by(stage)} for stage in steps.stages
    }
    said = {int(stage): ends for of_rank in _from_every_rank(steps, own) for stage, ends in of_rank.items()}
    for stage in range(steps.stage_count - 1):
        out, into = said[stage]["out"], said[stage + 1]["in"]
        if any("DTensor" in each for each in (*out, *into)):
            raise UserError(
                "a stage hands on a DTensor", got=f"{', '.join(out)} of stage {stage}", expected="plain tensors",
                fix="Return output.full_tensor() or output.to_local() from the stage.",
            )  # fmt: skip
        if out and out != into:
            raise UserError(
                f"stages {stage} and {stage + 1} disagree about what is handed on",
                got=f"{', '.join(out)} of stage {stage}",
                expected=f"{', '.join(into) or 'nothing'}, which stage {stage + 1} is to be given",
                fix="Give PipelineStage input_args and output_args that are those of its module, or neither.",
            )


def _shapes(given: Any) -> Shapes:
    return tuple(tuple(each.shape) for each in tensors_in(given))


def _said(shapes: Shapes) -> str:
    return ", ".join(str(list(each)) for each in shapes) or "no tensor"


def _from_every_rank(steps: PipelineSteps, own: Any) -> list[Any]:
    """What each rank of the pipeline says, as JSON."""
    text = json.dumps(own).encode()
    assert len(text) <= _LONGEST, "a rank says too much"
    ranks = dist.get_world_size(steps.group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=steps.device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=steps.device), group=steps.group)
    longest = int(max(lengths))
    mine = torch.zeros(longest, dtype=torch.uint8, device=steps.device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(texts, mine, group=steps.group)
    return [
        json.loads(bytes(each[: int(length)].tolist())) for each, length in zip(texts, lengths, strict=True)
    ]
