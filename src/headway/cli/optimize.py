"""``headway optimize``: search for the best plan and write it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from headway.cli import output
from headway.cli.allowing import allow_option
from headway.units import format_bytes, parse_size_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.optimization.search import Candidate, SearchResult
    from headway.planning.bound import StepBound

MOST_NAMED = 2
ANY = "any"
FOLLOWED_BY = ("headway run", "headway.parallelize")


@click.command()
@click.argument(
    "traces", metavar="TRACE [TRACE]...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("-o", "--output", "plan_path", type=click.Path(path_type=Path), default=Path("plan.yaml"),
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def optimize(
    traces: tuple[Path, ...],
    plan_path: Path,
    cluster_path: Path | None,
    only: str,
    limit: str | None,
    follow: bool,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Replay TRACE under every candidate plan, rank them, and write the best to a file.

    More TRACEs are recordings of the same pipeline with other numbers of micro-batches, which are tried too.
    """
    from headway.cluster import Cluster
    from headway.replayer.incomplete import check_takes_plans
    from headway.trace.folder import load_trace

    limit_bytes = None if limit is None else parse_size_bytes(limit, "--memory-limit")
    cluster = Cluster.load(cluster_path) if cluster_path else None
    loaded = [load_trace(trace) for trace in traces]
    for each in loaded:
        check_takes_plans(each)

    from headway.optimization.search import following, plan_of, search
    from headway.optimization.sizes import others_of
    from headway.replayer.replayer import Replayer

    with output.progress("searching") as advance:
        replayer = Replayer(loaded[0], cluster)
        others = others_of(replayer, loaded[1:])
        found = search(replayer, advance, memory_limit_bytes=limit_bytes, others=others, allow=allow)
    wanted = None if only == ANY else only
    best = following(found, wanted) if follow else found.best(wanted)
    plan_of(best, replayer).save(plan_path)
    if as_json:
        output.print_document(
            "optimization",
            {
                "baseline_ms": found.baseline_ms,
                "recorded_ms": found.baseline_ms,
                "replayed_ms": found.replayed_ms,
                "plans": [
                    {
                        "name": candidate.name,
                        "predicted_ms": candidate.predicted_ms,
                        "uncertainty_ms": candidate.uncertainty_ms,
                        "speedup": candidate.expected.speedup,
                        "peak_bytes": candidate.peak_bytes,
                        "dominated": found.dominated(candidate),
                        "followed_by": FOLLOWED_BY[candidate.recut is not None],
                        "changes": list(candidate.changes),
                        "changes_training": candidate.changes_training,
                    }
                    for candidate in found.candidates
                ],
                "excluded": [
                    {"name": each.name, "predicted_ms": each.predicted_ms, "peak_bytes": each.peak_bytes}
                    for each in found.excluded
                ],
                "bound_ms": found.bound_ms,
                "bound": None if found.bound is None else bound_document(found.bound),
                "searched": len(found.candidates),
                "elapsed_s": found.elapsed_s,
                "plan": str(plan_path),
                "like_best": [candidate.name for candidate in found.like(best)],
                "may_gain_nothing": best.expected.may_gain_nothing,
                "changes_training": best.changes_training,
                "note": found.note,
            },
        )
        return
    console = output.console()
    console.print(
        f"Best plan: {best.name}, predicted {best.predicted_ms:.1f} ± {best.uncertainty_ms:.1f} ms a step, "
        f"{best.expected.speedup:.2f} times as fast as recorded ({found.baseline_ms:.1f} ms); written to {plan_path}."
        + (f" It changes what is trained: {best.changes_training}." if best.changes_training else "")
    )
    for sentence in doubts_of(best, found.like(best)):
        console.print(sentence)
    if found.bound is not None and best.recut is None and not best.changes_training:
        console.print(found.bound.distance(best.predicted_ms))
    if found.note:
        console.print(f"Note: {found.note}.")
    console.print(plans_table(found))
    output.print_order(console, best.schedule)
    console.print(
        f"{len(found.candidates)} plans replayed in {found.elapsed_s:.1f} s. Links: {replayer.cluster.source}."
    )


def doubts_of(best: Candidate, like: Sequence[Candidate]) -> list[str]:
    """What must be said of the best plan: that it may gain nothing, and which others may be as good."""
    said = []
    if best.changed and best.expected.is_slower:
        said.append("The job would be slower with this plan, by more than ±: leave it as it is.")
    elif best.changed and best.expected.may_gain_nothing:
        said.append("The gain is no more than ±: the job may be no faster with this plan.")
    if like:
        names = " | ".join(each.name for each in like[:MOST_NAMED])
        more = f" | and {len(like) - MOST_NAMED} more" if len(like) > MOST_NAMED else ""
        said.append(f"Within ±, these plans may be as good: {names}{more}.")
    return said


def bound_document(bound: StepBound) -> dict[str, Any]:
    """The bound as a document: what binds, why, and what each part leaves of a step by itself."""
    parts_ms = {name: part_ns / 1e6 for name, part_ns in bound.parts_ns.items()}
    return {"binds": bound.binds, "reason": bound.reason, "parts_ms": parts_ms}


def plans_table(found: SearchResult) -> Table:
    """The ranked candidates, with the bound that no plan can beat."""
    table = Table("plan", "predicted ms", "± ms", "speedup", "ratio to bound", "memory", "changes")
    for candidate in found.candidates:
        has_bound = candidate.recut is None and not candidate.changes_training
        table.add_row(
            candidate.name + " †" * (candidate.recut is not None) + " ‡" * bool(candidate.changes_training),
            f"{candidate.predicted_ms:.1f}",
            f"{candidate.uncertainty_ms:.1f}",
            f"{candidate.expected.speedup:.2f}x",
            f"{candidate.predicted_ms / found.bound_ms:.2f}" if has_bound else "",
            _memory(found, candidate),
            "; ".join(candidate.changes),
        )
    recorded, replayed = f"recorded {found.baseline_ms:.1f} ms", f"replayed {found.replayed_ms:.1f} ms"
    table.caption = f"{recorded}, {replayed}, bound {found.bound_ms:.1f} ms"
    if any(map(found.dominated, found.candidates)):
        table.caption += "; * another plan is no slower and needs no more memory"
    if any(candidate.recut for candidate in found.candidates):
        table.caption += "; † only with headway.parallelize in the script, without a bound"
    if any(candidate.changes_training for candidate in found.candidates):
        table.caption += (
            "; ‡ changes what is trained, as was allowed: the mean iteration of a rank, without a bound"
        )
    return table


def _memory(found: SearchResult, candidate: Candidate) -> str:
    """The most that a rank holds, marked where another plan is better in memory or time and as good in the other."""
    if candidate.peak_bytes is None:
        return ""
    rough = "~" if candidate.recut else ""
    return rough + format_bytes(candidate.peak_bytes) + (" *" if found.dominated(candidate) else "")
