"""What the report's tests share: traces that are odd, rich or hostile, and a browser if this machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.synthetic import SyntheticJob, events_of, trace_of

from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

HOSTILE = "<script>alert(1)</script>"
HOSTILE_JOB = SyntheticJob(
    slow={(2, "backward"): 9.0},
    modules=("stem", HOSTILE, "layer2", "</script><img src=http://example.invalid/x onerror=alert(2)>"),
    bucket_bytes=(500_000, 1_000_000, 12_000_000),
    steps=9,
)
MANY_RANKS_JOB = SyntheticJob(
    world_size=64,
    steps=50,
    ranks_a_host=8,
    slow={(37, "backward"): 9.0},
    jitter=0.1,
    modules=tuple(f"encoder.layer.{number}.attention" for number in range(8)),
)

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

# What tests ask of an open page: a model by its name, whether something holds of the timeline's ranges, boxes and
# hits, where data lie on the screen, and the text inside of every shadow root, where tooltips are.
_HELPERS = """
window.model = (name) => Bokeh.documents.map((one) => one.get_model_by_name(name)).find((one) => one !== null);
window.holds = (condition) => {
    const {x_range, y_range} = model("timeline"), {data, selected} = model("boxes").data_source;
    return condition(x_range, y_range, data, selected.indices);
};
window.place = (name, x, y) => {
    const view = Bokeh.index.find_one(model(name));
    view.el.scrollIntoView({block: "center"});
    const {left, top} = view.el.getBoundingClientRect();
    return [left + view.frame.x_scale.compute(x), top + view.frame.y_scale.compute(y)];
};
window.shadows = () => {
    const texts = [];
    const walk = (root) => {
        for (const element of root.querySelectorAll("*")) {
            if (element.tagName === "SCRIPT" && root !== document) texts.push("LIVE SCRIPT");
            if (element.shadowRoot) {
                texts.push(element.shadowRoot.textContent);
                walk(element.shadowRoot);
            }
        }
    };
    walk(document);
    return texts.join(" ");
};
"""


def detailed_trace(job: SyntheticJob, *, operators: int = 0, messages: int = 0) -> Trace:
    """The job's trace with so many operators inside of each module and so many messages inside of each collective."""
    rows = events_of(job)
    for rank, events in rows.items():
        for event in list(events):
            if event.kind in (Kind.FORWARD, Kind.BACKWARD):
                events += _divided(event, Kind.OPERATOR, operators, peer=-1)
            elif event.kind == Kind.COLLECTIVE:
                events += _divided(event, Kind.SEND, messages, peer=(rank + 1) % job.world_size)
                events += _divided(event, Kind.RECEIVE, messages, peer=(rank - 1) % job.world_size)
    return trace_of(rows)


def _divided(event: Event, kind: str, parts: int, peer: int) -> Iterator[Event]:
    for part in range(parts):
        length = event.duration_ns // parts
        yield Event(
            kind, f"{kind}{part}", event.stream, event.step, event.start_ns + part * length, length * 9 // 10,
            peer=peer, group="0" * (peer >= 0), size_bytes=1000,
        )  # fmt: skip


def served_trace(job: SyntheticJob) -> Trace:
    """The job's trace, whose last rank also adds up what the others push to it and pull from it."""
    rows = events_of(job)
    server = job.world_size - 1
    for rank, events in rows.items():
        for event in [event for event in events if event.kind == Kind.OPTIMIZER]:
            third = event.duration_ns // 3
            if rank == server:
                events.append(Event(Kind.SUM, "w", Stream.COMPUTE, event.step, event.end_ns, third))
                continue
            for place, kind in enumerate((Kind.PUSH, Kind.PULL)):
                events.append(
                    Event(
                        kind, "w", Stream.COMMUNICATION, event.step, event.start_ns + 2 * place * third, third,
                        size_bytes=5_000_000, peer=server,
                    )
                )  # fmt: skip
    return trace_of(rows)


def part_of(trace: Trace, world_size: int) -> Trace:
    """The trace as what some ranks of a larger job left."""
    return replace(trace, manifest=trace.manifest.model_copy(update={"world_size": world_size}))


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser; skips, with the reason, where there is none."""
    executable = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser on the PATH ({', '.join(_BROWSERS)})")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        try:
            yield found
        finally:
            found.close()


def open_offline(page: Any, path: Path) -> list[str]:
    """Open a page from disk; returns a list that fills with every complaint and every request to elsewhere."""
    complaints: list[str] = []

    def look(route: Any) -> None:
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            complaints.append(f"request to {url}")
            route.abort()

    def refuse(dialog: Any) -> None:
        complaints.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page.route("**/*", look)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", refuse)
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready === 'true'")
    page.evaluate(_HELPERS)
    return complaints
