"""The timeline of all ranks as a Bokeh figure: zoom with the wheel, move by dragging, hover for details.

The page's scripts find its parts by their names: ``timeline``, ``boxes``, ``pending``, ``path``, ``band``, ``hit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import UserError, how_to_install
from headway.report import palette
from headway.report.drawing import Drawing
from headway.report.layout import Layout
from headway.report.payload import opening_view, time_bounds
from headway.trace.events import Kind

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure as Figure  # noqa: N812

FIGURE_NAME = "timeline"
_ON_COMMUNICATION = {Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE, Kind.PUSH, Kind.PULL}
_LEFT_PX, _RIGHT_PX = 84, 20
TIP_STYLE = (
    f"font:12.5px/1.45 {palette.FONT};color:var(--ink);background:var(--paper);margin:-5px;padding:6px 8px;"
    "max-width:420px;overflow-wrap:anywhere"
)
_TIP = f"""<div style="{TIP_STYLE}"><b>@what</b><br>@took, from @from<br>@where<br>
<span style="color:var(--muted)">@more</span></div>"""


def require_bokeh() -> None:
    """Raise UserError where the library that draws is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError(
            "an HTML page needs Bokeh, which is not installed", fix=f"Run: {how_to_install('report')}."
        ) from None


def timeline(drawing: Drawing, layout: Layout, columns: dict[str, Any], kinds: list[str]) -> LayoutDOM:
    """Draw ``columns`` of boxes: rows for each rank, and below them an overview whose frame can be dragged.

    ``kinds`` are the kinds of events by the numbers in the column ``kind``.
    """
    from bokeh.layouts import column
    from bokeh.models import Range1d

    start, end = opening_view(drawing)
    x_range = Range1d(start=start, end=end, bounds=time_bounds(drawing), min_interval=1e-3)
    return column(
        _rows(drawing, layout, columns, kinds, x_range),
        _overview(drawing, x_range),
        sizing_mode="stretch_width",
    )


def _rows(
    drawing: Drawing, layout: Layout, columns: dict[str, Any], kinds: list[str], x_range: Any
) -> Figure:
    from bokeh.models import (
        BoxZoomTool,
        ColumnDataSource,
        FixedTicker,
        HoverTool,
        NoOverlap,
        PanTool,
        Range1d,
        SaveTool,
        WheelZoomTool,
    )
    from bokeh.plotting import figure
    from bokeh.transform import linear_cmap

    low, high = layout.y_range
    wheel, pan = WheelZoomTool(dimensions="width"), PanTool()
    plot = figure(
        name=FIGURE_NAME,
        x_range=x_range,
        y_range=Range1d(start=low, end=high, bounds=(low, high), min_interval=1.0),
        frame_height=layout.height_px,
        sizing_mode="stretch_width",
        tools=[pan, wheel, BoxZoomTool(), SaveTool()],
        active_scroll=wheel,
        active_drag=pan,
        toolbar_location="right",
    )
    plot.toolbar.logo = None
    _band(plot, layout)
    _steps(plot, drawing, high)
    _pending(plot, drawing, layout)
    colours = [palette.kind_colour(kind) for kind in kinds] or [palette.UNKNOWN_COLOUR]
    bars = plot.quad(
        name="boxes",
        source=ColumnDataSource(columns),
        left="left", right="right", bottom="bottom", top="top",
        fill_color=linear_cmap("kind", colours, low=-0.5, high=len(colours) - 0.5),
        nonselection_fill_alpha=0.15,
        line_color="white",
        line_width=0 if layout.dense else 0.5,
    )  # fmt: skip
    plot.add_tools(HoverTool(renderers=[bars], point_policy="follow_mouse", visible=False, tooltips=_TIP))
    _path(plot, drawing, layout)
    plot.quad(
        name="hit",
        source=ColumnDataSource({"left": [], "right": [], "bottom": [], "top": []}),
        left="left", right="right", bottom="bottom", top="top",
        fill_color=None, line_color=palette.HIT_COLOUR, line_width=2, line_join="round", level="overlay",
    )  # fmt: skip
    labels = layout.labels()
    plot.yaxis.ticker = FixedTicker(ticks=[place for place, _ in labels])
    plot.yaxis.major_label_overrides = dict(labels)
    for axis in plot.below:
        axis.update(axis_label="milliseconds", major_label_policy=NoOverlap(min_distance=12))
    dress(plot)
    return plot


def _band(plot: Figure, layout: Layout) -> None:
    """A tint behind the rows of the blamed ranks, from one side to the other."""
    from bokeh.models import ColumnDataSource

    places = layout.places()
    ranks = [rank for rank in layout.blamed if rank in places]
    low, high = layout.band
    columns = {
        "rank": ranks,
        "bottom": [places[rank] + low for rank in ranks],
        "top": [places[rank] + high for rank in ranks],
    }
    plot.hstrip(
        name="band", source=ColumnDataSource(columns), y0="bottom", y1="top",
        fill_color=palette.BLAMED_COLOUR, line_color=palette.BLAMED_EDGE, line_width=1.5, level="underlay",
    )  # fmt: skip


def _steps(plot: Figure, drawing: Drawing, top: float) -> None:
    """A line where each step begins and where the last ends, and the steps' numbers above."""
    from bokeh.models import FixedTicker, LinearAxis, NoOverlap

    borders = [*(start for _, start, _ in drawing.steps), *(end for _, _, end in drawing.steps[-1:])]
    plot.vspan(x=borders, line_color=palette.STEP_BORDER, line_dash="dashed", line_width=1)
    middles = {(start + end) / 2: f"step {step}" for step, start, end in drawing.steps}
    axis: Any = LinearAxis(
        major_label_policy=NoOverlap(min_distance=12),
        major_tick_line_color=None,
        axis_line_color=None,
        major_label_standoff=0,
    )
    axis.ticker, axis.major_label_overrides = FixedTicker(ticks=list(middles)), middles
    plot.add_layout(axis, "above")


def _pending(plot: Figure, drawing: Drawing, layout: Layout) -> None:
    """Thin lines from when communication was requested to when it began."""
    from bokeh.models import ColumnDataSource

    places = layout.places()
    boxes = [box for box in drawing.boxes if box.pending_ms > 0]
    middles = [places[box.rank] + layout.lane_at(box.lane) for box in boxes]
    columns = {
        "rank": [box.rank for box in boxes],
        "left": [box.start_ms - box.pending_ms for box in boxes],
        "right": [box.start_ms for box in boxes],
        "bottom": [middle - 0.04 for middle in middles],
        "top": [middle + 0.04 for middle in middles],
    }
    plot.quad(
        name="pending", source=ColumnDataSource({name: np.array(values) for name, values in columns.items()}),
        left="left", right="right", bottom="bottom", top="top",
        fill_color=palette.PENDING_COLOUR, line_color=None,
    )  # fmt: skip


def _path(plot: Figure, drawing: Drawing, layout: Layout) -> None:
    """The critical path: a line along the rows, which goes up or down where it changes rank or stream."""
    from bokeh.models import ColumnDataSource

    places = layout.places()
    columns: dict[str, list[float]] = {"x": [], "y": [], "rank": []}
    for rank, kind, start, end in drawing.path:
        y = places.get(rank, float("nan")) + layout.path_at(kind in _ON_COMMUNICATION)
        columns["x"] += [start, end]
        columns["y"] += [y, y]
        columns["rank"] += [rank, rank]
    source = ColumnDataSource({name: np.array(values) for name, values in columns.items()})
    thick = 2 if layout.dense else 3
    for name, colour, width in (("path-halo", "white", 2 * thick), ("path", palette.PATH_COLOUR, thick)):
        plot.line(
            name=name, source=source, x="x", y="y",
            line_color=colour, line_width=width, line_join="round", level="overlay",
        )  # fmt: skip


def _overview(drawing: Drawing, x_range: Any) -> Figure:
    from bokeh.core.properties import value
    from bokeh.models import Range1d, RangeTool
    from bokeh.plotting import figure

    low, high = time_bounds(drawing)
    plot = figure(
        name="overview",
        x_range=Range1d(start=low, end=high),
        y_range=Range1d(start=0, end=1),
        height=38,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
    )
    for place, colour in enumerate((palette.EVEN_STEP, palette.ODD_STEP)):
        steps = drawing.steps[place::2]
        plot.quad(
            left=[start for _, start, _ in steps], right=[end for _, _, end in steps], bottom=0, top=1,
            fill_color=colour, line_color=None,
        )  # fmt: skip
    every = max(len(drawing.steps) // 20, 1)
    labelled = drawing.steps[::every]
    plot.text(
        name="overview-labels",
        x=[(start + end) / 2 for _, start, end in labelled], y=[0.5] * len(labelled),
        text=[str(step) for step, _, _ in labelled], text_align="center", text_baseline="middle",
        text_color=palette.INK, text_font_size="11px", text_font=value(palette.FONT),
    )  # fmt: skip
    tool = RangeTool(x_range=x_range, start_gesture="pan")
    tool.overlay.fill_color, tool.overlay.fill_alpha = "#3f7fb5", 0.18
    plot.add_tools(tool)
    plot.axis.visible = False
    dress(plot)
    plot.min_border_right = _RIGHT_PX + 30  # the rows above have their tools there
    return plot


def dress(plot: Figure) -> None:
    """The style that all of the page's figures share."""
    plot.min_border_left, plot.min_border_right = _LEFT_PX, _RIGHT_PX
    plot.grid.visible = False
    plot.outline_line_color = palette.RULE
    plot.background_fill_color = plot.border_fill_color = "white"
    for axis in plot.axis:
        if axis not in plot.above:
            axis.axis_line_color = axis.major_tick_line_color = palette.AXIS
        axis.minor_tick_line_color = None
        axis.major_label_text_color = palette.INK
        axis.axis_label_text_color = palette.MUTED
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font = axis.axis_label_text_font = palette.FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
