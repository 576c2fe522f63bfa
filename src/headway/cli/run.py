"""``headway run``: run an unmodified command under a plan."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headway.cli.command import trailing_command
from headway.integrations.launch import injected_environment, run_command


@click.command()
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), required=True, help="The plan to run.")
@click.pass_context
def run(ctx: click.Context, plan_path: Path) -> None:
    """Run the command after -- under a plan: headway run --plan plan.yaml -- torchrun ... train.py.

    The script goes on constructing DistributedDataParallel; what it gets is what the plan says. A plan that does
    not fit the job ends every rank with one line. The exit status is the command's.
    """
    from headway.plan import Plan

    command = trailing_command(ctx)
    Plan.load(plan_path)
    ctx.exit(run_command(command, injected_environment(os.environ, plan=str(plan_path.absolute()))))
