"""``headway replay``: simulate the recorded steps, as they were or under what-ifs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from headway.cli import output
from headway.errors import one_line
from headway.units import counted, format_rate

if TYPE_CHECKING:
    from headway.cluster import Cluster
    from headway.plan import Plan
    from headway.replayer.replayer import Replayer
    from headway.simulator.expectation import Expectation
    from headway.simulator.what_if import WhatIf


def answered_over_a_horizon(replayer: Replayer, plan: Plan, what_if: WhatIf, as_json: bool) -> bool:
    """Print the iteration rates of an asynchronous ``plan``; returns False for synchronous plans."""
    from headway.strategies.registry import carried_out_by

    with output.progress("replaying"):
        outcome = replayer.replay_horizon(plan.strategy, what_if, passes=plan.passes)
        if outcome is None:
            return False
        ignored = carried_out_by(plan.strategy, replayer.cluster.library)[1]
        recorded = replayer.replay(None, what_if.without_members(), passes=plan.passes)
    together_per_s = recorded.graph.world_size / recorded.step_ms * 1e3
    speedup = outcome.total_per_s / together_per_s
    if as_json:
        output.print_document(
            "replay-horizon",
            {
                **outcome.to_document(),
                "strategy": plan.strategy.describe(),
                "recorded_strategy_iterations_per_s": together_per_s,
                "speedup": speedup,
                "what_if": what_if.describe(),
                "notes": [*replayer.notes, *ignored, outcome.describe()],
            },
        )
        return True
    console = output.console()
    stays = ", if no rank died or joined," if what_if.incidents.change_members else ""
    scenario = one_line(", ".join(filter(None, [what_if.describe(), plan.describe()])))
    console.print(
        f"{outcome.total_per_s:.2f} iterations/s of all ranks together with {scenario}: {speedup:.2f} times as many "
        f"as the recorded strategy under the same conditions{stays} ({together_per_s:.2f})."
    )
    for note in (*replayer.notes, *ignored, outcome.describe()):
        console.print(f"Note: {one_line(note)}")
    table = Table("rank", "iterations/s", "standing ms", "forming ms", title="an iteration")
    per_rank = zip(
        outcome.iterations_per_s, outcome.iterations, outcome.standing_ns, outcome.forming_ns, strict=True
    )
    for rank, (rate, count, standing_ns, forming_ns) in enumerate(per_rank):
        each_ms = 1e6 * max(1, count)
        table.add_row(str(rank), f"{rate:.2f}", f"{standing_ns / each_ms:.1f}", f"{forming_ns / each_ms:.1f}")
    console.print(table)
    console.print(
        f"Links: {one_line(replayer.cluster.source)}. {outcome.operations} operations. Communication does not "
        "slow down computation in this simulation."
    )
    return True


UNRELIABLE = (
    "Do not rely on this answer: the replay of what was recorded is {error:+.0%} off. Record again while nothing else "
    "runs on the machine.\n"
)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="K=V",
    help="bandwidth=2x, latency=0.5x, compute=0.5x (half the time), workers=8 or 4x8, bandwidth:HOST=0.5x, "
    "compute:RANK=2x, kernels:PATTERN=0.5x, traffic:HOST:HOST=100mbit or 100mbit@0s-2s, random-slowdown:10%=3x, and "
    "under plans without synchronous steps dies:RANK@2s, joins:RANK@5s; may be repeated.",
)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Replay under this plan.")
@click.option(
    "--cluster",
    "cluster_path",
    type=click.Path(path_type=Path),
    help="A cluster file with the links, instead of those measured or fitted from the trace.",
)
@click.option(
    "--check-folding",
    is_flag=True,
    help="Also simulate every rank individually, and print the difference.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def replay(
    trace: Path,
    what_ifs: tuple[str, ...],
    plan_path: Path | None,
    cluster_path: Path | None,
    check_folding: bool,
    as_json: bool,
) -> None:
    """Simulate the steps recorded in TRACE: as they were, or with --plan and --what-if."""
    from headway.cluster import Cluster
    from headway.plan import Plan
    from headway.replayer.incomplete import check_takes_plans
    from headway.simulator.what_if import WhatIf
    from headway.trace.folder import load_trace

    what_if = WhatIf.parse(what_ifs)
    plan = Plan.load(plan_path) if plan_path else None
    cluster = Cluster.load(cluster_path) if cluster_path else None
    loaded = load_trace(trace)
    if plan is not None:
        check_takes_plans(loaded)

    from headway.diagnosis.diagnosis import diagnose
    from headway.replayer.as_trace import replayed_trace
    from headway.replayer.fidelity import is_reproduced
    from headway.replayer.replayer import Replayer
    from headway.strategies.registry import carried_out_by

    with output.progress("replaying"):
        replayer = Replayer(loaded, cluster)
        if plan is not None:
            replayer.check(plan)
    if plan is not None and answered_over_a_horizon(replayer, plan, what_if, as_json):
        return
    with output.progress("replaying"):
        base = replayer.base
        is_changed = plan is not None or what_if != WhatIf()
        strategy, passes, mesh = (plan.strategy, plan.passes, plan.mesh) if plan else (None, (), None)
        result = replayer.replay(strategy, what_if, passes=passes, mesh=mesh) if is_changed else base
        unfolded_ms = (
            replayer.replay(strategy, what_if, passes=passes, fold=False, mesh=mesh).step_ms
            if check_folding
            else None
        )
        breakdown_ms = diagnose(replayed_trace(replayer, result)).to_document()["breakdown_ms"]
    notes = (
        *replayer.notes,
        *_assumed_links(replayer.cluster, result.graph.cluster),
        *carried_out_by(result.strategy, result.graph.cluster.library)[1],
    )
    recorded_ms, expected, graph = replayer.recorded_step_ms, replayer.expect(result), result.graph
    error = base.step_ms / recorded_ms - 1
    throughput = _throughput(expected.speedup, graph.world_size, loaded.world_size)
    if as_json:
        of_rank_ms = {str(rank): breakdown_ms[str(rank % graph.ranks)] for rank in range(graph.world_size)}
        output.print_document(
            "replay",
            {
                "step_ms": result.step_ms,
                "breakdown_ms": of_rank_ms,
                "peak_bytes": {rank: result.rank_peak_bytes(int(rank)) for rank in of_rank_ms},
                "operations": result.operations,
                "elapsed_s": result.elapsed_s,
                "recorded_step_ms": recorded_ms,
                "reproduced_step_ms": base.step_ms,
                "error": error,
                "is_reproduced": is_reproduced(error),
                "predicted_ms": expected.step_ms,
                "uncertainty_ms": expected.uncertainty_ms,
                "speedup": expected.speedup,
                **({} if throughput is None else throughput),
                "what_if": what_if.describe(),
                "notes": list(notes),
                **({} if unfolded_ms is None else {"unfolded_step_ms": unfolded_ms}),
                **({} if plan is None else {"plan": plan.describe()}),
            },
        )
        return
    console = output.console()
    scenario = one_line(", ".join(filter(None, [what_if.describe(), plan.describe() if plan else ""])))
    if is_changed:
        console.print(
            ("" if is_reproduced(error) else UNRELIABLE.format(error=error))
            + f"{expected.step_ms:.1f} ± {expected.uncertainty_ms:.1f} ms a step with {scenario}: "
            f"{_compared(expected, throughput, loaded.world_size)}."
        )
    else:
        console.print(
            f"{result.step_ms:.1f} ms a step replayed, {recorded_ms:.1f} ms recorded: error {error:+.1%}."
        )
    for note in notes:
        console.print(f"Note: {one_line(note)}")
    # As in the first line: the replay is corrected by its error on the recorded steps.
    console.print(_table(breakdown_ms, expected.step_ms / result.step_ms if is_changed else 1.0))
    output.print_order(console, graph.schedule)
    for line in _folding_lines(graph.ranks, graph.world_size, result.step_ms, unfolded_ms):
        console.print(line)
    console.print(
        f"Links: {one_line(replayer.cluster.source)}. {result.operations} operations in {result.elapsed_s:.2f} s. "
        f"Reproduces the recorded step with an error of {error:+.1%}."
    )


def _folding_lines(simulated: int, ranks: int, step_ms: float, unfolded_ms: float | None) -> Iterator[str]:
    """Say which ranks represent others, and how the step differs without folding if that was simulated."""
    if simulated < ranks:
        repeats = "rank repeats" if ranks == simulated + 1 else f"{ranks - simulated} ranks repeat"
        yield f"The other {repeats} these in the same order."
    if unfolded_ms is None:
        return
    if simulated == ranks:
        yield f"Folding: no rank represents another here, all {ranks} were simulated."
        return
    yield (
        f"Folding: {simulated} of {ranks} ranks were simulated. Simulated individually, all of them take "
        f"{unfolded_ms:.3f} ms a step, {unfolded_ms / step_ms - 1:+.4%}."
    )


def _assumed_links(recorded: Cluster, replayed: Cluster) -> Iterator[str]:
    """Says which links are assumed if a single rank was recorded, which has no links, and several are replayed."""
    from headway.network.fit import NO_LINK

    if recorded.source != NO_LINK or replayed.world_size == 1:
        return
    if len(replayed.hosts) > 1:
        gbps, latency_us = replayed.hosts[0].up_gbps, replayed.latency_us
    else:
        gbps, latency_us = replayed.local_gbps, replayed.local_latency_us
    yield (
        f"One rank was recorded, so no link was measured: {format_rate(gbps)} and a latency of {latency_us:g} us are "
        "assumed between workers. Describe the real links with --cluster"
    )


def _throughput(speedup: float, workers: int, recorded_workers: int) -> dict[str, float] | None:
    """The throughput of another number of workers, each with its own batch; None for the recorded number."""
    if workers == recorded_workers:
        return None
    return {
        "workers": workers,
        "throughput_ratio": speedup * workers / recorded_workers,
        # With fewer workers there is less waiting, so that the efficiency would exceed 1.
        **({"efficiency": speedup} if workers > recorded_workers else {}),
    }


def _compared(expected: Expectation, throughput: dict[str, float] | None, recorded_workers: int) -> str:
    if throughput is None:
        return f"{expected.speedup:.2f} times as fast as recorded ({expected.recorded_ms:.1f} ms)"
    sentence = (
        f"{throughput['throughput_ratio']:.2f} times the samples a second of the recorded "
        f"{counted(recorded_workers, 'worker')} ({expected.recorded_ms:.1f} ms a step)"
    )
    return (
        f"{sentence}, efficiency {throughput['efficiency']:.0%}" if "efficiency" in throughput else sentence
    )


def _table(breakdown_ms: dict[str, dict[str, float]], factor: float) -> Table:
    parts = list(next(iter(breakdown_ms.values())))
    table = Table("rank", *(part.replace("_", " ") for part in parts), title="ms a step")
    for rank, values in breakdown_ms.items():
        table.add_row(rank, *(f"{factor * values[part]:.1f}" for part in parts))
    return table
