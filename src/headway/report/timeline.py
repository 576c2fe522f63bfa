"""The timeline of all ranks as a Bokeh figure: zoom with the wheel, pan by dragging, hover for details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.errors import UserError
from headway.report import palette
from headway.report.drawing import Drawing
from headway.trace.events import Kind

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure as Figure  # noqa: N812

FIGURE_NAME = "timeline"
_ON_COMMUNICATION = {Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE}
_INK, _MUTED, _RULE = "#1f2933", "#66707c", "#e3e7ec"
_RANK_HEIGHTS = ((16, 58), (32, 36), (96, 22), (10**9, 12))  # pixels a rank for up to so many ranks
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def require_bokeh() -> None:
    """Raise UserError where the library that draws is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError(
            "an HTML page needs Bokeh, which is not installed", fix="Run: pip install 'headway[report]'."
        ) from None


def timeline(drawing: Drawing) -> LayoutDOM:
    """Draw ``drawing``: two rows a rank, and below them an overview whose frame can be dragged."""
    from bokeh.layouts import column
    from bokeh.models import Range1d

    start, end = drawing.view_ms
    margin = 0.01 * (end - start)
    bounds = (-0.02 * drawing.length_ms, 1.02 * drawing.length_ms)
    x_range = Range1d(
        start=max(start - margin, bounds[0]),
        end=min(end + margin, bounds[1]),
        bounds=bounds,
        min_interval=1e-3,
    )
    return column(_rows(drawing, x_range), _overview(drawing, x_range), sizing_mode="stretch_width")


class _Layout:
    """Where rows lie: rank by rank from the top, computation above communication."""

    def __init__(self, drawing: Drawing) -> None:
        self.ranks = drawing.ranks
        self.lanes = drawing.lanes
        self.pitch = 1.0 + 0.55 + 0.45

    def compute(self, rank: int) -> float:
        return -self.pitch * self.ranks.index(rank)

    def communication(self, rank: int, lane: int = 0) -> float:
        return self.compute(rank) - 0.78 + (0.5 * (self.lanes - 1) - lane) * self.lane_height

    @property
    def lane_height(self) -> float:
        return 0.52 / self.lanes

    @property
    def y_range(self) -> tuple[float, float]:
        return self.compute(self.ranks[-1]) - 1.35, 1.1

    @property
    def height_px(self) -> int:
        ranks = len(self.ranks)
        a_rank = next(height for most, height in _RANK_HEIGHTS if ranks <= most)
        return 70 + a_rank * ranks

    @property
    def label_every(self) -> int:
        return 1 + (len(self.ranks) - 1) // 96


def _rows(drawing: Drawing, x_range: Any) -> Figure:
    from bokeh.models import (
        BoxZoomTool,
        ColumnDataSource,
        FixedTicker,
        HoverTool,
        PanTool,
        Range1d,
        ResetTool,
        SaveTool,
        WheelZoomTool,
        ZoomInTool,
        ZoomOutTool,
    )
    from bokeh.plotting import figure

    layout = _Layout(drawing)
    wheel, pan = WheelZoomTool(dimensions="width"), PanTool(dimensions="width")
    plot = figure(
        name=FIGURE_NAME,
        x_range=x_range,
        y_range=Range1d(start=layout.y_range[0], end=layout.y_range[1]),
        height=layout.height_px,
        sizing_mode="stretch_width",
        tools=[
            pan, wheel, BoxZoomTool(dimensions="width"), ZoomInTool(dimensions="width"),
            ZoomOutTool(dimensions="width"), ResetTool(), SaveTool(),
        ],
        active_scroll=wheel,
        active_drag=pan,
        toolbar_location="above",
    )  # fmt: skip
    plot.toolbar.logo = None
    _steps(plot, drawing, layout)
    pending = [box for box in drawing.boxes if box.pending_ms > 0]
    plot.quad(
        left=[box.start_ms - box.pending_ms for box in pending],
        right=[box.start_ms for box in pending],
        bottom=[layout.communication(box.rank, box.lane) - 0.04 for box in pending],
        top=[layout.communication(box.rank, box.lane) + 0.04 for box in pending],
        fill_color=palette.PENDING_COLOUR,
        line_color=None,
    )
    bars = plot.quad(
        source=ColumnDataSource(_columns(drawing, layout)),
        left="left", right="right", bottom="bottom", top="top",
        fill_color="colour", line_color="white", line_width=0.5, hover_line_color=_INK,
    )  # fmt: skip
    plot.add_tools(
        HoverTool(
            renderers=[bars],
            point_policy="follow_mouse",
            tooltips=[
                ("what", "@kind @name"),
                ("took", "@length{0,0.000} ms"),
                ("from", "@left{0,0.000} ms"),
                ("rank, step", "@rank, @step"),
                ("more", "@detail"),
            ],
        )
    )
    _path(plot, drawing, layout)
    ticks: dict[Any, Any] = {}
    for rank in drawing.ranks:
        if layout.ranks.index(rank) % layout.label_every == 0:
            ticks[layout.compute(rank)] = f"rank {rank}"
        if len(drawing.ranks) <= 16:
            ticks[layout.communication(rank)] = "network"
    plot.yaxis.ticker = FixedTicker(ticks=list(ticks))
    plot.yaxis.major_label_overrides = ticks
    plot.xaxis.axis_label = "milliseconds"
    _dress(plot)
    return plot


def _columns(drawing: Drawing, layout: _Layout) -> dict[str, Any]:
    boxes = drawing.boxes
    centres = [
        layout.communication(box.rank, box.lane) if box.communication else layout.compute(box.rank)
        for box in boxes
    ]
    halves = [layout.lane_height / 2 if box.communication else 0.4 for box in boxes]
    return {
        "left": [box.start_ms for box in boxes],
        "right": [box.end_ms for box in boxes],
        "bottom": [round(centre - half, 4) for centre, half in zip(centres, halves, strict=True)],
        "top": [round(centre + half, 4) for centre, half in zip(centres, halves, strict=True)],
        "length": [box.end_ms - box.start_ms for box in boxes],
        "colour": [palette.KIND_COLOURS.get(box.kind, palette.UNKNOWN_COLOUR) for box in boxes],
        "kind": [box.kind for box in boxes],
        "name": [box.name[:200] for box in boxes],
        "rank": [box.rank for box in boxes],
        "step": [box.step for box in boxes],
        "detail": [box.detail for box in boxes],
    }


def _steps(plot: Figure, drawing: Drawing, layout: _Layout) -> None:
    """A line and a number where each step begins, and one line where the last ends."""
    from bokeh.core.properties import value

    bottom, top = layout.y_range
    starts = [start for _, start, _ in drawing.steps]
    borders = [*starts, *(end for _, _, end in drawing.steps[-1:])]
    plot.segment(
        x0=borders, x1=borders, y0=[bottom] * len(borders), y1=[top] * len(borders),
        line_color="#8a94a0", line_dash="dashed", line_width=1,
    )  # fmt: skip
    plot.text(
        x=starts, y=[top - 0.08] * len(starts), text=[f"step {step}" for step, _, _ in drawing.steps],
        x_offset=5, text_baseline="top", text_color=_MUTED, text_font_size="12px", text_font=value(_FONT),
    )  # fmt: skip


def _path(plot: Figure, drawing: Drawing, layout: _Layout) -> None:
    """The critical path: a line along the rows, which goes up or down where it changes rank or stream."""
    xs: list[float] = []
    ys: list[float] = []
    for rank, kind, start, end in drawing.path:
        on_communication = kind in _ON_COMMUNICATION
        y = layout.communication(rank) - 0.26 if on_communication else layout.compute(rank) - 0.4
        xs += [start, end]
        ys += [y, y]
    for colour, width in (("white", 6), (palette.PATH_COLOUR, 3)):
        plot.line(x=xs, y=ys, line_color=colour, line_width=width, line_join="round", level="overlay")


def _overview(drawing: Drawing, x_range: Any) -> Figure:
    from bokeh.core.properties import value
    from bokeh.models import Range1d, RangeTool
    from bokeh.plotting import figure

    plot = figure(
        name="overview",
        x_range=Range1d(start=-0.02 * drawing.length_ms, end=1.02 * drawing.length_ms),
        y_range=Range1d(start=0, end=1),
        height=64,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
    )
    plot.quad(
        left=[start for _, start, _ in drawing.steps], right=[end for _, _, end in drawing.steps], bottom=0, top=1,
        fill_color=["#eef2f6" if number % 2 else "#dde4ec" for number in range(len(drawing.steps))], line_color=None,
    )  # fmt: skip
    every = max(len(drawing.steps) // 20, 1)
    labelled = drawing.steps[::every]
    plot.text(
        x=[(start + end) / 2 for _, start, end in labelled], y=[0.5] * len(labelled),
        text=[str(step) for step, _, _ in labelled], text_align="center", text_baseline="middle",
        text_color=_MUTED, text_font_size="11px", text_font=value(_FONT),
    )  # fmt: skip
    tool = RangeTool(x_range=x_range, start_gesture="pan")
    tool.overlay.fill_color, tool.overlay.fill_alpha = "#3f7fb5", 0.18
    plot.add_tools(tool)
    plot.yaxis.visible = False
    plot.xaxis.axis_label = "all drawn steps: drag the frame to move the view above"
    _dress(plot)
    plot.min_border_left = 80
    return plot


def _dress(plot: Figure) -> None:
    plot.min_border_left, plot.min_border_right = 80, 20
    plot.grid.visible = False
    plot.outline_line_color = _RULE
    plot.background_fill_color = plot.border_fill_color = "white"
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = "#c3cad3"
        axis.minor_tick_line_color = None
        axis.major_label_text_color = _INK
        axis.axis_label_text_color = _MUTED
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font = axis.axis_label_text_font = _FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
