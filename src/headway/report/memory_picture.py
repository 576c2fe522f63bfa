"""Memory over a step as a picture: areas that lie upon each other, and where the peak is. Only the places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.diagnosis.memory import MemoryPoint, StepMemory
from headway.report import palette, words
from headway.units import format_bytes

WIDTH, HEIGHT, LEFT, TOP, AXIS = 1000.0, 240.0, 64.0, 20.0, 22.0
TICKS = 6
_PASSES = ("gradients", "activations and temporary tensors")


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """What is drawn: areas (name, colour, outline, bytes at the peak), marks of time and of bytes, and the peak."""

    title: str
    areas: tuple[tuple[str, str, str, str], ...]
    marks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, str], ...]
    peak: tuple[float, float, str]

    width: float = WIDTH
    height: float = HEIGHT + TOP + AXIS
    left: float = LEFT


def memory_picture(memory: StepMemory) -> MemoryPicture | None:
    """The picture; None where only the peak is known."""
    peak = memory.peak
    if peak is None:
        return None
    points = memory.points
    start_ms, end_ms = points[0].ms, points[-1].ms
    across = (WIDTH - LEFT) / max(end_ms - start_ms, 1e-9)
    top_bytes = 1.04 * max(memory.peak_bytes, 1)
    up = HEIGHT / top_bytes
    layers = [
        *(
            (name, [size_bytes] * len(points), size_bytes)
            for name, size_bytes in memory.constant_bytes.items()
        ),
        (_PASSES[0], [point.gradient_bytes for point in points], peak.gradient_bytes),
        (_PASSES[1], [point.working_bytes for point in points], peak.working_bytes),
    ]
    xs = [LEFT + (point.ms - start_ms) * across for point in points]
    below = [0] * len(points)
    areas = []
    for name, sizes, at_peak in layers:
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        outline = _outline(xs, [_y(low, up) for low in below], [_y(high, up) for high in above])
        areas.append((name, palette.MEMORY_COLOURS[name], outline, format_bytes(at_peak)))
        below = above
    at = points.index(peak)
    held = sum(memory.constant_bytes.values()) + peak.gradient_bytes + peak.working_bytes
    return MemoryPicture(
        title=f"Memory of a rank over a step: at most {format_bytes(memory.peak_bytes)}",
        areas=tuple(areas),
        marks=tuple(
            (LEFT + (WIDTH - LEFT) * part / TICKS, words.duration(start_ms + (end_ms - start_ms) * part / TICKS))
            for part in range(TICKS + 1)
        ),
        levels=tuple(
            (_y(top_bytes * part / 4, up), format_bytes(top_bytes * part / 4)) for part in range(1, 4)
        ),
        peak=((xs[max(at - 1, 0)] + xs[at]) / 2, _y(held, up), peak_words(peak)),
    )  # fmt: skip


def peak_words(peak: MemoryPoint) -> str:
    """In words, when most is held."""
    if peak.what.startswith("gradient of "):
        return f"just before the {words.plain(peak.what, 80)} is complete"
    return f"in {words.plain(peak.what, 80)}" if peak.what else "at the start of forward"


def _y(size_bytes: float, up: float) -> float:
    return TOP + HEIGHT - size_bytes * up


def _outline(xs: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> str:
    """The polygon between two curves that hold each value from the point before to its own."""

    def steps(ys: Sequence[float]) -> list[str]:
        corners = [(xs[0], ys[0])]
        for before, x, y in zip(xs, xs[1:], ys[1:], strict=False):
            corners += [(before, y), (x, y)]
        return [f"{x:.1f},{y:.1f}" for x, y in corners]

    return " ".join([*steps(highs), *reversed(steps(lows))])
