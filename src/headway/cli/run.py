"""``headway run``: run an unmodified command under a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.cli.command import trailing_command
from headway.errors import LaunchError, PlanError
from headway.integrations.launch import CommandOutcome, injected_environment, run_command
from headway.integrations.torchrun import spreads, starts_all_here

if TYPE_CHECKING:
    from headway.plan import Plan


@click.command(options_metavar="[OPTIONS] -- COMMAND")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), required=True, help="The plan to run.")
@click.option(
    "--decisions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write each decision that is taken while the job trains to this file; read it with headway decisions.",
)
@click.option(
    "--adapt", is_flag=True,
    help="Watch the job for as long as it trains, and change its schedule when its network or its ranks have changed.",
)  # fmt: skip
@click.pass_context
def run(ctx: click.Context, plan_path: Path, decisions: Path | None, adapt: bool) -> None:
    """Run COMMAND under a plan.

    headway run --plan plan.yaml -- torchrun --nproc-per-node 2 train.py

    The script still constructs DistributedDataParallel, and gets what the plan says. If the plan does not fit the
    job, or the job does not follow the plan, headway run ends with one line and exit status 2; otherwise the exit
    status is that of the command.
    """
    from headway.integrations.followable import injection_of
    from headway.plan import Plan

    command = trailing_command(ctx)
    plan = Plan.load(plan_path)
    injection_of(plan)
    if adapt:
        plan = _adapting(plan)
    _check_world_size(plan, command)
    noted = {} if decisions is None else _noted(plan, decisions, command)
    # Processes on other hosts see the plan's folder and not this host's temporary one.
    folder = plan_path.absolute().parent if spreads(command) else None
    if folder is not None and not os.access(folder, os.W_OK):
        folder = None
    with (
        _kept_with(plan, command) as served,
        files.temporary_folder(".headway-run-", folder) as kept,
    ):
        reports, followed = kept / "reports", plan_path.absolute()
        reports.mkdir()
        if adapt:
            followed = kept / "plan.yaml"
            plan.save(followed)
        environment = {**injected_environment(os.environ, plan=str(followed)), **noted, **served}
        ended = run_command(command, environment, reports)
    if ended.exit_status == 0:
        _check_applied(ended)
    ctx.exit(ended.exit_status)


def _kept_with(plan: Plan, command: Sequence[str]) -> AbstractContextManager[Mapping[str, str]]:
    """What is kept here while the command runs: nothing where it starts ranks on other hosts too."""
    from headway.strategies.registry import plugin_of

    if not _stays_here(command):
        return nullcontext({})
    return plugin_of(plan.strategy).launched_with(plan.strategy)


def _stays_here(command: Sequence[str]) -> bool:
    """Whether all ranks are on this host, as far as can be told."""
    return not spreads(command) and starts_all_here(command, os.environ)


def _adapting(plan: Plan) -> Plan:
    """The plan as one that changes while the job trains."""
    from headway.strategies.registry import adapting

    strategy = plan.strategy
    changed = adapting(strategy)
    if changed is None or len(plan.parallel) > 1:
        raise PlanError(
            "this plan cannot be changed while the job trains",
            got=strategy.describe(),
            expected="stock DDP or a decoupled all-reduce, with gradients sent as they are, parameter servers, or a "
            "pipeline that headway optimize --follow-network planned",
            fix="Leave out --adapt, or plan with headway optimize --strategy decoupled.",
        )
    (dimension,) = plan.parallel
    return plan.model_copy(update={"parallel": {dimension: changed}})


def _noted(plan: Plan, decisions: Path, command: Sequence[str]) -> dict[str, str]:
    """The variable that has rank 0 write its decisions there, whenever ranks are started again.

    Where the job is on this host alone, the file is of this run alone.
    """
    from headway.strategies.decisions import DECISIONS_VARIABLE

    strategy = plan.strategy
    if not strategy.decides_while_training:
        raise PlanError(
            "under this plan nothing is decided while the job trains",
            got=strategy.describe(),
            expected="a plan that headway optimize --follow-network wrote, one with tune: true, or --adapt",
            fix="Leave out --decisions.",
        )
    try:
        with decisions.open("w" if _stays_here(command) else "a"):
            pass
    except OSError as failure:
        raise LaunchError(
            f"{decisions} cannot be written", got=failure.strerror or type(failure).__name__,
            fix="Make the folder, or name another file.",
        ) from None  # fmt: skip
    return {DECISIONS_VARIABLE: str(decisions.absolute())}


def _check_world_size(plan: Plan, command: Sequence[str]) -> None:
    from headway.integrations.torchrun import stated_world_size
    from headway.strategies.registry import plugin_of

    world_size = stated_world_size(command, os.environ)
    if world_size in (None, plan.world_size):
        return
    if plugin_of(plan.strategy).for_workers(plan.strategy) is None:
        raise PlanError(
            "the plan is for another world size",
            got=f"{world_size} workers",
            expected=f"{plan.world_size}",
            fix="Record this job and run headway optimize on that trace, or give --adapt.",
        )


def _check_applied(ended: CommandOutcome) -> None:
    """Raise LaunchError where the command ended well and no process of it followed the plan."""
    if any(report.applied for report in ended.reports):
        return
    ranks = [report for report in ended.reports if report.rank >= 0]
    blind = [report.blind for report in ended.reports if report.blind]
    if ranks:
        got = f"{len(ranks)} ranks that never constructed DistributedDataParallel"
    elif blind:
        got = f"a Python that cannot follow it: {blind[0]}"
    elif ended.reports:
        got = "a command of which no process initialised a process group"
    else:
        got = "a command of which no Python process imported torch under Headway"
    raise LaunchError(
        "the plan was not applied", got=got,
        expected="ranks that call init_process_group and construct DistributedDataParallel",
        fix="Start it as for training, for example with torchrun; python -I and -E keep Headway out.",
    )  # fmt: skip
