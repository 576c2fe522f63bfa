"""Replay against reality: one recorded run of a model predicts all other configurations of it, each of which is run.

    python benchmarks/replay_accuracy.py [--quick] [--only MODEL] [--json FILE]

Paced models (`paced_training.paced`) on the lab's shaped links. Of every model one run is recorded and its links are
probed; every configuration is predicted from these alone. A case is a model; each is kept as soon as it is done, and
takes a quarter of an hour. What was measured is left in HEADWAY_ACCURACY_FOLDER, where that is set.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from accuracy.configurations import (
    BASE_LAB,
    BASE_PLAN,
    FULL,
    LABS,
    LINK_SHARE,
    PACED,
    QUICK,
    SLOW_HOST,
    TENANT,
    TENANT_SHARE,
    Effort,
    Lab,
    Subject,
)
from accuracy.job import work
from accuracy.page import PICTURE, REPRODUCTION, draw, page
from accuracy.predicting import BaseRun
from common import RESULTS, commit, keep_case, parse_arguments, report

from headway.lab import launch
from headway.lab.spec import LabSpec, parse_spec

WORKER = "--worker"
TIMEOUT_S = 1200.0
WORDS = (
    "Steps as replay predicts them from ONE recorded run of each model (DDP, 25 MiB buckets, four workers) and "
    "from the links as `headway probe --idle-cores` measured them in that job, against steps as they were then "
    "measured, without a recorder, in jobs of their own on the lab (median of all steps, the mean over ranks; "
    "quartiles next to it). `reproduction` is the recorded run itself and the same configuration run again; "
    "everything else is a what-if. Layers are paced: parameters, gradients and messages are real, computation is "
    "asleep for a modelled time (RTX 2080 Ti, stretched to 0.9 s a step); sizes are scaled, and one way of "
    "communication takes 0.35 of computation on the base links. Labs: pN workers, links of so many times the base "
    "rate; slow-rank computes 1.5 times as long on rank 1, slow-link has half the rate on one host, tenant sends "
    "0.4 of a link's rate from host0 to host1; crowded are eight workers at full pace, whose threads wait for the two "
    "cores that all hosts have between them, as those of a cluster's hosts do not, and half pace the same with layers "
    "twice as long and links half as fast. Crowded was set apart once half pace had shown that it is the cores. "
    "Bucket sizes are of the unscaled model, in MiB; decoupled and "
    "servers have 5 MiB (models over 200 MB: 25), `small` a fifth of that. `stolen` is the share of the cores' time "
    "that the machine under this one gave to others meanwhile. `commit` is that of the predictions; runs are of "
    "November 27 (07e882b to cc53011). Set apart afterwards: a run of densenet201 on November "
    "27 (f047d33), on a machine that gave 2 to 8 % of its busy time to others and on which the base run took 1080 ms "
    "and then 1041. There the median error of what is not crowded was 2.9 %, and the plan predicted to be the best was "
    "so, or within its ±, in 6 of 9 labs."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", PACED)
    effort = QUICK if arguments.quick else FULL
    models = [arguments.only] if arguments.only else list(PACED)
    rows: list[dict[str, Any]] = []
    for model in models:
        own = _of_model(model, list(LABS.values()), effort)
        rows += own
        if not arguments.quick:
            keep_case("replay_accuracy", own, PACED, WORDS, page)
            draw(json.loads((RESULTS / "replay_accuracy.json").read_text())["rows"], RESULTS / PICTURE)
    report("replay_accuracy", rows, arguments, WORDS, page)


def _of_model(model: str, labs: list[Lab], effort: Effort) -> list[dict[str, Any]]:
    subject = Subject.of(model)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.environ.get("HEADWAY_ACCURACY_FOLDER", name)) / model
        folder.mkdir(parents=True, exist_ok=True)
        for lab in labs:
            if (folder / f"{lab.name}.json").exists():  # measured by a run that was given up
                continue
            print(f"{model} {lab.name} …", file=sys.stderr, flush=True)
            _run(subject, lab, effort, folder)
        base = BaseRun(subject, folder)
        recorded_ms = list(base.replayer.recorded_step_times_ms)
        again = base.replayer.base
        of_base = (again.step_ms, base.replayer.expect(again).uncertainty_ms)
        rows.append(_row(model, BASE_LAB, BASE_PLAN, of_base, {"steps_ms": recorded_ms, "stolen": []}))
        for lab in labs:
            measured = json.loads((folder / f"{lab.name}.json").read_text())
            predicted = base.predicted_ms(lab)
            for plan, own in measured.items():
                rows.append(_row(model, lab, plan, predicted[plan], own))
                error = f"{rows[-1]['error']:+.2%}"
                print(f"{model} {lab.name} {plan}: {error}", file=sys.stderr, flush=True)
    return rows


def _row(
    model: str, lab: Lab, plan: str, predicted: tuple[float, float], measured: dict[str, list[float]]
) -> dict[str, Any]:
    predicted_ms, uncertainty_ms = predicted
    steps_ms, stolen = measured["steps_ms"], measured["stolen"]
    measured_ms = statistics.median(steps_ms)
    low, _, high = statistics.quantiles(steps_ms, n=4)
    return {
        "case": model,
        "method": plan,
        "lab": lab.name,
        "class": REPRODUCTION if (lab, plan) == (BASE_LAB, BASE_PLAN) else lab.kind,
        "time_ms": measured_ms,
        "spread_ms": [low, high],
        "steps": len(steps_ms),
        "predicted_ms": predicted_ms,
        "uncertainty_ms": uncertainty_ms,
        "ratio": predicted_ms / measured_ms,
        "error": predicted_ms / measured_ms - 1,
        "stolen": round(statistics.mean(stolen), 3) if stolen else None,
        "commit": commit(),
    }


def _run(subject: Subject, lab: Lab, effort: Effort, folder: Path) -> None:
    command = [
        sys.executable,
        __file__,
        WORKER,
        subject.model,
        lab.name,
        str(int(effort == QUICK)),
        str(folder),
    ]
    lines: list[str] = []
    status = launch.run(
        _spec(subject, lab),
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout_s=TIMEOUT_S,
        on_line=lambda rank, _, line: lines.append(f"[{rank}] {line}"),
        on_notice=lines.append,
    )
    if status != 0:
        raise SystemExit("\n".join([*lines[-20:], f"{lab.name}: the job ended with status {status}"]))


def _spec(subject: Subject, lab: Lab) -> LabSpec:
    rate_mbit = subject.rate_mbit * lab.rate
    hosts: list[dict[str, Any]] = [{"name": f"host{rank}"} for rank in range(lab.workers)]
    if lab.slow_link:
        hosts[[host["name"] for host in hosts].index(SLOW_HOST)]["rate"] = f"{rate_mbit * LINK_SHARE:.3f}mbit"
    spec: dict[str, Any] = {"hosts": hosts, "rate": f"{rate_mbit:.3f}mbit"}
    if lab.tenant:
        traffic = {"from": TENANT[0], "to": TENANT[1], "rate": f"{rate_mbit * TENANT_SHARE:.3f}mbit"}
        spec["timeline"] = [{"at": "0s", "traffic": traffic}]
    return parse_spec(spec)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(sys.argv[2], sys.argv[3], QUICK if int(sys.argv[4]) else FULL, Path(sys.argv[5]))
    else:
        main()
