"""A schedule as a picture in text: a line a rank, a column a unit of time, the micro-batch in every cell."""

from __future__ import annotations

from collections.abc import Mapping

from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule
from headway.scheduling.pipeline.timing import UNITS, ideal_times


def picture(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> str:
    """The schedule as it would run where transfers take no time; dots are waiting.

    Cells are F (forward), B (backward), I and W (its halves: gradients of inputs and of weights), each with the number
    of its micro-batch, and before it that of its stage where ranks have several.
    """
    times = ideal_times(schedule, units)
    several = schedule.stages > len(schedule.ranks)
    names = {action: _name(action, with_stage=several) for action in times.order}
    width = 1 + max(map(len, names.values()))
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        cells = ["·"] * times.total
        for action in actions:
            begin, end = times.begins[action], times.ends[action]
            cells[begin:end] = [names[action], *["─" * (width - 1)] * (end - begin - 1)]
        lines.append(f"rank {rank:<{len(str(len(schedule.ranks) - 1))}}  " + _row(cells, width))
    return "\n".join(lines)


def _row(cells: list[str], width: int) -> str:
    return "".join(cell.ljust(width) for cell in cells).rstrip()


def _name(action: Action, *, with_stage: bool) -> str:
    stage = f"{action.stage}" if with_stage else ""
    return f"{stage}{action.kind.value}{action.micro_batch}"
