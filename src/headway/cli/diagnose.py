"""``headway diagnose``: explain where the time of a recorded job went, and which ranks are to blame."""

from __future__ import annotations

import math
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from headway import files
from headway.errors import one_line

if TYPE_CHECKING:
    from headway.diagnosis import Diagnosis

PATIENCE_S = 2.0  # tasks that take longer say so


@click.command("diagnose")
@click.argument("folder", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML report to this file."
)
@click.option(
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare the links with the rates in this cluster file.",
)
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="TRACE",
    type=click.Path(path_type=Path),
    help="Compare with this trace; exit with status 1 if the step is longer by more than --threshold and noise. "
    "May be repeated: several baselines show how much runs vary.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="How much longer than the baseline's the step may be, in percent.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a summary in GitHub's Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diagnose(
    folder: Path,
    html: Path | None,
    cluster_file: Path | None,
    baselines: tuple[Path, ...],
    threshold: float,
    as_markdown: bool,
    as_json: bool,
) -> int:
    """Explain where the time of the job recorded in TRACE went, and which ranks are to blame."""
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown cannot be combined.")
    if not math.isfinite(threshold):
        raise click.BadParameter("expected a finite percentage.", param_hint="--threshold")
    from headway.cluster import Cluster
    from headway.diagnosis import diagnose as diagnose_trace
    from headway.diagnosis.comparison import compare, job_differences
    from headway.report.text import markdown, print_diagnosis
    from headway.trace.folder import load_trace

    words = Console(stderr=True)
    if html is not None:
        from headway.report.timeline import require_bokeh

        require_bokeh()  # fail before the work
    cluster = Cluster.load(cluster_file) if cluster_file else None
    with _patience(words, "Reading the trace"):
        trace = load_trace(folder)
    with _patience(words, "Diagnosing"):
        diagnosis = diagnose_trace(trace, cluster)
        before: list[Diagnosis] = []
        differs: list[str] = []
        for baseline in baselines:
            base = load_trace(baseline)
            differs.append(job_differences(trace, base))
            before.append(diagnose_trace(base))
    comparison = compare(diagnosis, *before, threshold=threshold / 100) if before else None
    for sentence in dict.fromkeys(filter(None, differs)):
        words.print(sentence, markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        from headway.report.comparison_view import Baseline
        from headway.report.page import write_html

        with _patience(words, "Drawing"):
            write_html(trace, diagnosis, html, Baseline.of(baselines, before, comparison))
    if as_json:
        document = diagnosis.to_document()
        if comparison is not None:
            document["baseline"] = comparison.to_document()
        click.echo(files.dump_json(document), nl=False)
    elif as_markdown:
        click.echo(markdown(diagnosis, comparison), nl=False)
    else:
        console = Console()
        if comparison is not None:
            console.print(Text(comparison.sentence, style="bold"), soft_wrap=True)
        print_diagnosis(diagnosis, console)
        _print_next(console, folder, plannable=bool(trace.model.parameters))
    if html is not None:
        words.print(f"Wrote {html}", markup=False, highlight=False, soft_wrap=True)
    return int(comparison is not None and comparison.regressed)


def _print_next(console: Console, folder: Path, *, plannable: bool) -> None:
    """Print the next command, unless it would reject the trace."""
    if plannable:
        command = f"headway optimize {shlex.quote(str(folder))} -o plan.yaml"
        console.print(Text(f"Next: {one_line(command)}"), soft_wrap=True)


@contextmanager
def _patience(console: Console, doing: str) -> Iterator[None]:
    """Print ``doing`` on ``console`` if the block takes more than two seconds."""
    status = console.status(f"{doing} …")

    def show() -> None:
        if console.is_terminal:
            status.start()
        else:
            console.print(f"{doing} …")

    timer = threading.Timer(PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
