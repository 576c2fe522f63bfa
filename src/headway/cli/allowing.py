"""The option by which users permit what is never chosen otherwise."""

from __future__ import annotations

import click

from headway.permission import PERMISSIONS

allow_option = click.option(
    "--allow", "allow", multiple=True, type=click.Choice(PERMISSIONS),
    help="Permit plans that change what is trained: asynchronous ones, such as models averaged in groups of ranks; "
    "local-steps, which ranks take by themselves before models are averaged; precision: gradients are compressed, or "
    "fewer digits computed with; randomness: random numbers are drawn elsewhere, such as by loaders with workers. The "
    "answer says what they change. They are never chosen "
    "otherwise.",
)  # fmt: skip
