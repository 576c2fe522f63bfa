"""What a pass does to a job, measured: the user's own command runs in turn as it is and under stock DDP with the pass.

Each run is recorded. What counts is the ratio of medians, over ranks and steps, of what forward and backward take
without waits; the memory of a pass is that of the last run. The command is the one that was recorded, and ends soon
behind the steps that were.

``python -m headway.measuring.pass_runs TRACE PASS [OPTION=VALUE ...] -- COMMAND`` measures any ``MeasuredPass``, of
whatever package. A tool that names its pass in another way calls ``measure``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from headway import torch_private
from headway.errors import HeadwayError, LaunchError, TraceError, UserError
from headway.graph.computation import Part
from headway.graph.recorded import timelines_of
from headway.job import MeasuredEffect
from headway.passes.measured import MeasuredPass
from headway.passes.registry import passes
from headway.plan import Plan
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.folder import load_trace
from headway.trace.format import Trace

ROUNDS = 2
LEAST_NS = 1_000  # of a part: what takes less does not change by a factor
Run = Callable[[Sequence[str]], int]
"""Runs a command to its end, and returns its exit status."""


def measured_effects(
    trace: Trace, changed: MeasuredPass, command: Sequence[str], run: Run, rounds: int = ROUNDS
) -> dict[str, MeasuredEffect]:
    """The effects of ``changed`` on the job of ``trace``, which ``command`` starts, by their names.

    Raises LaunchError where a run fails, TraceError where it trains another model on other ranks.
    """
    plan = Plan.data_parallel(DistributedDataParallelStrategy(), trace.world_size, trace.model)
    plan = plan.model_copy(update={"passes": (changed,), "changes_training": changed.changes_training})
    ours = (sys.executable, "-P", "-m", "headway")
    with tempfile.TemporaryDirectory(prefix=f"headway-{changed.name}-") as folder:
        path = Path(folder) / "plan.yaml"
        plan.save(path)
        under = (*ours, "run", "--plan", str(path), "--", *command)
        stock: list[Trace] = []
        other: list[Trace] = []
        for number in range(rounds):
            for found, what in ((stock, tuple(command)), (other, under)):
                out = Path(folder) / f"{number}-{len(stock)}-{len(other)}"
                found.append(_recorded(trace, out, (*ours, "record", "--no-measuring"), what, run))
        return effects_between(stock, other, changed)


def effects_between(
    stock: Sequence[Trace], other: Sequence[Trace], changed: MeasuredPass
) -> dict[str, MeasuredEffect]:
    """What ``changed``, under which ``other`` were recorded, does to the job that was recorded as ``stock``."""
    factors = {part: _factor(stock, other, part) for part in changed.parts}
    memory = other[-1].model.pass_memory
    return {
        changed.effect_name(part): MeasuredEffect(factor, memory=memory if part == changed.parts[0] else None)
        for part, factor in factors.items()
    }


def measure(arguments: Sequence[str], pass_for: Callable[[Trace, tuple[str, ...]], MeasuredPass]) -> None:
    """Measure for a trace as its ``arguments`` say, TRACE [WORD ...] -- COMMAND, and write it into its folder.

    ``pass_for`` makes the pass of the trace and the words, and raises UserError for such as it does not know.
    """
    from headway.replayer.measured_effects import save_effects

    own, command = _split(arguments)
    if not own or not command:
        raise UserError(
            "the trace or the command that was recorded is missing",
            got=" ".join(arguments) or "nothing", expected="TRACE ... -- COMMAND",
        )  # fmt: skip
    trace = load_trace(own[0])
    effects = measured_effects(trace, _made(pass_for, trace, tuple(own[1:])), command, _run)
    save_effects(trace, effects, str(torch_private.compute_device()))
    for name, effect in effects.items():
        print(f"{name}: {effect.factor:.3g} times the time")


def run_command_line(
    arguments: Sequence[str], usage: str | None, answer: Callable[[Sequence[str]], None]
) -> int:
    """Have ``answer`` carry out ``arguments``, or print the ``usage``. Returns the exit status, as ``headway`` does."""
    own, _ = _split(arguments)
    if {"-h", "--help"} & set(own):
        print(usage)
        return 0
    try:
        if options := [word for word in own if word.startswith("-")]:
            raise UserError("there are no such options", got=" ".join(options), expected="--help alone")
        answer(arguments)
    except HeadwayError as failure:
        print(f"headway: {failure} See --help.", file=sys.stderr)
        return 2 if isinstance(failure, UserError) else 1
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return 130
    return 0


def pass_of(_trace: Trace, words: Sequence[str]) -> MeasuredPass:
    """The pass that the first of ``words`` names, with options as in ``block=64``. Raises UserError for others."""
    measured = {name: kind for name, kind in passes().items() if issubclass(kind, MeasuredPass)}
    if not words or words[0] not in measured:
        raise UserError(
            "that is no pass that can be measured", got=" ".join(words) or "nothing", expected=" or ".join(measured)
        )  # fmt: skip
    options: dict[str, object] = {}
    for word in words[1:]:
        name, is_option, text = word.partition("=")
        if not is_option:
            raise UserError("options of a pass have a value each", got=word, expected="OPTION=VALUE")
        try:
            options[name] = json.loads(text)
        except ValueError:  # a word needs no quotes
            options[name] = text
    return measured[words[0]].model_validate(options)


def _made(
    pass_for: Callable[[Trace, tuple[str, ...]], MeasuredPass], trace: Trace, words: tuple[str, ...]
) -> MeasuredPass:
    """The pass, once it is known that it can be for this model: runs take their time."""
    try:
        changed = pass_for(trace, words)
    except ValidationError as failure:
        raise UserError(
            failure.errors(include_url=False)[0]["msg"].removeprefix("Value error, "), got=" ".join(words)
        ) from None
    changed.check_model(trace.model)
    return changed


def _recorded(trace: Trace, out: Path, record: Sequence[str], command: Sequence[str], run: Run) -> Trace:
    steps = f"{trace.steps[0]}:{trace.steps[-1] + 1}"
    status = run((*record, "-o", str(out), "--steps", steps, "--", *command))
    if status != 0:
        raise LaunchError(
            "a run that was to be measured failed", got=f"exit status {status}", expected="0",
            fix="See what it printed.",
        )  # fmt: skip
    found = load_trace(out)
    for what, got, expected in (
        ("model", found.model.fingerprint, trace.model.fingerprint),
        ("number of ranks", found.world_size, trace.world_size),
    ):
        if got != expected:
            raise TraceError(
                f"the command trains another {what} than was recorded", got=str(got), expected=str(expected),
                fix="Give the command that was recorded.",
            )  # fmt: skip
    return found


def _factor(stock: Iterable[Trace], other: Iterable[Trace], part: str) -> float:
    before_ns = _typical_ns(stock, part)
    return max(1.0, _typical_ns(other, part)) / before_ns if before_ns >= LEAST_NS else 1.0


def _typical_ns(traces: Iterable[Trace], part: str) -> float:
    times_ns = [
        sum(item.duration_ns for item in timeline.items if item.kind == part)
        for trace in traces
        for steps in timelines_of(trace).values()
        for timeline in steps
    ]
    # Batches of several workers come in bursts: one long wait, and then none for a while.
    return statistics.mean(times_ns) if part == Part.INPUT else statistics.median(times_ns)


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False, stdout=sys.stderr).returncode


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


if __name__ == "__main__":
    sys.exit(run_command_line(sys.argv[1:], __doc__, lambda words: measure(words, pass_of)))
