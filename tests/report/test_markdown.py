"""The summary in Markdown: the answer first, and nothing of the trace becomes markup, a link or a mention."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from tests.synthetic import Connections, SyntheticJob, synthetic_trace, with_ranks

from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.comparison import compare
from headway.diagnosis.findings import Finding
from headway.report.text import MAX_MARKDOWN_RANKS, markdown
from headway.report.words import PART_LABELS

JOB = SyntheticJob(slow={(2, "backward"): 15.0})
OURS = {"p", "strong", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](http://evil.example/x.png)",
    "[x](javascript:alert(1))",
    "https://evil.example/x",
    "www.evil.example",
    "mailto:a@evil.example",
    "@octocat and @org/team",
    "fixes #1, org/repo#2, GH-3",
    "| a | b |\n|---|---|",
    "`code` ```\nfence",
    "**bold** _it_ ~~gone~~ $x$ <!-- -->",
    "# heading\n\n- item\n> quote",
    ":+1: :tada:",
    "&lt;b&gt; &amp; &#64;octocat",
    "\x00\x1b[31mred\x07\u202egnp\u2028next",
    "1. one",
    "\\@octocat \\[x\\](y)",
]


@pytest.fixture(scope="module")
def slow() -> Diagnosis:
    return diagnose(synthetic_trace(JOB))


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def test_the_first_line_answers_the_question(slow: Diagnosis) -> None:
    healthy = diagnose(synthetic_trace(replace(JOB, slow={})))
    assert markdown(slow).splitlines()[0].startswith("**Rank 2 is a straggler: ")
    first = markdown(slow, compare(slow, healthy)).splitlines()[0]
    assert first.startswith("**❌ Slower by ")
    assert markdown(healthy, compare(healthy, slow)).startswith("**✅ Faster by ")
    assert markdown(healthy, compare(healthy, healthy)).startswith("**✅ No change beyond noise: ")


def test_tables_hold_every_part(slow: Diagnosis) -> None:
    text = markdown(slow, compare(slow, slow))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    assert rows[0] == ["Rank", *(PART_LABELS[part] for part in PARTS), "Step"]
    assert [row[0] for row in rows[2:]] == ["0", "1", "2", "3", "change"]
    assert rows[4][1:-1] == [f"{getattr(slow.breakdown[2], part):.2f}" for part in PARTS]
    assert set(rows[-1][1:]) == {"+0.00"}
    assert {len(row) for row in rows} == {len(PARTS) + 2}
    assert rendered(text).count("<table>") == 1


def test_several_findings_are_listed_with_their_costs(slow: Diagnosis) -> None:
    stalls = Finding("stalls", 3.0, "Rank 1 stalls.", (1, 3))
    hidden = Finding("input", 0.1, "Input.", stands_out=False)
    text = markdown(replace(slow, findings=(*slow.findings[:1], stalls, hidden)))
    assert "| stalls | 3.00 | 1, 3 |" in text
    assert "input | 0.10" not in text
    assert rendered(text).count("<table>") == 2


def test_of_many_ranks_those_that_compute_longest_are_listed() -> None:
    found = diagnose(
        synthetic_trace(SyntheticJob(world_size=40, steps=2, slow={(37, "forward"): 9.0}, bucket_bytes=()))
    )
    text = markdown(found)
    assert text.count("\n| ") == MAX_MARKDOWN_RANKS + 1
    assert "\n| 37 |" in text
    assert "Only the 16 of 40 ranks that compute longest are listed." in text


def test_notes_are_folded_away(slow: Diagnosis) -> None:
    assert "<details>" not in markdown(slow)
    text = markdown(replace(slow, notes=("7 events were dropped.", "Clocks differ.")))
    assert "<details><summary>Before you trust the numbers</summary>\n\n- 7 events" in text
    assert rendered(text).count("<li>") == 2


def check_harmless(text: str, said: str) -> None:
    """What is rendered of ``text`` holds ``said`` as plain words, and neither markup nor anything GitHub would link."""
    assert all(character.isprintable() or character == "\n" for character in text)
    html = rendered(text)
    inside = re.sub(r"</?details>|</?summary>", "", html)
    tags = re.findall(r"<(?!!--)/?([a-z0-9]+)[^>]*>", inside)
    assert set(tags) <= OURS
    assert all(
        re.fullmatch(r'</?[a-z]+( style="text-align:right")?>', tag) for tag in re.findall(r"<[^>]*>", inside)
    )
    words = re.sub(r"<[^>]*>", "", inside)
    assert not re.search(r"[@#]\w|\bwww\.|://|\bGH-|:[\w+-]+:|mailto:\w", words, re.IGNORECASE)
    plain = words.replace("\u200b", "").replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
    assert " ".join(said.split()) in " ".join(plain.replace("&amp;", "&").split())


def shown(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_trace_says_is_text(name: str, slow: Diagnosis) -> None:
    job = SyntheticJob(bucket_bytes=(4_000_000,) * 4, connections=Connections({(0, 1): 1.0}))
    found = diagnose(with_ranks(synthetic_trace(job), {0: {"host": name}}))
    assert shown(name) in found.verdict
    check_harmless(markdown(found), f"The link from {shown(name)} to host1 is slow")
    check_harmless(markdown(replace(slow, notes=(name, "Next."))), shown(name))


@given(st.text(st.sampled_from("ab1@#:/\\`*_[](){}<>!|~&$+-.= \n\u200b\x1bwG H"), max_size=30))
def test_no_text_gets_through(text: str) -> None:
    found = replace(FOUND, verdict=f"Verdict {text} end.", notes=(f"{text}x", "Next."))
    check_harmless(markdown(found), f"Verdict {shown(text)} end.".replace("  ", " "))


FOUND = diagnose(synthetic_trace(SyntheticJob(steps=1, world_size=1)))


def test_long_names_are_cut() -> None:
    assert len(markdown(replace(FOUND, verdict="x" * 100_000, notes=("y" * 100_000,)))) < 6000
