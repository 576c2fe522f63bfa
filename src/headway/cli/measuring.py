"""``headway optimize --measure``: compare plans by short runs of the user's command."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from headway.cli.output import trailing_command
from headway.errors import UserError
from headway.integrations.short_runs import ShortRuns, check_command

if TYPE_CHECKING:
    from headway.optimization.candidate import Candidate
    from headway.optimization.measured import Contenders, MeasuredChoice
    from headway.optimization.result import SearchResult
    from headway.replayer.replayer import Replayer

UNDECIDED = 0  # of --measure without a number
NOT_NEEDED = "Nothing was measured: predictions already tell which plan is the best."
WENT_ON = "your script catches SystemExit, so each run continues to the end of training"


def command_to_measure_with(ctx: click.Context, count: int | None, *, follow: bool) -> tuple[str, ...]:
    """The command after ``--`` if plans are measured (``count`` is not None), else ().

    Raises UserError for a missing or superfluous command, and if plans would ``follow`` the network.
    """
    if count is None:
        if ctx.find_root().meta.get("headway.command"):
            raise UserError(
                "a command after -- is only used to measure plans",
                fix="Add --measure, or remove the command.",
            )
        return ()
    if follow:
        raise UserError(
            "plans that follow the network cannot be measured", fix="Remove --measure or --follow-network."
        )
    return trailing_command(ctx)


def decide_by_runs(
    best: Candidate,
    result: SearchResult,
    replayer: Replayer,
    count: int | None,
    strategy: str | None,
    command: Sequence[str],
    plan_path: Path,
) -> tuple[Candidate, MeasuredChoice | None]:
    """Choose the plan: ``best`` as predicted, or by short runs of ``command`` if ``count`` is not None.

    ``count`` is how many plans to measure. Returns the plan, and the measurements if there are any. Raises the errors
    of ``measure_plans``.
    """
    from headway.optimization.measured import contenders

    if count is None:
        return best, None
    among = contenders(result, best, count or None, strategy)
    if not among.plans:
        return best, None
    chosen = measure_plans(among, replayer, command, plan_path)
    return chosen.taken.candidate, chosen


def measure_plans(
    contenders: Contenders, replayer: Replayer, command: Sequence[str], plan_path: Path
) -> MeasuredChoice:
    """Run ``command`` under each contender's plan, written to a temporary folder next to ``plan_path``.

    Raises LaunchError if the command is for another job, or fails under the recorded plan.
    """
    from headway.optimization.measured import choose, runs_by_plan
    from headway.optimization.result import plan_of

    check_command(command, replayer.trace.world_size)
    with _folder_next_to(plan_path) as folder:
        paths: dict[int, Path | None] = {}
        for number, contender in enumerate(contenders.all):
            paths[id(contender)] = folder / f"plan-{number}.yaml" if runs_by_plan(contender) else None
            if (path := paths[id(contender)]) is not None:
                plan_of(contender, replayer).save(path)
        runs = ShortRuns(command, folder, replayer.trace.world_size, replayer.recorded_step_ms)
        warned = False

        def run(candidate: Candidate, steps: int) -> Sequence[float]:
            nonlocal warned
            short = runs.run(paths[id(candidate)], steps)
            if short.went_on and not warned:
                warned = True
                print(f"headway: {WENT_ON}", file=sys.stderr, flush=True)
            return short.steps_ms

        return choose(contenders, run, replayer.recorded_step_ms, _progress)


@contextmanager
def _folder_next_to(path: Path) -> Iterator[Path]:
    """A temporary folder next to ``path``. Raises UserError if it cannot be made."""
    parent = path.absolute().parent
    try:
        folder = tempfile.TemporaryDirectory(prefix=".headway-measure-", dir=parent)
    except OSError as failure:
        raise UserError(
            f"cannot write to {parent}", got=failure.strerror, expected="a writable folder",
            fix="Choose another with -o.",
        ) from None  # fmt: skip
    with folder as name:
        yield Path(name)


def _progress(done: int, of: int, best: str) -> None:
    print(f"headway: run {done} of {of}; fastest so far: {best} a step", file=sys.stderr, flush=True)


def measured_document(choice: MeasuredChoice | None, predicted: Candidate) -> dict[str, Any] | None:
    """The measurements as JSON data, or None. ``predicted`` is the best plan as predicted."""
    if choice is None:
        return None
    return {
        "plans": [
            {
                "name": plan.candidate.name,
                "measured_ms": plan.step_ms,
                "spread_ms": plan.spread_ms,
                "runs_ms": list(plan.measured.runs_ms),
                "steps": sum(plan.measured.steps),
                "predicted_ms": plan.candidate.predicted_ms,
                "uncertainty_ms": plan.candidate.uncertainty_ms,
                "as_predicted": plan.as_predicted,
                "rounds": plan.beside.rounds,
                "kept": plan.kept,
            }
            for plan in choice.plans
        ],
        "taken": choice.taken.candidate.name,
        "why": choice.why,
        "failed": [{"name": candidate.name, "reason": reason} for candidate, reason in choice.failed],
        "passed_over": predicted.name if _is_passed_over(choice, predicted) else None,
        "runs": choice.runs,
        "elapsed_s": choice.elapsed_s,
    }


def _is_passed_over(choice: MeasuredChoice, predicted: Candidate) -> bool:
    """Whether the best predicted plan was not considered because short runs cannot measure it."""
    from headway.optimization.measured import is_measurable

    return (
        predicted.changed and not is_measurable(predicted) and predicted.predicted_ms < choice.taken.step_ms
    )


def measured_sentences(choice: MeasuredChoice, predicted: Candidate) -> list[str]:
    """Sentences about the outcome of short runs; ``predicted`` is the best plan as predicted."""
    sentences = [
        f"Measured in {choice.runs} short runs of your command ({choice.elapsed_s:.0f} s). {choice.why}."
    ]
    if _is_passed_over(choice, predicted):
        sentences.append(
            f"{predicted.short_name} is predicted to take {predicted.predicted_ms:.1f} ± "
            f"{predicted.uncertainty_ms:.1f} ms, but short runs cannot measure it: remove --measure to use it."
        )
    return sentences + [
        f"{candidate.short_name} could not be run: {reason}" for candidate, reason in choice.failed
    ]


def measured_table(choice: MeasuredChoice | None) -> Iterator[Table | str]:
    """A table of measured plans with their predictions, or a sentence if nothing was measured."""
    if choice is None:
        yield NOT_NEEDED
        return
    table = Table(title="Plans as measured, fastest first", title_justify="left", box=None, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for header in ("measured ms", "± ms", "predicted ms", "± ms", "rounds", "steps"):
        table.add_column(header, justify="right")
    for plan in choice.plans:
        candidate = plan.candidate
        notes = [
            *(["what you have"] if not candidate.changed else []),
            *(["taken"] if plan is choice.taken and candidate.changed else []),
        ]
        table.add_row(
            candidate.short_name + (f" ({', '.join(notes)})" if notes else ""),
            f"{plan.step_ms:.1f}",
            f"{plan.spread_ms:.1f}",
            f"{candidate.predicted_ms:.1f}",
            f"{candidate.uncertainty_ms:.1f}",
            str(plan.beside.rounds),
            str(sum(plan.measured.steps)),
        )
    yield table
    if choice.left_with is not None:
        yield (
            f"Each plan is compared with {choice.left_with.candidate.short_name} over the rounds in which both "
            "ran, so that other load on the machine affects both alike."
        )
