"""What the page of accuracy says about choices."""

from __future__ import annotations

from typing import Any

from accuracy.page import choices


def row(
    lab: str, method: str, predicted_ms: float, time_ms: float, uncertainty_ms: float = 10.0
) -> dict[str, Any]:
    return {
        "case": "m", "lab": lab, "method": method, "predicted_ms": predicted_ms, "time_ms": time_ms,
        "uncertainty_ms": uncertainty_ms,
    }  # fmt: skip


def test_choices_are_right_within_what_is_said_of_them() -> None:
    rows = [
        row("a", "ddp", 100, 100), row("a", "ours", 90, 90),
        row("b", "ddp", 100, 100), row("b", "ours", 95, 108),
        row("c", "ddp", 100, 100), row("c", "ours", 95, 112),
        row("d", "ddp", 100, 100),
    ]  # fmt: skip
    said = "\n".join(choices(rows))
    assert "in 2 of 3 labs (the very best in 1;" in said
    assert "- m c: ours, 12.0% slower than ddp" in said
    assert not choices([{k: v for k, v in each.items() if k != "uncertainty_ms"} for each in rows])
