"""``headway optimize``: search for the best plan and write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.cli import output
from headway.cli.allowing import allow_option
from headway.cli.explaining import explanation_parts
from headway.cli.found import doubts_of, plans_table, search_document, searched
from headway.cli.measuring import (
    UNDECIDED,
    command_to_measure_with,
    decide_by_runs,
    measured_document,
    measured_sentences,
    measured_table,
)
from headway.units import parse_size_bytes

if TYPE_CHECKING:
    from headway.trace.format import Trace

ANY = "any"


@click.command()
@click.argument(
    "traces", metavar="TRACE [TRACE]...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("-o", "--output", "plan_path", type=click.Path(path_type=Path, dir_okay=False), default=Path("plan.yaml"),
              show_default=True, help="The plan file to write.")  # fmt: skip
@click.option(
    "--cluster",
    "cluster_path",
    type=click.Path(path_type=Path),
    help="A cluster file, instead of the trace's own or fitted links.",
)
@click.option(
    "--strategy", "only", metavar="NAME", default="any",
    show_default=True, help="Write the best plan of this strategy; of stages, the best of stages that the script "
    "does not have, which only headway.parallelize follows (of pipeline too, where the script has none).",
)  # fmt: skip
@click.option(
    "--memory-limit", "limit", metavar="SIZE",
    help="Leave out plans under which a rank would need more memory than this, such as 800M or 16GiB.",
)  # fmt: skip
@click.option(
    "--follow-network", "follow", is_flag=True,
    help="Write a plan that changes with the network while the job trains: of a pipeline, the size of its groups.",
)  # fmt: skip
@allow_option
@click.option(
    "--explain", "in_full", is_flag=True,
    help="Explain the plan choice by choice, and say what would bring it closer to the bound.",
)  # fmt: skip
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Draw the plan and its explanation on this page."
)  # fmt: skip
@click.option(
    "--measure", "measured", type=click.IntRange(min=0), is_flag=False, flag_value=UNDECIDED, metavar="[N]",
    help="Let short runs of the command after -- decide among plans that predictions do not tell apart, or with N, "
    "among the N best.",
)  # fmt: skip
@click.option(
    "--budget", "budget_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Search no longer than this: the best plan that was found by then is written.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def optimize(
    ctx: click.Context,
    traces: tuple[Path, ...],
    plan_path: Path,
    cluster_path: Path | None,
    only: str,
    limit: str | None,
    follow: bool,
    allow: tuple[str, ...],
    in_full: bool,
    html: Path | None,
    measured: int | None,
    budget_s: float | None,
    as_json: bool,
) -> None:
    """Replay TRACE under every candidate plan, rank them, and write the best to a file.

    headway optimize trace -o plan.yaml

    headway optimize trace -o plan.yaml --measure -- torchrun --nproc-per-node 2 train.py

    More TRACEs are recordings of the same pipeline with other numbers of micro-batches, which are tried too.
    """
    from headway.cluster import Cluster

    command = command_to_measure_with(ctx, measured, follow=follow)
    limit_bytes = None if limit is None else parse_size_bytes(limit, "--memory-limit")
    cluster = Cluster.load(cluster_path) if cluster_path else None
    loaded = _loaded(traces, (plan_path, html), command if measured is not None else None)

    from headway.optimization.explanation import explain
    from headway.optimization.plan_writing import plan_of
    from headway.optimization.result import following
    from headway.optimization.search import search
    from headway.optimization.sizes import others_of
    from headway.replayer.replayer import Replayer
    from headway.report.plan_page import plan_page

    with output.progress("searching") as advance:
        replayer = Replayer(loaded[0], cluster)
        others = others_of(replayer, loaded[1:])
        found = search(
            replayer, advance, memory_limit_bytes=limit_bytes, others=others, allow=allow, budget_s=budget_s
        )
    wanted = None if only == ANY else only
    predicted = following(found, wanted) if follow else found.best(wanted)
    best, chosen = decide_by_runs(predicted, found, replayer, measured, wanted, command, plan_path)
    plan_of(best, replayer).save(plan_path)
    with output.progress("explaining"):
        explained = None if follow else explain(replayer, found, best, go_further=in_full)
    if html is not None:
        name = traces[0].resolve().name or "a trace"
        files.write_text(html, plan_page(name, best, found, explained))
    if as_json:
        output.print_document(
            "optimization",
            {
                **search_document(found, best),
                "plan": str(plan_path),
                "measured": measured_document(chosen, predicted),
                "explanation": None if explained is None else explained.to_document(),
            },
        )
        return
    console = output.console()
    console.print(
        f"Best plan: {best.name}, predicted {best.predicted_ms:.1f} ± {best.uncertainty_ms:.1f} ms a step, "
        f"{best.expected.speedup:.2f} times as fast as recorded ({found.baseline_ms:.1f} ms); written to {plan_path}."
        + (f" It changes what is trained: {best.changes_training}." if best.changes_training else "")
    )
    for sentence in (
        doubts_of(best, found.like(best)) if chosen is None else measured_sentences(chosen, predicted)
    ):
        console.print(sentence)
    if found.bound is not None and best.recut is None and not best.changes_training:
        console.print(found.bound.distance(best.predicted_ms))
    for part in explanation_parts(explained, in_full=in_full):
        console.print(part)
    if found.note:
        console.print(f"Note: {found.note}.")
    if measured is not None:
        console.print(measured_table(chosen))
    console.print(plans_table(found))
    output.print_order(console, best.schedule)
    console.print(f"{searched(found)} Links: {replayer.cluster.source}.")
    if html is not None:
        console.print(f"Wrote {html}", markup=False, highlight=False, soft_wrap=True)


def _loaded(
    traces: Sequence[Path], written: Sequence[Path | None], measured_with: Sequence[str] | None
) -> list[Trace]:
    """The recordings. Raises UserError where the rest of the command would end in vain."""
    from headway.integrations.short_runs import check_command
    from headway.replayer.incomplete import check_takes_plans
    from headway.report.timeline import require_bokeh
    from headway.trace.folder import load_trace

    _, html = written
    if html is not None:
        require_bokeh()
    for path in filter(None, written):
        files.check_writable(path)
    loaded = [load_trace(trace) for trace in traces]
    for each in loaded:
        check_takes_plans(each)
    if measured_with is not None:
        check_command(measured_with, loaded[0].world_size)
    return loaded
