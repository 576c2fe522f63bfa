"""What ``headway replay`` says of a plan under which ranks do not finish their steps together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from headway.cli import output
from headway.errors import one_line

if TYPE_CHECKING:
    from headway.plan import Plan
    from headway.replayer.replayer import Replayer
    from headway.replayer.what_if import WhatIf


def answered_over_a_horizon(replayer: Replayer, plan: Plan, what_if: WhatIf, as_json: bool) -> bool:
    """Print how many iterations ranks finish in a time under ``plan``; False where they finish them together."""
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
    said = one_line(", ".join(filter(None, [what_if.describe(), plan.describe()])))
    console.print(
        f"{outcome.total_per_s:.2f} iterations/s of all ranks together with {said}: {speedup:.2f} times as many as the "
        f"recorded strategy would have under the same conditions{stays} ({together_per_s:.2f})."
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
        f"Links: {one_line(replayer.cluster.source)}. {outcome.operations} operations. Computation is not slowed down "
        "by communication here."
    )
    return True
