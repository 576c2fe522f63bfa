"""The command after ``--``, which click must not read."""

from __future__ import annotations

import click

from headway.errors import LaunchError


def trailing_command(ctx: click.Context) -> tuple[str, ...]:
    """The command after ``--``. Raises LaunchError where there is none."""
    command = tuple(ctx.find_root().meta.get("headway.command", ()))
    if not command:
        raise LaunchError(
            "no command to run", expected="-- followed by a command", fix="For example: -- torchrun train.py"
        )
    return command
