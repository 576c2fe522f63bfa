"""The option by which users permit what is never chosen otherwise."""

from __future__ import annotations

import click

from headway.permission import PERMISSIONS

allow_option = click.option(
    "--allow", "allow", multiple=True, type=click.Choice(PERMISSIONS),
    help="Permit plans that change what is trained: asynchronous ones, such as models averaged in groups of ranks, or "
    "those of less precision, whose gradients are compressed, or those that draw random numbers elsewhere, such as "
    "loaders with workers. The answer says what they change. They are never chosen "
    "otherwise.",
)  # fmt: skip
