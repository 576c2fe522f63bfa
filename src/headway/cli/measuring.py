"""``headway optimize --measure``: short runs of the user's own command decide among plans."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from headway.cli.command import trailing_command
from headway.errors import UserError
from headway.integrations.short_runs import ShortRuns, check_command

if TYPE_CHECKING:
    from headway.optimization.candidate import Candidate
    from headway.optimization.measured.choice import MeasuredChoice
    from headway.optimization.measured.contenders import Contenders
    from headway.optimization.result import SearchResult
    from headway.replayer.replayer import Replayer

UNDECIDED = 0  # of --measure without a number
NOT_NEEDED = (
    "Nothing was measured: of the plans that the command can follow, predictions leave no two that may be the "
    "best."
)
WENT_ON = (
    "the command goes on when it is to end after its last timed step (it catches SystemExit), so each run takes as "
    "long as the command does"
)


def command_to_measure_with(ctx: click.Context, count: int | None, *, follow: bool) -> tuple[str, ...]:
    """The command after ``--``, if ``count`` says that plans are measured.

    Raises UserError where there is one and nothing is measured, or none, and for plans that cannot be measured.
    """
    if count is None:
        if ctx.find_root().meta.get("headway.command"):
            raise UserError("a command is run only to measure plans", fix="Add --measure, or leave it out.")
        return ()
    if follow:
        raise UserError(
            "plans that follow the network are not measured", fix="Leave out --measure or --follow-network."
        )
    return trailing_command(ctx)


def decide_by_runs(
    best: Candidate,
    found: SearchResult,
    replayer: Replayer,
    count: int | None,
    strategy: str | None,
    command: Sequence[str],
    plan_path: Path,
) -> tuple[Candidate, MeasuredChoice | None]:
    """The plan to take, and how it was chosen where runs of ``command`` have decided.

    ``best`` is what predictions say, ``count`` how many plans are measured, if any. Raises as ``measure_plans``.
    """
    from headway.optimization.measured.contenders import contenders

    if count is None:
        return best, None
    among = contenders(found, best, count or None, strategy)
    if not among.plans:
        return best, None
    chosen = measure_plans(among, replayer, command, plan_path)
    return chosen.taken.candidate, chosen


def measure_plans(
    contenders: Contenders, replayer: Replayer, command: Sequence[str], plan_path: Path
) -> MeasuredChoice:
    """Run ``command`` under the contenders' plans, which are written next to ``plan_path`` while that lasts.

    Raises LaunchError where it is another job's command, or fails under a plan that it would be left with.
    """
    from headway.optimization.measured.choice import choose
    from headway.optimization.measured.contenders import runs_by_plan
    from headway.optimization.plan_writing import plan_of

    check_command(command, replayer.trace.world_size)
    with _folder_next_to(plan_path) as folder:
        paths: dict[int, Path | None] = {}
        for number, each in enumerate(contenders.all):
            paths[id(each)] = folder / f"plan-{number}.yaml" if runs_by_plan(each) else None
            if (path := paths[id(each)]) is not None:
                plan_of(each, replayer).save(path)
        runs = ShortRuns(command, folder, replayer.trace.world_size, replayer.recorded_step_ms)
        said: set[str] = set()

        def run(candidate: Candidate, steps: int) -> Sequence[float]:
            made = runs.run(paths[id(candidate)], steps)
            if made.went_on and WENT_ON not in said:
                said.add(WENT_ON)
                print(f"headway: {WENT_ON}", file=sys.stderr, flush=True)
            return made.steps_ms

        return choose(contenders, run, replayer.recorded_step_ms, _progress)


@contextmanager
def _folder_next_to(path: Path) -> Iterator[Path]:
    """A folder next to ``path`` for as long as the block lasts. Raises UserError where there can be none."""
    parent = path.absolute().parent
    try:
        made = tempfile.TemporaryDirectory(prefix=".headway-measure-", dir=parent)
    except OSError as failure:
        raise UserError(
            f"cannot write to {parent}", got=failure.strerror, expected="a folder for the plan",
            fix="Name another one with -o.",
        ) from None  # fmt: skip
    with made as name:
        yield Path(name)


def _progress(done: int, of: int, best: str) -> None:
    print(f"headway: run {done} of {of}; fastest so far: {best} a step", file=sys.stderr, flush=True)


def measured_document(choice: MeasuredChoice | None, predicted: Candidate) -> dict[str, Any] | None:
    """What was measured, as a document; None where nothing was. ``predicted`` is the best as predicted."""
    if choice is None:
        return None
    return {
        "plans": [
            {
                "name": each.candidate.name,
                "measured_ms": each.measured.step_ms,
                "spread_ms": each.measured.spread_ms,
                "runs_ms": list(each.measured.runs_ms),
                "steps": sum(each.measured.steps),
                "predicted_ms": each.candidate.predicted_ms,
                "uncertainty_ms": each.candidate.uncertainty_ms,
                "as_predicted": each.as_predicted,
                "rounds": each.rounds,
                "kept": each.kept,
            }
            for each in choice.plans
        ],
        "taken": choice.taken.candidate.name,
        "why": choice.why,
        "gain_is_unclear": choice.gain_is_unclear,
        "failed": [{"name": candidate.name, "reason": reason} for candidate, reason in choice.failed],
        "passed_over": predicted.name if _is_passed_over(choice, predicted) else None,
        "runs": choice.runs,
        "elapsed_s": choice.elapsed_s,
    }


def _is_passed_over(choice: MeasuredChoice, predicted: Candidate) -> bool:
    """Whether the plan that is ``predicted`` to be the best is one that no short run can measure."""
    from headway.optimization.measured.contenders import is_measurable

    return not is_measurable(predicted) and predicted.predicted_ms < choice.taken.measured.step_ms


def measured_sentences(choice: MeasuredChoice, predicted: Candidate) -> list[str]:
    """What short runs have decided; ``predicted`` is the best as predicted."""
    taken = choice.taken.measured
    said = [
        f"Measured in {choice.runs} short runs of the command ({choice.elapsed_s:.0f} s): {taken.step_ms:.1f} ± "
        f"{taken.spread_ms:.1f} ms a step. {choice.why}."
    ]
    if _is_passed_over(choice, predicted):
        said.append(
            f"{predicted.name} is predicted to take {predicted.predicted_ms:.1f} ± {predicted.uncertainty_ms:.1f} ms, "
            "but short runs cannot measure it: leave out --measure to have it."
        )
    return said + [f"{candidate.name} could not be run: {reason}" for candidate, reason in choice.failed]


def measured_table(choice: MeasuredChoice | None) -> Table | str:
    """The plans that were measured, beside what was predicted of them; a sentence where none had to be."""
    if choice is None:
        return NOT_NEEDED
    table = Table("measured plan", "measured ms", "± ms", "predicted ms", "± ms", "rounds", "steps")
    for each in choice.plans:
        own, candidate = each.measured, each.candidate
        table.add_row(
            candidate.name + " (as it would be left)" * each.kept,
            f"{own.step_ms:.1f}",
            f"{own.spread_ms:.1f}",
            f"{candidate.predicted_ms:.1f}",
            f"{candidate.uncertainty_ms:.1f}",
            str(each.rounds),
            str(sum(own.steps)),
        )
    return table
