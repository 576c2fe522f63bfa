"""Throughput: a case is run in the lab, and what its ranks wrote becomes rows."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import commit
from in_lab import run_in_lab

from decentralised_training.cases import SLOW_RANK, ThroughputCase
from decentralised_training.methods import BASELINE, METHODS, REFERENCE, is_partial
from decentralised_training.predicting import Predicted, Profile, choice, job_of, predicted
from decentralised_training.rates import Found, throughput
from decentralised_training.statistics_of import interval
from headway.cluster import Cluster
from headway.errors import HeadwayError
from headway.strategies.base import Strategy
from headway.strategies.registry import plugin_named

TIMEOUT_S = 2400.0


def measure(case: ThroughputCase, worker: Sequence[str], *, quick: bool) -> list[dict[str, Any]]:
    """The rows of a case; ``worker`` is the command of a rank, to which case, folder and quickness are added."""
    plan = case.plan(quick=quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_in_lab(
            case.name, case.situation.lab(case.hosts, case.workers_per_host, plan.rate_mbit),
            [*worker, case.name, str(folder), str(int(quick))], TIMEOUT_S,
        )  # fmt: skip
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(case.world_size)]
        learned = json.loads((folder / "learned.json").read_text())
        cluster = Cluster.load(folder / "cluster.yaml")
    return rows_of(
        case, ranks, Profile.of(learned, [rank["alone_s"] for rank in ranks]), cluster, quick=quick
    )


def strategy_of(written: Mapping[str, Any]) -> Strategy:
    """The strategy that a rank wrote down."""
    options = {name: value for name, value in written.items() if name != "name"}
    strategy: Strategy = plugin_named(written["name"]).policy.model_validate(options)
    return strategy


def rows_of(
    case: ThroughputCase, ranks: Sequence[Found], profile: Profile, cluster: Cluster, *, quick: bool
) -> list[dict[str, Any]]:
    """A row a method; ``headway`` is the one that the predictions choose."""
    strategies = {name: strategy_of(each) for name, each in ranks[0]["strategies"].items()}
    job = job_of(profile, case.situation, cluster, SLOW_RANK)
    expected: dict[str, Predicted] = {}
    refused: dict[str, str] = {}
    for name, strategy in strategies.items():
        try:
            expected[name] = predicted(job, strategy, ranks[0]["blocks"][name][0])
        except HeadwayError as error:
            refused[name] = str(error)
    plan, bounds = case.plan(quick=quick), bounds_of(case, profile, cluster)
    gbps = median(host.up_gbps for host in cluster.hosts)
    shared = {
        "ratio_imitated": plan.ratio,
        "ratio_measured": profile.spec.size_bytes * 8e-9 / gbps / (profile.forward_s + profile.backward_s),
        "t_f_ms": profile.forward_s * 1e3, "t_b_ms": profile.backward_s * 1e3,
        "size_mib": profile.spec.size_bytes / 2**20, "rate_mbit": plan.rate_mbit, "shrink": plan.shrink,
        "dilation": plan.dilation, "commit": commit(),
    }  # fmt: skip
    rows = []
    tried = {*ranks[0]["errors"], *strategies}
    for method in (each for each in METHODS if each.name in tried):
        if method.name in ranks[0]["errors"]:
            rows.append({"case": case.name, "method": method.name, "error": ranks[0]["errors"][method.name]})
            continue
        own = [rank["blocks"][method.name] for rank in ranks]
        row = {"case": case.name, "method": method.name, **measured(own)}
        row |= _expected(expected.get(method.name), row["iterations_per_s"])
        row["bound_iterations_per_s"] = bounds[method.bound]
        row["ratio"] = row["iterations_per_s"] / bounds[method.bound]
        row["plan"] = strategies[method.name].describe()
        row["tried_ms"] = json.dumps(ranks[0]["tried"][method.name]) if ranks[0]["tried"][method.name] else ""
        rows.append(row | shared | ({"note": refused[method.name]} if method.name in refused else {}))
    chosen = choice(
        {name: each for name, each in expected.items() if name in strategies and is_partial(strategies[name])}
    )
    headway = next(row for row in rows if row["method"] == chosen)
    rows.append({**headway, "method": "headway", "chosen": chosen})
    return _compared(rows)


def measured(own: Sequence[Sequence[Found]]) -> dict[str, Any]:
    """What all ranks did in all rounds (``own[rank][round]``)."""
    each = [throughput([rank[number] for rank in own]) for number in range(len(own[0]))]
    blocks = [block for rank in own for block in rank]
    groups = [
        one for block in blocks for one in block["rounds"] if one["at_s"] > block["begin_s"] + block["warm_s"]
    ]
    found: dict[str, Any] = {
        "iterations_per_s": median(each), "interval": interval(each), "rounds": len(each),
        "busy_cores": f"{median(block['busy_cores'] for block in own[0]):.0%}",
        "busiest_core": f"{median(block['busiest_core'] for block in own[0]):.0%}",
    }  # fmt: skip
    if groups:
        for name in ("waiting_ms", "reducing_ms", "voting_ms", "blocked_ms"):
            found[name] = mean(one[name] for one in groups)
        sizes = Counter(int(one["size"]) for one in groups)
        found["group_sizes"] = " ".join(f"{size}:{count}" for size, count in sorted(sizes.items()))
        found["aborted"] = sum(not one["committed"] and one["size"] > 1 for one in groups)
        found["distance"] = mean(one["distance"] for one in groups)
    return found


def bounds_of(case: ThroughputCase, profile: Profile, cluster: Cluster) -> dict[str, float]:
    """Iterations a second that no method of a kind can beat.

    Of an all-reduce over hosts, each host's link has to carry (H - 1) / H of the model each way in both of its halves,
    however ranks are ordered. Whoever waits for nobody has only its own computation to do.
    """
    world_size, hosts = cluster.world_size, len(cluster.hosts)
    slowest = min(min(host.up_gbps, host.down_gbps) for host in cluster.hosts)
    c_s = profile.spec.size_bytes * 8e-9 * (hosts - 1) / hosts / slowest
    factors = [
        [case.situation.factor(rank, step) for step in range(24 if case.situation.by_chance else 1)]
        for rank in range(world_size)
    ]
    together = mean(max(own) for own in zip(*factors, strict=True))
    f_s, b_s = profile.forward_s * together, profile.backward_s * together
    alone_s = [mean(own) * (profile.forward_s + profile.backward_s) for own in factors]
    return {
        "all-reduce": world_size / (f_s + max(b_s, 2 * c_s)),
        "decoupled": world_size / (max(f_s, c_s) + max(b_s, c_s)),
        "none": sum(1 / each for each in alone_s),
    }


def _expected(found: Predicted | None, measured_per_s: float) -> dict[str, Any]:
    if found is None:
        return {"predicted_iterations_per_s": ""}
    return {
        "predicted_iterations_per_s": found.iterations_per_s,
        "error": f"{100 * (found.iterations_per_s / measured_per_s - 1):+.1f} %",
        "predicted_spread": "" if found.spread is None else found.spread,
        "predicted_standing_ms": "" if found.standing_ms is None else found.standing_ms,
        "predicted_group_sizes": " ".join(f"{size}:{count}" for size, count in (found.sizes or {}).items()),
    }


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Against the better of default and tuned DDP, parameter servers, and AD-PSGD."""
    rates = {row["method"]: row["iterations_per_s"] for row in rows if "iterations_per_s" in row}

    def best(*names: str) -> float | None:
        return max((rates[name] for name in names if name in rates), default=None)

    opponents = {
        f"over_{BASELINE}": best(BASELINE, f"{BASELINE}-tuned"),
        "over_parameter-server": best("parameter-server"),
        "over_ad-psgd": best(REFERENCE),
    }
    for row in rows:
        if "iterations_per_s" in row:
            row |= {
                name: row["iterations_per_s"] / rate for name, rate in opponents.items() if rate is not None
            }
    return rows
