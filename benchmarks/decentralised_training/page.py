"""The page of benchmarks/decentralised.py: throughput, losses, mixing and faults."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from decentralised_training import fault_rows, learning_rates, loss_causes
from decentralised_training.cases import MOST_LAYERS, NETWORKS, SITUATIONS, THROUGHPUT
from decentralised_training.losses import CASES as LOSSES
from decentralised_training.methods import BASELINE, method_named

Row = dict[str, Any]
WORDS = (
    "All methods of a case run in the same processes, in turn. **Paced**: parameters, gradients and messages are real "
    "and scaled in size, layers sleep for their modelled time (GTX 1080 Ti, headway.models.roofline), stretched; "
    f"neighbouring layers are taken together until {MOST_LAYERS} are left, with the bytes and times of all; rates "
    "of links are such that `ratio`, one model over a host's link against a step's computation, is that of the network "
    f"named: {'; '.join(f'{each.name} is {each.words}' for each in NETWORKS.values())}. Workers of a host share its "
    "link and talk over memory. The published setting (Prague: 4 nodes of 4 such GPUs, InfiniBand, VGG-16 on CIFAR-10 "
    "and ResNet-50 on ImageNet) is imitated in its ratio only: its all-reduce, parameter server and AD-PSGD were "
    "those of TensorFlow; here all-reduce is DistributedDataParallel on Gloo (the better of default and tuned "
    "buckets), the parameter server is sharded over all workers, each of which sends over its host's link for itself, "
    "and AD-PSGD averages over the same connections as everything else. So what those add to a step is not in these "
    "figures. Latency is the lab's own. CPU work of a worker that hides behind its sleeping device is free. "
    f"Situations: {'; '.join(f'{each.name}: {each.words}' for each in SITUATIONS.values())}. "
    "`iterations_per_s` is that of all workers together; its interval is 95 % (bootstrap over rounds). `bound` is what "
    "no method of that kind can beat. `predicted` is a replay, or a co-simulation of the very generator of groups, on "
    "the links probed in the same job, with passes as measured alone, over blocks as long as those that are measured "
    "(the mean of three seeds). `headway` is what these predictions choose: the "
    "fastest of those whose models, as simulated, stay as close together as AD-PSGD's. `-stale` averages while the "
    "next iteration computes (staleness 1), as `ad-psgd` does; the others wait. "
    "**Losses**: real gradients on real data (scikit-learn's digits; a small GPT on the standard library's sources); "
    "after its computation a worker sleeps for the rest of its iteration. A loss is that of the mean of all workers' "
    "models on data held out, of copies kept four times a second. Every method has the learning rate that was best for "
    "it in `rates-…`, on a seed of its own. `causes-…` train in one process without Headway, one ingredient after the "
    "other: what of a loss is the algorithm's. "
    "**Mixing**: workers begin with random models and only average. `left` is what a group leaves of the squared "
    "distance from the mean: measured, by the product of the very groups' matrices, in expectation if all groups "
    "were equally likely and independent (second eigenvalue of E[W'W]), and of the groups of a co-simulation. "
    "**Faults**: six workers on three hosts, a coordinator on a fourth, drawn faults (SIGKILL; SIGSTOP and SIGCONT; a "
    "host's link down and up; workers that join or come back; the coordinator killed and started again). A schedule "
    "ends well if every surviving worker has averaged again and ends by itself, all final models are the same bits "
    "and of all survivors, every step and every mean is what arithmetic says of the states before it, and each "
    "group was taken by all of its members or none. Recovery (s) counts from the fault, or from its end where it keeps "
    "everybody from averaging, until the first and until every survivor's next group had committed; `back` from a "
    "fault's end until who was hit had averaged. The lease is 2 s, a group's time limit 1.5 s."
)  # fmt: skip
THROUGHPUT_COLUMNS = (
    ("method", "method", "{}"), ("iterations/s", "iterations_per_s", "{:.1f}"), ("95 %", "interval", "{}"),
    ("predicted", "predicted_iterations_per_s", "{:.1f}"), ("error", "error", "{}"),
    ("/ bound", "ratio", "{:.3f}"), ("over all-reduce", "over_all-reduce", "{:.2f}"),
    ("over servers", "over_parameter-server", "{:.2f}"), ("over AD-PSGD", "over_ad-psgd", "{:.2f}"),
    ("waits ms", "waiting_ms", "{:.0f}"), ("reduces ms", "reducing_ms", "{:.0f}"),
    ("stands ms", "blocked_ms", "{:.0f}"),
    ("groups", "group_sizes", "{}"), ("spread predicted", "predicted_spread", "{:.2f}"), ("busy", "busy_cores", "{}"),
    ("plan", "plan", "{}"),
)  # fmt: skip
LOSS_COLUMNS = (
    ("method", "method", "{}"), ("rate", "learning_rate", "{:g}"),
    ("s to loss", "time_to_loss_s", "{:.1f}"), ("seeds", "time_to_loss_spread", "{}"),
    ("reached", "reached", "{}"), ("sooner than all-reduce", "sooner_than_all-reduce", "{:.2f}"),
    ("loss at equal samples", "loss_at_equal_samples", "{:.3f}"), ("seeds", "loss_spread", "{}"),
    ("within", "within_spread", "{}"), ("last loss", "final_loss", "{:.3f}"),
    ("iterations/s", "iterations_per_s", "{:.1f}"), ("models apart", "spread_of_models", "{:.4f}"),
)  # fmt: skip
RATE_COLUMNS = (
    ("method", "method", "{}"), ("rate", "learning_rate", "{:g}"), ("loss", "loss_at_equal_samples", "{:.3f}"),
    ("best", "best", "{}"),
)  # fmt: skip
CAUSE_COLUMNS = (
    ("method", "method", "{}"), ("what", "what", "{}"), ("loss", "first_loss", "{:.3f}"),
    ("seeds", "first_spread", "{}"), ("later", "last_loss", "{:.3f}"), ("seeds", "last_spread", "{}"),
)  # fmt: skip
MIXING_COLUMNS = (
    ("method", "method", "{}"), ("groups", "groups", "{}"), ("mean size", "group_size", "{:.2f}"),
    ("left", "left_by_a_group", "{:.3f}"), ("by matrices", "left_by_its_matrices", "{:.3f}"),
    ("if uniform", "left_if_uniform", "{:.3f}"), ("as simulated", "left_as_simulated", "{:.3f}"),
    ("most apart from matrices", "distance_apart", "{:.1e}"), ("groups to 1 %", "groups_to_1_percent", "{}"),
    ("as simulated", "groups_to_1_percent_simulated", "{}"),
)  # fmt: skip


def page(name: str, document: dict[str, Any], words: str) -> str:
    """The whole page, in Markdown."""
    rows: list[Row] = document["rows"]
    lines = [f"# {name}", "", words, ""]
    lines += _judged(rows)
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        if case in THROUGHPUT:
            lines += ["", f"## {case}", "", _facts(own), "", *_table(THROUGHPUT_COLUMNS, own), *_errors(own)]
        elif case in LOSSES and LOSSES[case].tries_rates:
            shown = [{**row, "best": "yes" if row["is_best"] else ""} for row in own]
            lines += ["", f"## {case}", "", _rate_facts(own[0]), "", *_table(RATE_COLUMNS, shown)]
        elif case in LOSSES:
            lines += ["", f"## {case}", "", _loss_facts(own[0]), "", *_table(LOSS_COLUMNS, own)]
        elif case in loss_causes.CASES:
            lines += ["", f"## {case}", "", _cause_facts(own[0]), "", *_table(CAUSE_COLUMNS, own)]
        elif case == "contraction":
            lines += ["", "## contraction", "", *_table(MIXING_COLUMNS, own)]
    faults = [row for row in rows if row["case"] in fault_rows.CASES]
    lines += _faults(faults) if faults else []
    lines += ["", ", ".join(f"{key} {value}" for key, value in document["environment"].items()), ""]
    return "\n".join(lines)


def _judged(rows: Sequence[Row]) -> list[str]:
    """What the figures come to."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        headway = next((row for row in rows if row["case"] == case and row["method"] == "headway"), None)
        if headway is not None:
            found.append(
                f"- {case}: headway ({headway['chosen']}) {headway.get('over_all-reduce', 0):.2f} x all-reduce, "
                f"{headway.get('over_parameter-server', 0):.2f} x parameter servers, "
                f"{headway.get('over_ad-psgd', 0):.2f} x AD-PSGD"
            )
    errors = [
        abs(row["predicted_iterations_per_s"] / row["iterations_per_s"] - 1)
        for row in rows
        if row["case"] in THROUGHPUT and row["method"] != "headway" and row.get("predicted_iterations_per_s")
    ]
    if errors:
        found.append(
            f"- predictions of throughput: the median error is {median(errors):.1%} of {len(errors)} rows, "
            f"the largest {max(errors):.1%}"
        )
    for case in dict.fromkeys(row["case"] for row in rows):
        if case in LOSSES and not LOSSES[case].tries_rates:
            found += _judged_losses(case, [row for row in rows if row["case"] == case])
    faults = [row for row in rows if row["case"] in fault_rows.CASES]
    if faults:
        well, hung = sum(row["ended_well"] for row in faults), sum(row["hung"] for row in faults)
        found.append(f"- faults: {well} of {len(faults)} schedules ended well, {hung} hung")
    return found


def _judged_losses(case: str, rows: Sequence[Row]) -> list[str]:
    """How groups that reach the target first compare with all-reduce."""
    base = next((row for row in rows if row["method"] == BASELINE), None)
    reached = [row for row in rows if method_named(row["method"]).is_choice and row["time_to_loss_s"]]
    if base is None or not reached:
        return []
    best = min(reached, key=lambda row: row["time_to_loss_s"])
    theirs = f"in {base['time_to_loss_s']:.1f} s" if base["time_to_loss_s"] else "never"
    return [
        f"- {case}: {best['method']} comes to {best['target_loss']:g} in {best['time_to_loss_s']:.1f} s, all-reduce "
        f"{theirs}; at equal samples {best['loss_at_equal_samples']:.3f} ({best['loss_spread']}) against "
        f"{base['loss_at_equal_samples']:.3f} ({base['loss_spread']})"
    ]


def _facts(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if "t_f_ms" in row), None)
    if row is None:
        return "Nothing was measured."
    return (
        f"t_f {row['t_f_ms']:.0f} ms, t_b {row['t_b_ms']:.0f} ms; {row['size_mib']:.2f} MiB (1/{row['shrink']}) on "
        f"links of {row['rate_mbit']:g} Mbit/s; ratio {row['ratio_measured']:.3f}, that imitated "
        f"{row['ratio_imitated']:.3f}; paced; commit {row['commit']}."
    )


def _rate_facts(row: Row) -> str:
    return (
        f"The loss after {row['equal_samples']:,.0f} samples, homogeneous workers, seed {learning_rates.SEED}; "
        f"commit {row['commit']}."
    )


def _loss_facts(row: Row) -> str:
    return (
        f"Target {row['target_loss']:g}, {row['seeds']} seeds; an iteration lasts {row['step_ms']:.0f} ms, of which "
        f"{row['computing_ms']:.0f} compute; {row['size_mib']:.2f} MiB on links of {row['rate_mbit']:g} Mbit/s, ratio "
        f"{row['ratio_measured']:.2f}; commit {row['commit']}."
    )


def _cause_facts(row: Row) -> str:
    return (
        f"After {row['first_iterations']} and {row['last_iterations']} iterations of {loss_causes.WORKERS} workers in "
        f"one process, {row['seeds']} seeds, learning rate {row['learning_rate']:g}; commit {row['commit']}."
    )


def _errors(rows: Sequence[Row]) -> list[str]:
    return ["", *(f"- {row['method']}: {row['error']}" for row in rows if "iterations_per_s" not in row)]


def _faults(rows: Sequence[Row]) -> list[str]:
    summary = fault_rows.summary(rows)
    columns = tuple((name, name, "{}") for name in summary[0])
    shown = (
        ("seed", "seed", "{}"),
        ("groups", "method", "{}"),
        ("faults", "faults", "{}"),
        ("wrong", "wrong", "{}"),
    )
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = ["", "## faults", "", f"{len(rows)} schedules; commit {commits}.", "", *_table(columns, summary)]
    bad = [row for row in rows if not row["ended_well"]]
    return [*lines, "", *_table(shown, bad)] if bad else lines


def _table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(title for title, _, _ in columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = []
        for _, key, form in columns:
            value = row.get(key)
            cells.append("" if value in (None, "") else form.format(value).replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
