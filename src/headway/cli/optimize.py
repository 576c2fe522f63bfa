"""``headway optimize``: search for the best plan and write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.cli import output
from headway.cli.allowing import allow_option
from headway.cli.measuring import (
    UNDECIDED,
    command_to_measure_with,
    decide_by_runs,
    measured_document,
    measured_sentences,
    measured_table,
)
from headway.cli.optimize_answer import Answer, command_lines, explanation_parts, plans_tables, searched
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
    show_default=True, help="Write the best plan of this strategy, whatever was recorded: ddp, decoupled, "
    "parameter_server, pipeline, with --allow also partial-all-reduce, or one of a plug-in. "
    "stages: the best plan with other pipeline stages, for scripts that call headway.parallelize.",
)  # fmt: skip
@click.option(
    "--memory-limit", "limit", metavar="SIZE",
    help="Leave out plans under which a rank needs more memory than this, such as 800M or 16GiB.",
)  # fmt: skip
@click.option(
    "--follow-network", "follow", is_flag=True,
    help="Write a plan that changes with the network while the job trains; only for pipelines.",
)  # fmt: skip
@allow_option
@click.option(
    "--explain", "in_full", is_flag=True,
    help="Explain the plan choice by choice, and say what would bring it closer to the bound.",
)  # fmt: skip
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="List all plans, with their full names, instead of the best of each kind.",
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Draw the plan and its explanation on this page."
)  # fmt: skip
@click.option(
    "--measure", "measured", type=click.IntRange(min=0), is_flag=False, flag_value=UNDECIDED, metavar="[N]",
    help="Let short runs of the command after -- decide among plans that predictions cannot tell apart, or among the N "
    "best.",
)  # fmt: skip
@click.option(
    "--budget", "budget_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Search no longer than this, and write the best plan found by then.",
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
    every: bool,
    html: Path | None,
    measured: int | None,
    budget_s: float | None,
    as_json: bool,
) -> None:
    """Replay TRACE under every candidate plan, and write the plan to use to a file.

    That is the recorded plan, unless another is predicted to be faster by more than the prediction may be off.

    headway optimize trace -o plan.yaml

    headway optimize trace -o plan.yaml --measure -- torchrun --nproc-per-node 2 train.py

    More TRACEs are recordings of the same pipeline with other numbers of micro-batches, which are tried too.
    """
    from headway.cluster import Cluster

    command = command_to_measure_with(ctx, measured, follow=follow)
    limit_bytes = None if limit is None else parse_size_bytes(limit, "--memory-limit")
    cluster = Cluster.load(cluster_path) if cluster_path else None
    loaded = _loaded(traces, (plan_path, html), command if measured is not None else None)

    from headway.diagnosis.identity import contention
    from headway.optimization.explanation import explain
    from headway.optimization.plan_writing import plan_of
    from headway.optimization.result import check_strategy, following
    from headway.optimization.search import search
    from headway.optimization.sizes import others_of
    from headway.replayer.replayer import Replayer
    from headway.report.plan_page import plan_page

    wanted = None if only == ANY else only
    check_strategy(wanted)
    with output.progress("searching") as advance:
        replayer = Replayer(loaded[0], cluster)
        others = others_of(replayer, loaded[1:])
        found = search(
            replayer, advance, memory_limit_bytes=limit_bytes, others=others, allow=allow, budget_s=budget_s,
            needed=wanted or "",
        )  # fmt: skip
    predicted = following(found, wanted) if follow else found.best(wanted)
    best, chosen = decide_by_runs(predicted, found, replayer, measured, wanted, command, plan_path)
    plan_of(best, replayer).save(plan_path)
    with output.progress("explaining"):
        explained = None if follow else explain(replayer, found, best, go_further=in_full)
    options = [
        *(("--cluster", str(cluster_path)) if cluster_path else ()),
        *(("--strategy", only) if wanted else ()),
        *(("--memory-limit", limit) if limit else ()),
        *(word for each in allow for word in ("--allow", each)),
    ]
    measure_line, run_line = command_lines(
        traces, plan_path, options, command or loaded[0].manifest.command, replayer.trace.world_size
    )
    answer = Answer(
        found, best, chosen, wanted or "", plan_path, "" if follow else measure_line, run_line,
        follows_network=follow, contention=contention(loaded[0].manifest.ranks),
    )  # fmt: skip
    if html is not None:
        name = traces[0].resolve().name or "a trace"
        files.write_text(html, plan_page(name, best, found, explained, answer.headline()))
    if as_json:
        fields = answer.document(explained)
        output.print_document("optimization", {**fields, "measured": measured_document(chosen, predicted)})
        return
    measures = [] if measured is None else [*measured_table(chosen)]
    sentences = [] if chosen is None else measured_sentences(chosen, predicted)
    console = output.console()
    for line in (answer.headline(), *answer.reasons(), *sentences, *answer.next_steps(), ""):
        console.print(line)
    if found.can_rank and found.bound is not None and best.is_runnable and not best.changes_training:
        console.print(found.bound.distance(best.predicted_ms))
    for part in (*explanation_parts(explained, in_full=in_full), *answer.notes(), *measures):
        console.print(part)
    for part in plans_tables(found, best, every=every):
        console.print(part)
    output.print_order(console, best.schedule)
    console.print(f"{searched(found)} Links: {replayer.cluster.source}.")
    if html is not None:
        console.print(f"Wrote {html}")


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
