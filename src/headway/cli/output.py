"""Output shared by commands: consoles, progress on stderr, and one JSON document on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headway import files
from headway.errors import LaunchError
from headway.permission import SHIPPED


def _checked(_context: click.Context, _option: click.Parameter, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each is a permission of Headway or of an installed package."""
    from headway.plan.permissions import check_allowed

    if allowed:
        check_allowed(allowed)
    return allowed


def _completed(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """The permissions that start with ``begun``, with what they change."""
    from headway.plan.permissions import permissions

    there_are = permissions().values()
    return [
        CompletionItem(permission.name, help=permission.changes)
        for permission in there_are
        if permission.name.startswith(begun)
    ]


_SHIPPED = "; ".join(f"{permission.name}: {permission.changes}" for permission in SHIPPED)

allow_option = click.option(
    "--allow", "allow", multiple=True, callback=_checked, shell_complete=_completed,
    metavar=f"[{'|'.join(permission.name for permission in SHIPPED)}|…]",
    help=f"Permit plans that change what is trained; otherwise they are never chosen. {_SHIPPED}. Installed packages "
    "may declare others.",
)  # fmt: skip


def trailing_command(ctx: click.Context) -> tuple[str, ...]:
    """The command after ``--``. Raises LaunchError if it is missing."""
    command = tuple(ctx.find_root().meta.get("headway.command", ()))
    if not command:
        raise LaunchError(
            "no command to run", expected="-- followed by a command", fix="For example: -- torchrun train.py"
        )
    return command


FILE_WIDTH = 130  # of tables that go to a file or a pipe


def console() -> Console:
    """The console for answers. Markup in foreign text is never interpreted."""
    answers = Console(markup=False, highlight=False, soft_wrap=True)
    if not answers.is_terminal:
        answers.width = max(answers.width, FILE_WIDTH)
    return answers


def error_console() -> Console:
    """The console on stderr, for progress and other messages."""
    return Console(stderr=True, markup=False, highlight=False)


def print_document(kind: str, fields: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(files.dump_json(files.document(kind, **fields)))


def print_order(where: Console, schedule: object) -> None:
    """Print the order of a pipeline schedule, one line per rank; nothing for other schedules."""
    from headway.scheduling.pipeline.replicated import ReplicatedSchedule
    from headway.scheduling.pipeline.schedule import PipelineSchedule, picture

    if isinstance(schedule, ReplicatedSchedule):
        schedule = schedule.pipeline
    if isinstance(schedule, PipelineSchedule):
        where.print("The order of forwards and backwards, as if messages took no time:")
        where.print(picture(schedule), no_wrap=True, overflow="ellipsis", crop=True)


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Any]:
    """A progress bar on stderr, on terminals only. Yields a function to call with (done, total) and the best so far."""
    console = error_console()
    if not console.is_terminal:  # a transient bar would leave an empty line there
        yield lambda done, of, best="": None
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task(description, total=total)

        def advance(done: int, of: int, best: str = "") -> None:
            text = f"{description}; best so far: {best}" if best else description
            bar.update(task, completed=done, total=of, description=text)

        yield advance
