"""Python files that a user imports: what they say of themselves, and values written so that nothing in them is code."""

from __future__ import annotations

import pprint

from headway.errors import one_line
from headway.version import __version__


def python_file(gist: str, lacks: tuple[str, ...], body: str) -> str:
    """A module that says at its top what it does of a plan and what not, in a comment of printable lines."""
    head = [f"# Written by Headway {__version__}: {one_line(gist)}."]
    head += [f"# Left out: {one_line(lack)}." for lack in lacks]
    return "\n".join(head) + "\n\n" + body.strip("\n") + "\n"


def literal(value: object) -> str:
    """``value``, of plain types, as Python writes it, over several lines where it is long."""
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False)
