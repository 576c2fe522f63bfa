"""Traces and diagnoses show themselves in notebooks, and none of their text is HTML."""

from __future__ import annotations

from dataclasses import replace

from tests.synthetic import SyntheticJob, synthetic_trace

import headway
from headway.notebook import MOST_CHARACTERS, MOST_ROWS, table_html

EVIL = "<script>alert(1)</script>\x1b[31m\u202e&"


def test_a_trace_and_its_diagnosis() -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=3, slow={(1, "backward"): 20.0}))
    said = trace._repr_html_()
    assert said.startswith("<p>3 steps of 2 of 2 ranks")
    assert said.count("<tr>") == 3
    found = headway.diagnose(trace)
    assert found.findings
    said = found._repr_html_()
    assert said.count("<tr>") == 1 + sum(one.stands_out for one in found.findings)
    assert f"{found.findings[0].cost_ms:.2f}" in said


def test_foreign_text_is_escaped_and_cut() -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=3))
    ranks = tuple(info.model_copy(update={"host": EVIL}) for info in trace.manifest.ranks)
    evil = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": ranks}))
    said = evil._repr_html_()
    assert "&lt;script&gt;" in said
    assert not {"<script", "\x1b", "\u202e"} & {
        part for part in ("<script", "\x1b", "\u202e") if part in said
    }
    many = table_html("x" * 1000, ("a",), ([number] for number in range(MOST_ROWS + 5)))
    assert many.count("<tr>") == 1 + MOST_ROWS
    assert "and 5 more" in many
    assert "x" * (MOST_CHARACTERS + 1) not in many
