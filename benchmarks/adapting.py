"""Adapting to a network that becomes slow: stock DDP, a fixed plan, the plan adapting, and one made for what came.

    python benchmarks/adapting.py [--quick] [--only CASE] [--json FILE]

Four workers on hosts of their own, a paced model. In `slower-…` the links of all hosts alternate between the rate at
which c = t_b and a third of it; every method trains through a whole fast and a whole slow phase, in turn, beginning
with the plan that tuning found on fast links. In `one-slower-…` it is the link of the last host alone. In `quiet-…`
nothing changes. A round takes some six minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import commit, interval_ms, keep_case, order_of, parse_arguments, report
from in_lab import run_in_lab
from lab_clock import since_lab_s
from paced_training.cases import PacedCase, PacedPlan
from paced_training.jobs import PacedJob, paced_job
from paced_training.ours import BEGIN_MB, Ours
from paced_training.stock import ddp_default
from paced_training.trainer import Trainer

from headway.lab.spec import LabSpec, parse_spec
from headway.strategies.adaptive import watching
from headway.strategies.adaptive.tuner import tune
from headway.strategies.base import Strategy
from headway.strategies.decoupled.policy import DecoupledStrategy

WORKER = "--worker"
HOSTS = 4
CASES = {
    "slower-resnet50": range(HOSTS),
    "one-slower-resnet50": range(HOSTS - 1, HOSTS),
    "quiet-resnet50": range(0),
}
"""The hosts whose links become slow."""
MODEL = PacedCase("resnet50", "balanced", HOSTS)
COMPUTE_S = 0.2
SLOW_SHARE = 3
FAST_S, SLOW_S, QUIET_S = 20.0, 80.0, 20.0
END_S = 20.0  # at the end of a slow phase: whoever adapts has done so
LEFT_S = 10.0  # of a slow phase, to be there when the next one begins: some steps, and the method's end
BEGIN_S = 120.0  # until then the plan is made
ROUNDS, QUICK_ROUNDS = 3, 1
METHODS = ("ddp", "fixed", "headway", "tuned for it")
QUIET_METHODS = ("fixed", "headway")
SWITCH_INTERVAL_S = 1e-4
WORDS = (
    "Median step (ms; slowest rank) over interleaved rounds, each of a whole phase; paced: layers sleep, messages are "
    "real. `fast_ms` on links on which c = t_b (one way of communication takes as long as backward), `slow_ms` over "
    "the whole phase in which the links of all hosts, or of the last one, have a third of that, tuning "
    f"included, `end_ms` over its last {END_S:.0f} s. ddp: stock, default buckets; fixed: the decoupled plan that "
    "tuning found on fast links; headway: the same, adapting; tuned for it: what tuning found on slow links. Intervals "
    "are 95 % (bootstrap over rounds)."
)


def plan_of() -> PacedPlan:
    """The plan of the paced case, with shorter steps: tuning takes some 40 of them."""
    plan = MODEL.plan(quick=True)
    return replace(plan, dilation=plan.dilation * COMPUTE_S / 0.5, rate_mbit=plan.rate_mbit / COMPUTE_S * 0.5)


def lab(slowed: range, seconds: float) -> LabSpec:
    """Hosts, of which the links of ``slowed`` become slow and fast in turn, for so long."""
    rate = plan_of().rate_mbit
    events, at = [], BEGIN_S + FAST_S
    while slowed and at < seconds:
        for moment, mbit in ((at, rate / SLOW_SHARE), (at + SLOW_S, rate)):
            events += [
                {"at": f"{moment:g}s", "link": f"host{host}", "rate": f"{mbit:g}mbit"} for host in slowed
            ]
        at += FAST_S + SLOW_S
    return parse_spec({"hosts": HOSTS, "rate": f"{rate:g}mbit", "timeline": events})


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else CASES:
        print(f"{name} …", file=sys.stderr, flush=True)
        own = _measure(name, QUICK_ROUNDS if arguments.quick else ROUNDS)
        if not arguments.quick:
            keep_case("adapting", own, list(CASES), WORDS)
        rows += own
    report("adapting", rows, arguments, WORDS)


def _measure(name: str, rounds: int) -> list[dict[str, Any]]:
    slowed = CASES[name]
    seconds = BEGIN_S + (rounds * len(METHODS) + 3) * (FAST_S + SLOW_S) + 60
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, WORKER, name, str(rounds), str(out)]
        run_in_lab(name, lab(slowed, seconds), command, seconds + 120)
        found = json.loads(out.read_text())
    rows = []
    for method, blocks in found["blocks"].items():
        row: dict[str, Any] = {"case": name, "method": method}
        for phase in ("fast_ms", "slow_ms", "end_ms"):
            values = [block[phase] for block in blocks if block[phase]]
            if values:
                row[phase] = statistics.median(values)
                if len(values) > 1:
                    row[f"{phase[:-3]}_interval"] = interval_ms(values)
        row |= {"rounds": len(blocks), "plan": "; ".join(dict.fromkeys(block["plan"] for block in blocks))}
        rows.append(row | {"time_ms": row["slow_ms" if slowed else "fast_ms"], "commit": commit()})
    return rows


# One rank --------------------------------------------------------------------------------------------------------


class Adapting(Ours):
    """A fixed plan; with ``adapts`` it is watched."""

    def __init__(self, job: PacedJob, strategy: Strategy, *, adapts: bool) -> None:
        super().__init__(job, strategy)
        if adapts:
            watching.adapt(self.decoupled)


def work(name: str, rounds: int, out: Path) -> None:
    """Run the case as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    job = paced_job(plan_of(), dist.get_rank())
    changes = bool(CASES[name])
    home = _tuned(job)
    there = home
    if changes:
        if _agreed_s() > BEGIN_S + FAST_S:
            sys.exit("the first plan was made too late: on links that had become slow")
        _wait_for(BEGIN_S + FAST_S + 2)
        there = _tuned(job)
    methods = METHODS if changes else QUIET_METHODS
    blocks: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for number in range(rounds):
        for method in (methods[each] for each in order_of(number, len(methods))):
            trainer = _trainer(method, job, home, there)
            blocks[method].append(_through_phases(trainer) if changes else _quiet(trainer))
            _say(f"{method}: {blocks[method][-1]}")
            trainer.finish()
            trainer.close()
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"blocks": blocks}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _trainer(method: str, job: PacedJob, home: Strategy, there: Strategy) -> Trainer:
    if method == "ddp":
        return ddp_default(job)
    return Adapting(job, there if method == "tuned for it" else home, adapts=method == "headway")


def _tuned(job: PacedJob) -> Strategy:
    cap_bytes = max(1, round(BEGIN_MB * job.scale * 2**20))
    trainer = Ours(job, DecoupledStrategy(bucket_cap_bytes=cap_bytes))
    tune(trainer.decoupled)
    trainer.training.restart()
    while trainer.decoupled.tuning is None:
        trainer.step()
    found = trainer.decoupled.tuning
    trainer.finish()
    trainer.close()
    _say(f"planned: {found.describe()}")
    return found.strategy


def _through_phases(trainer: Trainer) -> dict[str, Any]:
    """Steps through a fast and a slow phase, from the next fast one on."""
    cycle = FAST_S + SLOW_S
    begins = BEGIN_S + cycle * (1 + int((_agreed_s() - BEGIN_S) // cycle))
    _wait_for(begins + 1)
    ends: list[float] = []
    trainer.training.restart()
    while _agreed_s() < begins + cycle - LEFT_S:
        for _ in range(4):
            trainer.step()
            ends.append(since_lab_s())
    slow_from = begins + FAST_S
    return {
        "fast_ms": _step_ms([at for at in ends if begins + 3 < at < slow_from - 1]),
        "slow_ms": _step_ms([at for at in ends if slow_from + 1 < at]),
        "end_ms": _step_ms([at for at in ends if begins + cycle - LEFT_S - END_S < at]),
        "plan": _plan(trainer),
    }


def _quiet(trainer: Trainer) -> dict[str, Any]:
    until, ends = _agreed_s() + QUIET_S, []
    trainer.training.restart()
    while _agreed_s() < until:
        for _ in range(10):
            trainer.step()
            ends.append(since_lab_s())
    return {"fast_ms": _step_ms(ends[10:]), "slow_ms": 0.0, "end_ms": 0.0, "plan": _plan(trainer)}


def _plan(trainer: Trainer) -> str:
    if not isinstance(trainer, Ours):
        return "DDP"
    return trainer.decoupled.strategy.describe()


def _step_ms(ends: list[float]) -> float:
    """The mean step on the slowest rank."""
    box = torch.tensor([(ends[-1] - ends[0]) / (len(ends) - 1) * 1e3])
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _agreed_s() -> float:
    """Rank 0's time."""
    box = torch.tensor([since_lab_s()], dtype=torch.float64)
    dist.broadcast(box, 0)
    return float(box)


def _wait_for(at_s: float) -> None:
    time.sleep(max(0.0, at_s - _agreed_s()))
    dist.barrier()


def _say(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{since_lab_s():.0f} s: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
