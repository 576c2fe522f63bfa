"""``headway run``: run an unmodified command under a plan."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.cli.output import trailing_command
from headway.errors import LaunchError, PlanError, one_line
from headway.integrations.launch import (
    CommandOutcome,
    injected_environment,
    run_command,
    spreads,
    starts_all_here,
)
from headway.integrations.reports import Report
from headway.integrations.short_runs import LEAST_STEPS
from headway.units import counted

if TYPE_CHECKING:
    from headway.plan import Plan

NOISE = 0.05  # of the recorded step: two runs of one job may differ by this


@click.command(options_metavar="[OPTIONS] -- COMMAND")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), required=True, help="The plan to run.")
@click.option(
    "--decisions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every decision made during training to this file; headway decisions FILE prints it.",
)
@click.option(
    "--adapt", is_flag=True,
    help="Monitor the job, and adapt its schedule when the network or the ranks change.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Do not print the plan, its decisions and the step times.")
@click.pass_context
def run(ctx: click.Context, plan_path: Path, decisions: Path | None, adapt: bool, quiet: bool) -> None:
    """Run COMMAND under a plan.

    headway run --plan plan.yaml -- torchrun --nproc-per-node 2 train.py

    The script constructs DistributedDataParallel as before, and gets what the plan says. A line on stderr names the
    plan, and a line at the end gives the step time. If the plan does not fit the job or is not applied, headway run
    fails with one line and exit status 2; otherwise the exit status is that of the command.
    """
    from headway.integrations.followable import injection_of
    from headway.plan import Plan

    command = trailing_command(ctx)
    plan = Plan.load(plan_path)
    injection_of(plan)
    if adapt:
        plan = _adapting(plan)
    _check_world_size(plan, command)
    noted = {} if decisions is None else _decisions_environment(plan, decisions, command)
    reporter = _RunReporter(plan, quiet=quiet)
    # Processes on other hosts see the plan's folder and not this host's temporary one.
    folder = plan_path.absolute().parent if spreads(command) else None
    if folder is not None and not os.access(folder, os.W_OK):
        folder = None
    with (
        _launch_services(plan, command) as served,
        files.temporary_folder(".headway-run-", folder) as kept,
    ):
        reports, followed = kept / "reports", plan_path.absolute()
        reports.mkdir()
        if adapt:
            followed = kept / "plan.yaml"
            plan.save(followed)
        environment = {**injected_environment(os.environ, plan=str(followed)), **noted, **served}
        ended = run_command(command, {**environment, **reporter.environment}, reports, reporter.look)
    if ended.exit_status == 0:
        _check_applied(ended)
    reporter.end(ended)
    ctx.exit(ended.exit_status)


class _RunReporter:
    """Prints when rank 0 follows the plan and, at the end, its step times; silent if rank 0 is elsewhere."""

    def __init__(self, plan: Plan, *, quiet: bool) -> None:
        self._plan = plan
        self._quiet = quiet
        self._began = False

    @property
    def environment(self) -> dict[str, str]:
        """The variable that makes rank 0 print its decisions."""
        from headway.strategies.decisions import PRINT_VARIABLE

        return {} if self._quiet or not self._plan.strategy.decides_while_training else {PRINT_VARIABLE: "1"}

    def look(self, reports: Sequence[Report]) -> None:
        first_ranks = _first_ranks(reports)
        if self._quiet or self._began or not first_ranks:
            return
        self._began = True
        expected = self._plan.prediction
        line = f"running under {self._plan.short_name()}, on {counted(first_ranks[-1].world_size, 'rank')}"
        if expected is not None:
            line += f"; predicted {expected.step_ms:.1f} ± {expected.uncertainty_ms:.1f} ms a step"
        _say(line)

    def end(self, ended: CommandOutcome) -> None:
        self.look(ended.reports)
        first_ranks = _first_ranks(ended.reports)
        if self._quiet or not first_ranks:
            return
        line = steps_in_words(self._plan, first_ranks[-1])
        if len(first_ranks) > 1:
            line += f" (since the last of {counted(len(first_ranks) - 1, 'restart')})"
        if ended.exit_status:
            line = f"the command ended with status {ended.exit_status}; until then {line}"
        _say(line)


def _first_ranks(reports: Iterable[Report]) -> list[Report]:
    """The reports of processes that were rank 0 and applied the plan, in order of their start."""
    first_ranks = [report for report in reports if report.rank == 0 and report.applied]
    return sorted(first_ranks, key=lambda report: report.began_s)


def steps_in_words(plan: Plan, report: Report) -> str:
    """The step time, compared with the prediction and the recording."""
    if report.timed_steps < LEAST_STEPS:
        steps = counted(report.steps, "optimizer step") if report.steps else "no optimizer step"
        return f"{steps}: too few to time"
    measured_ms = report.step_ms
    line = f"{measured_ms:.1f} ms a step, over the last {report.timed_steps}"
    expected = plan.prediction
    if expected is None:
        return line
    if report.world_size != plan.world_size:
        return f"{line}; the plan's prediction is for {counted(plan.world_size, 'rank')}"
    before_ms = expected.baseline_ms
    line += f"; predicted {expected.step_ms:.1f} ± {expected.uncertainty_ms:.1f}, recorded before {before_ms:.1f}: "
    noise_ms = max(NOISE * before_ms, 2 * report.spread_ms / math.sqrt(report.timed_steps))
    is_as_predicted = abs(measured_ms - expected.step_ms) <= max(expected.uncertainty_ms, noise_ms)
    if abs(measured_ms - before_ms) <= noise_ms:
        line += "no difference beyond noise"
    elif plan.is_recorded:
        return f"{line}the same plan as recorded, so the machine or its load changed"
    elif measured_ms < before_ms:
        line += f"{before_ms / measured_ms:.2f} times as fast"
    else:
        line += f"slower, {measured_ms / before_ms:.2f} times as long"
    if not is_as_predicted:
        line += ", not as predicted"
    hosts = set() if plan.cluster is None else {host.name for host in plan.cluster.hosts}
    if hosts and report.host_in_plans not in hosts:
        line += "; the prediction is for other machines"
    elif not is_as_predicted or measured_ms > before_ms + noise_ms:
        line += ". Other load may be the cause: record both and compare, with headway diagnose --baseline"
    return line


def _say(line: str) -> None:
    print(f"headway: {one_line(line, 500)}", file=sys.stderr, flush=True)


def _launch_services(plan: Plan, command: Sequence[str]) -> AbstractContextManager[Mapping[str, str]]:
    """Run what the strategy needs next to the command; nothing if ranks are on other hosts too."""
    from headway.strategies.registry import plugin_of

    if not _stays_here(command):
        return nullcontext({})
    return plugin_of(plan.strategy).launched_with(plan.strategy)


def _stays_here(command: Sequence[str]) -> bool:
    """Whether all ranks are on this host, as far as can be told."""
    return not spreads(command) and starts_all_here(command, os.environ)


def _adapting(plan: Plan) -> Plan:
    """The plan with a strategy that adapts during training."""
    from headway.strategies.registry import adapting

    strategy = plan.strategy
    changed = adapting(strategy)
    if changed is None or len(plan.parallel) > 1:
        raise PlanError(
            "this plan cannot adapt during training",
            got=strategy.describe(),
            expected="stock DDP or decoupled all-reduce with uncompressed gradients, parameter servers, or a pipeline "
            "planned with headway optimize --follow-network",
            fix="Remove --adapt, or plan with headway optimize --strategy decoupled.",
        )
    (dimension,) = plan.parallel
    return plan.model_copy(update={"parallel": {dimension: changed}})


def _decisions_environment(plan: Plan, decisions: Path, command: Sequence[str]) -> dict[str, str]:
    """The variable that makes rank 0 write its decisions to ``decisions``, also after restarts.

    If all ranks are on this host, earlier contents of the file are removed.
    """
    from headway.strategies.decisions import DECISIONS_VARIABLE

    strategy = plan.strategy
    if not strategy.decides_while_training:
        raise PlanError(
            "this plan makes no decisions during training",
            got=strategy.describe(),
            expected="a plan written by headway optimize --follow-network, an adaptive plan, or --adapt",
            fix="Remove --decisions.",
        )
    try:
        with decisions.open("w" if _stays_here(command) else "a"):
            pass
    except OSError as failure:
        raise LaunchError(
            f"{decisions} cannot be written", got=failure.strerror or type(failure).__name__,
            fix="Create the folder, or choose another file.",
        ) from None  # fmt: skip
    return {DECISIONS_VARIABLE: str(decisions.absolute())}


def _check_world_size(plan: Plan, command: Sequence[str]) -> None:
    from headway.integrations.launch import stated_world_size
    from headway.strategies.registry import plugin_of

    world_size = stated_world_size(command, os.environ)
    if world_size in (None, plan.world_size):
        return
    if plugin_of(plan.strategy).for_workers(plan.strategy) is None:
        raise PlanError(
            "the plan is for another world size",
            got=f"{world_size} workers",
            expected=f"{plan.world_size}",
            fix="Record this job and run headway optimize on that trace, or use --adapt.",
        )


def _check_applied(ended: CommandOutcome) -> None:
    """Raise LaunchError if no process of the successful command followed the plan."""
    if any(report.applied for report in ended.reports):
        return
    ranks = [report for report in ended.reports if report.rank >= 0]
    blind = [report.blind for report in ended.reports if report.blind]
    if ranks:
        got = f"{len(ranks)} ranks that never constructed DistributedDataParallel"
    elif blind:
        got = f"a Python that cannot load Headway: {blind[0]}"
    elif ended.reports:
        got = "a command in which no process initialised a process group"
    else:
        got = "a command in which no Python process imported torch under Headway"
    raise LaunchError(
        "the plan was not applied", got=got,
        expected="ranks that call init_process_group and construct DistributedDataParallel",
        fix="Start it as for training, for example with torchrun; python -I and -E disable Headway.",
    )  # fmt: skip
