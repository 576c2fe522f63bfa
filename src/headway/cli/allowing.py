"""The option by which users permit what is never chosen otherwise."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from headway.permission import SHIPPED


def _checked(_context: click.Context, _option: click.Parameter, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Each is one of Headway's permissions, or one that an installed package declares."""
    from headway.plan.permissions import check_allowed

    if allowed:
        check_allowed(allowed)
    return allowed


def _completed(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """Those there are, with what they change."""
    from headway.plan.permissions import permissions

    there_are = permissions().values()
    return [CompletionItem(one.name, help=one.changes) for one in there_are if one.name.startswith(begun)]


_SHIPPED = "; ".join(f"{one.name}: {one.changes}" for one in SHIPPED)

allow_option = click.option(
    "--allow", "allow", multiple=True, callback=_checked, shell_complete=_completed,
    metavar=f"[{'|'.join(one.name for one in SHIPPED)}|…]",
    help=f"Permit plans that change what is trained; they are never chosen otherwise. {_SHIPPED}. Installed packages "
    "may declare others.",
)  # fmt: skip
