"""How fast models come together that only average: measured, by the matrices of the groups, and as simulated before.

    python -m decentralised_training.contraction MODE FOLDER ROUNDS METHOD…

Workers begin with independent random models and make steps of no length, so that only mixing changes them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.lab import isolation

WORKERS, HOSTS = 12, 3
FLOATS = 256
STEP_S, JITTER = 0.05, 0.5  # an iteration lasts between (1 - JITTER) and (1 + JITTER) times that, evenly
CLOSEST = 1e-3  # float32 has no more to say about models that are closer than that, against the beginning
LIMIT_S = 120.0
METHODS = (
    "random:group_size=3", "random:group_size=4", "pairs", "pairs:neighbours=any", "first-come:group_size=4",
    "group-buffer:group_size=4", "global-division:group_size=4", "inter-intra:group_size=3", "all",
)  # fmt: skip
Groups = Sequence[Sequence[int]]


def host_of(worker: int) -> int:
    """The host of a worker."""
    return worker * HOSTS // WORKERS


def length_s(worker: int, iteration: int) -> float:
    """How long an iteration of a worker lasts, live and simulated alike."""
    drawn = random.Random(1000 * worker + iteration).uniform(-JITTER, JITTER)
    return STEP_S * (1 + drawn)


# What groups do ----------------------------------------------------------------------------------------


def distances(begin: Any, groups: Groups) -> list[float]:
    """The squared distance of all models from their mean after each group, against the beginning, by its matrices."""
    import numpy as np

    models = np.array(begin, dtype=float)
    first = _squared(models)
    found = []
    for members in groups:
        models[list(members)] = models[list(members)].mean(axis=0)
        found.append(_squared(models) / first)
    return found


def rate(squared: Sequence[float]) -> float:
    """What a group leaves of the squared distance, in the (geometric) mean, as long as there is enough of it."""
    used = [each for each in squared if each > CLOSEST**2]
    return float(used[-1] ** (1 / len(used))) if used else 0.0


def uniform_rate(method: str) -> float | None:
    """What one group leaves in expectation if all possible groups are equally likely and independent.

    E[W] = E[W'W] for groups, whose matrices are projections; its second eigenvalue is 1 - (g - 1) / (n - 1) for any g
    of n workers, and 1 - 1 / n for one of either half.
    """
    name, _, options = method.partition(":")
    if name == "pairs":
        return 1 - 1 / WORKERS if "any" not in options else 1 - 1 / (WORKERS - 1)
    sizes = dict(part.split("=") for part in options.split(",") if part)
    if name == "all":
        return 0.0
    if name == "inter-intra" or "group_size" not in sizes:
        return None
    return 1 - (int(sizes["group_size"]) - 1) / (WORKERS - 1)


def _squared(models: Any) -> float:
    apart = models - models.mean(axis=0)
    return float((apart**2).sum())


# Live --------------------------------------------------------------------------------------------------


def work(config: dict[str, Any]) -> None:
    """One worker: averages until ``stop`` is there; writes down its model at the beginning and after each group."""
    import os
    import traceback

    from decentralised_training.fault_worker import prepare

    status = 1
    try:
        prepare(config)
        _mix(config)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _mix(config: dict[str, Any]) -> None:
    import time

    import torch
    from torch import nn

    from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
    from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

    worker, stop, go = config["worker"], Path(config["stop"]), Path(config["go"])
    draw = torch.Generator().manual_seed(worker)
    module = nn.Linear(FLOATS, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.randn(1, FLOATS, generator=draw))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    log = Path(config["log"]).open("w", buffering=1)  # noqa: SIM115 (lives as long as the process)

    def say(kind: str, **said: Any) -> None:
        model = module.weight.detach()[0].tolist()
        log.write(json.dumps({"kind": kind, "at": time.monotonic(), "model": model, **said}) + "\n")

    secret = config["secret"].encode()
    wrapped = PartialAllReduce(
        module, CoordinatorClient(config["coordinator"], secret), optimizer, worker=worker, host=config["host"],
        secret=secret, initial="own", observer=lambda each: say(
            "round", number=each.number, members=each.members, ending=each.ending.value, iteration=each.iteration
        ),
    )  # fmt: skip
    say("joined")
    while not go.exists():
        time.sleep(0.02)
    while not stop.exists():
        time.sleep(length_s(worker, wrapped.iteration))
        wrapped(torch.zeros(1, FLOATS)).sum().backward()
        optimizer.step()
    wrapped.close()


def measured(network: Any, folder: Path, method: str, rounds: int) -> dict[str, Any]:
    """Average for some rounds live; what came of it."""
    from decentralised_training.fault_lab import Job, Placement

    placement = Placement(host_of, HOSTS, lease_s=10.0)
    job = Job(network, folder, method, placement, work)
    try:
        job.start_coordinator()
        job.await_coordinator()
        names = [job.start_worker(worker, go=str(folder / "go")) for worker in range(WORKERS)]
        job.until(lambda: all(job.lines(name) for name in names), LIMIT_S, "all workers")
        (folder / "go").touch()
        job.until(
            lambda: all(len(job.lines(name)) > rounds for name in names),
            LIMIT_S + rounds,
            "all rounds of all workers",
        )
        job.ask_to_finish()
        job.until(lambda: not job.workers, LIMIT_S, "the end")
        lines = [job.lines(name) for name in names]
    finally:
        job.end()
    return row(method, lines, simulated_groups(method, rounds))


def row(method: str, lines: Sequence[Sequence[Mapping[str, Any]]], simulated: Groups) -> dict[str, Any]:
    """What is measured against what matrices say; ``simulated`` are the groups of a simulation before."""
    import numpy as np

    begin = np.array([own[0]["model"] for own in lines], dtype=float)
    after: dict[int, dict[int, Any]] = {}
    members: dict[int, Sequence[int]] = {}
    for worker, own in enumerate(lines):
        for line in own:
            if line["kind"] == "round" and line["ending"] == "committed":
                after.setdefault(line["number"], {})[worker] = line["model"]
                members[line["number"]] = line["members"]
    numbers = sorted(members)
    models, first, live = begin.copy(), _squared(begin), []
    for number in numbers:
        for worker, model in after[number].items():
            models[worker] = model
        live.append(_squared(models) / first)
    groups = [members[number] for number in numbers]
    expected = distances(begin, groups)
    apart = [abs(a / b - 1) for a, b in zip(live, expected, strict=True) if b > CLOSEST**2]
    before = distances(begin, simulated)
    return {
        "case": "contraction", "method": method, "workers": WORKERS, "groups": len(groups),
        "group_size": sum(map(len, groups)) / max(1, len(groups)),
        "left_by_a_group": rate(live), "left_by_its_matrices": rate(expected), "left_if_uniform": uniform_rate(method),
        "left_as_simulated": rate(before), "distance_apart": max(apart, default=0.0),
        "groups_to_1_percent": _groups_to(live, 0.01), "groups_to_1_percent_simulated": _groups_to(before, 0.01),
    }  # fmt: skip


def _groups_to(squared: Sequence[float], share: float) -> int | None:
    """After how many groups the distance is that share of the beginning's."""
    return next((number + 1 for number, each in enumerate(squared) if each <= share**2), None)


# Simulated ---------------------------------------------------------------------------------------------


def simulated_groups(method: str, rounds: int) -> Groups:
    """The groups that the same generator forms in a co-simulation of these workers, in the order of their numbers."""
    from headway.cluster import Cluster, Host
    from headway.scheduling.groups import CoordinatedGroups
    from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice
    from headway.strategies.partial_all_reduce.cosimulation import CoSimulation, Iterations, Scenario

    choice = GeneratorChoice.parse(method, 0)
    hosts = tuple(
        Host(name=f"host{n}", workers=WORKERS // HOSTS, up_gbps=0.1, down_gbps=0.1) for n in range(HOSTS)
    )
    schedule = CoordinatedGroups(WORKERS, choice.name, tuple(choice.options.items()))
    steps = [
        [(("forward", round(length_s(worker, each) * 1e9)),) for each in range(rounds)]
        for worker in range(WORKERS)
    ]
    until_ns = round(2 * rounds * STEP_S * 1e9)
    cluster = Cluster(hosts=hosts, latency_us=200.0)
    outcome = CoSimulation(cluster, schedule, Iterations(steps, Scenario(until_ns)), FLOATS * 4, 0).play()
    return [each.members for each in sorted(outcome.groups, key=lambda each: each.number)]


def main() -> None:
    mode, folder, rounds, *methods = sys.argv[1:]
    isolation.isolate(mode, processes=True)
    from decentralised_training.fault_lab import RATE_GBPS, import_all
    from headway.lab.network import Network

    import_all()
    network = Network([(RATE_GBPS, RATE_GBPS)] * (HOSTS + 1))
    for number, method in enumerate(methods):
        print(json.dumps(measured(network, Path(folder) / str(number), method, int(rounds))), flush=True)


if __name__ == "__main__":
    main()
