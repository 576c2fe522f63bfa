"""The pages' templates, in which whatever comes from outside is escaped, and their own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.report import words

if TYPE_CHECKING:
    from jinja2 import Template


def template(name: str) -> Template:
    """The template of that name; text is escaped in it, and shown to its last character."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("headway.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_showable,
    )
    return environment.get_template(name)


def own_file(name: str) -> str:
    """The text of a file of this package."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _showable(value: Any) -> Any:
    return words.plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
