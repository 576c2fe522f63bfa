"""Renders the pages' Jinja templates: escapes all text, and inlines styles, scripts and Bokeh figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.report import words
from headway.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template


def template(name: str) -> Template:
    """Loads a template. Text is escaped, and characters that cannot be shown are replaced."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("headway.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_showable,
    )
    environment.filters["together"] = _together
    return environment.get_template(name)


def package_file(name: str) -> str:
    """Reads a text file of this package."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def page_with_figures(
    name: str, scripts: Sequence[str], figures: Mapping[str, Any], data: Mapping[str, Any], **values: Any
) -> str:
    """Renders the template ``name`` as one self-contained HTML text, with Bokeh ``figures`` by element name.

    ``scripts`` are files of the folder ``scripts``, in this order; ``data`` is the JSON that they start from.
    """
    from markupsafe import Markup

    return template(name).render(
        **values,
        version=__version__,
        css=Markup(package_file("page.css")),
        scripts=Markup("\n".join(package_file(f"scripts/{script}") for script in scripts)),
        page_json=Markup(script_json({**data, "dark": words.DARK})),
        figures={element: Markup(_figure_json(figure)) for element, figure in figures.items()},
        bokeh_js=Markup(_bokeh_js()),
    )


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _showable(value: Any) -> Any:
    return words.plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _together(text: str) -> Any:
    """Wraps quantities in ``text`` so that no line breaks between a number and its unit."""
    from markupsafe import Markup, escape

    parts = words.QUANTITY.split(words.plain(text))
    return Markup("").join(
        Markup('<span class="nobreak">{}</span>').format(part) if at % 2 else escape(part)
        for at, part in enumerate(parts)
    )


def _figure_json(figure: Any) -> str:
    from bokeh.core.json_encoder import serialize_json
    from bokeh.embed import json_item

    return script_json(serialize_json(json_item(figure)))


def _bokeh_js() -> str:
    """The inlined part of BokehJS that draws figures."""
    from bokeh.resources import Resources

    return str(Resources(mode="inline", minified=True, components=["bokeh"]).render_js())
