"""Draws the timeline of all ranks as a Bokeh figure: zoom with the wheel, pan by dragging, hover for details.

The page's scripts find its parts by name: ``timeline``, ``boxes``, ``pending``, ``path``, ``band``, ``hit``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import UserError, how_to_install
from headway.report import words
from headway.report.drawing import COMMUNICATION, OPERATORS, Box, Drawing, RankView
from headway.report.words import kind_label
from headway.trace.events import Kind

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure as Figure  # noqa: N812

    from headway.report.history import Bar, History


PITCH = 2.0  # distance between ranks
_COMPUTE_HALF = 0.46
_COMMUNICATION_AT, _COMMUNICATION_HEIGHT = -0.86, 0.56
_ABOVE, _BELOW = 0.68, 1.32  # together one pitch, so that a rank takes a whole number of pixels
_RANK_PX, _ROWS_PX, _MANY_ROWS_PX = 58, 580, 780
_LABEL_PX = 14  # height of a rank's label


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of these ranks, in this order. Lengths are in row units; 0 is the middle of the first compute row."""

    ranks: tuple[int, ...]
    lanes: int
    blamed: tuple[int, ...] = ()

    def places(self) -> dict[int, float]:
        """The middle of each rank's compute row."""
        return {rank: -PITCH * index for index, rank in enumerate(self.ranks)}

    def span(self, box: Box, shared: bool) -> tuple[float, float]:
        """Bottom and top of ``box``, from the middle of its rank's compute row.

        ``shared`` says whether operators take the lower half of that row.
        """
        if box.row == COMMUNICATION:
            middle, half = self.lane_at(box.lane), _COMMUNICATION_HEIGHT / self.lanes / 2
            return middle - half, middle + half
        if box.row == OPERATORS:
            return -_COMPUTE_HALF, -0.06
        return -0.02 if shared else -_COMPUTE_HALF, _COMPUTE_HALF

    def lane_at(self, lane: int) -> float:
        """The middle of a lane of communication, from the middle of its rank's compute row."""
        return _COMMUNICATION_AT + (0.5 * (self.lanes - 1) - lane) * _COMMUNICATION_HEIGHT / self.lanes

    def path_at(self, communicating: bool) -> float:
        """The height of the critical path, from the middle of its rank's compute row."""
        return _COMMUNICATION_AT - _COMMUNICATION_HEIGHT / 2 if communicating else -_COMPUTE_HALF

    @property
    def band(self) -> tuple[float, float]:
        """Bottom and top of a rank's rows, from the middle of its compute row."""
        return -PITCH + 0.7, 0.64

    @property
    def y_range(self) -> tuple[float, float]:
        """Bottom and top of all rows."""
        return -PITCH * (len(self.ranks) - 1) - _BELOW, _ABOVE

    @property
    def rank_px(self) -> int:
        """The height of one rank in whole pixels; otherwise rows would differ in height."""
        most = _ROWS_PX if len(self.ranks) <= 64 else _MANY_ROWS_PX
        return max(min(_RANK_PX, most // len(self.ranks)), 1)

    @property
    def dense(self) -> bool:
        """Whether rows are too low for borders and thick lines."""
        return self.rank_px < 20

    @property
    def height_px(self) -> int:
        """The height of all ranks in pixels, without the axes."""
        return self.rank_px * len(self.ranks)

    def labels(self) -> list[tuple[float, str]]:
        """The positions and texts of the labels. Blamed ranks always have one; others if there is room."""
        places = self.places()
        every = -(-_LABEL_PX // self.rank_px)
        marked = [index for index, rank in enumerate(self.ranks) if rank in self.blamed]
        labels = []
        for index, rank in enumerate(self.ranks):
            if index in marked:
                labels.append((places[rank], f"▸ rank {rank}"))
            elif index % every == 0 and all(abs(index - mark) >= every for mark in marked):
                labels.append((places[rank], f"rank {rank}"))
            if self.rank_px >= 2.4 * _LABEL_PX:
                labels.append((places[rank] + _COMMUNICATION_AT, "network"))
        return labels


class Table:
    """Distinct texts that columns refer to by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str, limit: int = words.MAX_NAME) -> int:
        """The number of ``text``, cut to ``limit`` characters."""
        return self._numbers.setdefault(words.plain(text, limit), len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """The texts by number."""
        return list(self._numbers)


def timeline_columns(drawing: Drawing, layout: Layout) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The boxes as numeric columns, and the tables of texts for ``kind``, ``name``, ``detail`` and ``step``.

    ``bottom`` and ``top`` are a box's position while all ranks are shown.
    """
    tables = {name: Table() for name in ("kind", "name", "detail", "step")}
    boxes, places = drawing.boxes, layout.places()
    shared = {(box.rank, box.step) for box in boxes if box.row == OPERATORS}
    spans = [layout.span(box, (box.rank, box.step) in shared) for box in boxes]
    columns: dict[str, Any] = {
        "left": np.array([box.start_ms for box in boxes], dtype=np.float64),
        "right": np.array([box.end_ms for box in boxes], dtype=np.float64),
        "bottom": np.array(
            [places[box.rank] + low for box, (low, _) in zip(boxes, spans, strict=True)], np.float32
        ),
        "top": np.array(
            [places[box.rank] + high for box, (_, high) in zip(boxes, spans, strict=True)], np.float32
        ),
        "rank": np.array([box.rank for box in boxes], dtype=np.int32),
        "kind": np.array([tables["kind"].number(box.kind) for box in boxes], dtype=np.int32),
        "name": np.array([tables["name"].number(box.name) for box in boxes], dtype=np.int32),
        "detail": np.array([tables["detail"].number(box.detail) for box in boxes], dtype=np.int32),
        "step": np.array([tables["step"].number(str(box.step)) for box in boxes], dtype=np.int32),
    }
    return columns, {name: table.texts for name, table in tables.items()}


def page_data(
    drawing: Drawing, tables: dict[str, list[str]], past: History, views: tuple[RankView, ...], layout: Layout
) -> dict[str, Any]:
    """The data for the scripts: names, steps, bars of the history, and views of ranks."""
    numbers = [step for step, _, _ in drawing.steps]
    at = {step: index for index, step in enumerate(numbers)}
    return {
        "tables": tables | {"kind": [kind_label(kind) for kind in tables["kind"]]},
        "steps": [[str(step), start, end] for step, start, end in drawing.steps],
        "bars": [[str(bar.step), at.get(bar.step, -1), *_drawn(bar, numbers)] for bar in past.bars],
        "path": [list(piece) for piece in drawing.path],
        "view": list(opening_view(drawing)),
        "bounds": list(time_bounds(drawing)),
        "pitch": PITCH,
        "views": [_view(view, layout) for view in views],
    }


def opening_view(drawing: Drawing) -> tuple[float, float]:
    """The time range that the timeline shows first, in milliseconds."""
    start, end = drawing.view_ms
    low, high = time_bounds(drawing)
    margin = 0.01 * (end - start)
    if margin <= 0:
        return low, high
    return max(start - margin, low), min(end + margin, high)


def time_bounds(drawing: Drawing) -> tuple[float, float]:
    """The limits of the timeline's view, in milliseconds."""
    margin = 0.02 * max(drawing.length_ms, 1e-3)
    return -margin, drawing.length_ms + margin


def _drawn(bar: Bar, numbers: list[int]) -> tuple[int, int]:
    """The range of drawn steps that a bar stands for, as indices; the end is exclusive."""
    first, last = bar.of_steps
    return bisect_left(numbers, first), bisect_right(numbers, last)


def _view(view: RankView, full: Layout) -> dict[str, Any]:
    layout = Layout(view.ranks, full.lanes, full.blamed)
    return {
        "ranks": list(view.ranks),
        "height": layout.height_px,
        "range": list(layout.y_range),
        "labels": [list(label) for label in layout.labels()],
        "dense": layout.dense,
    }


FIGURE_NAME = "timeline"
_ON_COMMUNICATION = {Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE, Kind.PUSH, Kind.PULL}
_LEFT_PX, _RIGHT_PX = 84, 20
TIP_STYLE = (
    f"font:12.5px/1.45 {words.FONT};color:var(--ink);background:var(--paper);margin:-5px;padding:6px 8px;"
    "max-width:420px;overflow-wrap:anywhere"
)
_TIP = f"""<div style="{TIP_STYLE}"><b>@what</b><br>@took, from @from<br>@where<br>
<span style="color:var(--muted)">@more</span></div>"""


def require_bokeh() -> None:
    """Raises UserError if Bokeh, which draws the figures, is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError(
            "an HTML page needs Bokeh, which is not installed", fix=f"Run: {how_to_install('report')}."
        ) from None


def timeline(drawing: Drawing, layout: Layout, columns: dict[str, Any], kinds: list[str]) -> LayoutDOM:
    """Draws ``columns`` of boxes as rows per rank, and below them an overview with a frame to drag.

    ``kinds`` are the kinds of events that the column ``kind`` numbers.
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
    colours = [words.kind_colour(kind) for kind in kinds] or [words.UNKNOWN_COLOUR]
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
        fill_color=None, line_color=words.HIT_COLOUR, line_width=2, line_join="round", level="overlay",
    )  # fmt: skip
    labels = layout.labels()
    plot.yaxis.ticker = FixedTicker(ticks=[place for place, _ in labels])
    plot.yaxis.major_label_overrides = dict(labels)
    for axis in plot.below:
        axis.update(axis_label="milliseconds", major_label_policy=NoOverlap(min_distance=12))
    apply_style(plot)
    return plot


def _band(plot: Figure, layout: Layout) -> None:
    """Tints the background of the blamed ranks' rows."""
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
        fill_color=words.BLAMED_COLOUR, line_color=words.BLAMED_EDGE, line_width=1.5, level="underlay",
    )  # fmt: skip


def _steps(plot: Figure, drawing: Drawing, top: float) -> None:
    """Draws a line at each step's start and at the last end, and the steps' numbers above."""
    from bokeh.models import FixedTicker, LinearAxis, NoOverlap

    borders = [*(start for _, start, _ in drawing.steps), *(end for _, _, end in drawing.steps[-1:])]
    plot.vspan(x=borders, line_color=words.STEP_BORDER, line_dash="dashed", line_width=1)
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
    """Draws thin lines from the request of communication to its start."""
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
        fill_color=words.PENDING_COLOUR, line_color=None,
    )  # fmt: skip


def _path(plot: Figure, drawing: Drawing, layout: Layout) -> None:
    """Draws the critical path as a line along the rows; it moves up or down where it changes rank or stream."""
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
    for name, colour, width in (("path-halo", "white", 2 * thick), ("path", words.PATH_COLOUR, thick)):
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
    for place, colour in enumerate((words.EVEN_STEP, words.ODD_STEP)):
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
        text_color=words.INK, text_font_size="11px", text_font=value(words.FONT),
    )  # fmt: skip
    tool = RangeTool(x_range=x_range, start_gesture="pan")
    tool.overlay.fill_color, tool.overlay.fill_alpha = "#3f7fb5", 0.18
    plot.add_tools(tool)
    plot.axis.visible = False
    apply_style(plot)
    plot.min_border_right = _RIGHT_PX + 30  # the toolbar of the rows above takes this space
    return plot


def apply_style(plot: Figure) -> None:
    """Applies the style that all figures share."""
    plot.min_border_left, plot.min_border_right = _LEFT_PX, _RIGHT_PX
    plot.grid.visible = False
    plot.outline_line_color = words.RULE
    plot.background_fill_color = plot.border_fill_color = "white"
    for axis in plot.axis:
        if axis not in plot.above:
            axis.axis_line_color = axis.major_tick_line_color = words.AXIS
        axis.minor_tick_line_color = None
        axis.major_label_text_color = words.INK
        axis.axis_label_text_color = words.MUTED
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font = axis.axis_label_text_font = words.FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
