"""Draws predicted step time and efficiency over world sizes (``headway predict --plot``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway import files
from headway.errors import UserError, how_to_install
from headway.prediction.replayed import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")


def kind_of_picture(path: Path) -> str:
    """The picture format from the suffix of ``path``.

    Raises UserError if the format is not supported or matplotlib is not installed.
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        expected = f"a file name ending in .{', .'.join(FORMATS)}"
        raise UserError("--plot: unknown picture format", got=path.name, expected=expected)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs matplotlib, which is not installed", fix=f"Run: {how_to_install('plots')}."
        )
    return kind


def draw_scaling(predictions: Sequence[Prediction], title: str, path: Path) -> None:
    """Plots the step time and efficiency of every strategy over world sizes, and writes ``path`` atomically.

    Raises UserError if matplotlib is not installed or the suffix is not one of ``FORMATS``.
    """
    kind = kind_of_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, efficiencies = figure.subplots(1, 2)
    for name in dict.fromkeys(prediction.strategy for prediction in predictions):
        of_strategy = [prediction for prediction in predictions if prediction.strategy == name]
        workers = [prediction.workers for prediction in of_strategy]
        times.plot(workers, [prediction.step_ms for prediction in of_strategy], marker="o", label=name)
        efficiencies.plot(
            workers, [100 * prediction.efficiency for prediction in of_strategy], marker="o", label=name
        )
    _axes(times, "step (ms)")
    _axes(efficiencies, "efficiency (%)")
    efficiencies.set_ylim(0, 105)
    times.legend(frameon=False, fontsize=9)
    figure.suptitle(title.replace("$", r"\$"))
    with files.file_written_whole(path) as file:
        figure.savefig(file, format=kind)


def _axes(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
