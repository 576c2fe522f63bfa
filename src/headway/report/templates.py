"""The pages' templates, in which whatever comes from outside is escaped, their own files, and their figures."""

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
    """The template of that name; text is escaped in it, and shown to its last character."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("headway.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_showable,
    )
    environment.filters["together"] = _together
    return environment.get_template(name)


def own_file(name: str) -> str:
    """The text of a file of this package."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def page_with_figures(
    name: str, scripts: Sequence[str], figures: Mapping[str, Any], data: Mapping[str, Any], **values: Any
) -> str:
    """The template ``name``, with Bokeh's ``figures`` by the names of their elements, as one text that loads nothing.

    ``scripts`` are files of this package's folder of that name, in their order; ``data`` is what they start from.
    """
    from markupsafe import Markup

    return template(name).render(
        **values,
        version=__version__,
        css=Markup(own_file("page.css")),
        scripts=Markup("\n".join(own_file(f"scripts/{script}") for script in scripts)),
        page_json=Markup(script_json({**data, "dark": words.DARK})),
        figures={element: Markup(_figure_json(figure)) for element, figure in figures.items()},
        bokeh_js=Markup(_bokeh_js()),
    )


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _showable(value: Any) -> Any:
    return words.plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _together(text: str) -> Any:
    """``text``, in which no line breaks between a number and its unit."""
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
    """BokehJS inlined; only the part of it that draws figures."""
    from bokeh.resources import Resources

    return str(Resources(mode="inline", minified=True, components=["bokeh"]).render_js())
