"""A coordinator under the load of many workers: requests a second, latencies, memory.

    python benchmarks/coordinator.py [--quick] [--only CASE] [--json FILE]

Workers are simulated: each has a connection of its own over loopback, asks, and votes as soon as it is granted a group.
They run as tasks of a few processes; the coordinator is a process of its own, with a journal on this machine's disk.
More workers than one coordinator takes are computed, from what requests and decisions about so many cost.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import parse_arguments, report
from coordinating import ledger_load

from headway.strategies.partial_all_reduce.coordinator import messages
from headway.strategies.partial_all_reduce.coordinator.client import Link
from headway.strategies.partial_all_reduce.coordinator.messages import Member

CLIENTS = "--clients"
PROCESSES = 4
SECONDS, QUICK_SECONDS = 20.0, 4.0
LEDGER_SECONDS = 8.0
ROUNDS, QUICK_ROUNDS = 5, 1
WARM_UP = 0.25  # of the time, before anything is counted
CASES = {"100 workers": 100, "1000 workers": 1000}
COMPUTED, COMPUTED_FROM = {"10000 workers, computed": 10_000}, "1000 workers"
GENERATORS = ("first-come:group_size=4", "pairs", "group-buffer:group_size=4")
WORDS = (
    "What one coordinator process does with simulated workers on the same machine, which share its cores with it: so "
    "rates are lower, and latencies longer, than with workers elsewhere. Workers do nothing but ask and vote, as fast "
    "as they are answered: no job asks as often. `requests_per_s`: questions and votes together. `grant_*_ms`: from a "
    "question to its group, waiting for the other members included; `decision_*_ms`: from a vote to the decision, "
    "waiting for the others' votes and for the journal (fsync) included; of all workers and rounds, as percentiles. "
    "`memory_mb`: resident memory of the coordinator at the end. `cpu_us`: what a request costs the coordinator's "
    "process, in user and system time; `capacity_per_s` is what one core of its own could serve. `decision_us`: what "
    "its decisions alone cost, measured with its ledger in one process. Medians of the rounds, methods interleaved. "
    "Computed rows: the request of 1000 workers with the decisions of so many instead of its own, and memory that "
    "grows with workers as from 100 to 1000. A coordinator takes 4096 workers at most."
)


@dataclass
class Seen:
    """What simulated workers have seen."""

    counting: bool = False
    requests: int = 0
    grants_s: list[float] = field(default_factory=list)
    decisions_s: list[float] = field(default_factory=list)


class SimulatedWorker:
    """Asks and votes, as soon as it may."""

    def __init__(self, address: str, number: int, seen: Seen) -> None:
        self._seen = seen
        self._since = 0.0
        self._group: str | None = None
        self.welcome = asyncio.Event()
        self._link = Link(
            address, None, Member(number, 0, f"127.0.0.1:{number}", f"host{number // 8}"),
            welcomed=self._on_welcome, heard=self._on_message, lost=lambda reason, final: None,
        )  # fmt: skip
        self.task = asyncio.create_task(self._link.run())

    def begin(self) -> None:
        self._since = time.perf_counter()
        self._link.say(messages.Ask(iteration=0))

    def _on_welcome(self, _welcome: messages.Welcome) -> None:
        self.welcome.set()

    def _on_message(self, message: messages.AnyToWorker) -> None:
        now = time.perf_counter()
        if isinstance(message, messages.Start):
            self._count(self._seen.grants_s, now)
            self._since = now
            if len(message.members) > 1:
                self._group = message.key
                self._link.say(messages.Vote(number=message.number, key=message.key, reduced=True))
                return
        elif isinstance(message, messages.Decided) and message.key == self._group:
            self._count(self._seen.decisions_s, now)
            self._group = None
        else:
            return
        self.begin()

    def _count(self, into: list[float], now: float) -> None:
        if self._seen.counting:
            self._seen.requests += 1
            into.append(now - self._since)


async def be_clients(address: str, first: int, count: int, seconds: float) -> Seen:
    """Be some workers: says when they are connected, begins when it hears a line, and counts for ``seconds``."""
    seen = Seen()
    workers = []
    for number in range(first, first + count):
        workers.append(SimulatedWorker(address, number, seen))
        if number % 50 == 49:
            await workers[-1].welcome.wait()
    for worker in workers:
        await worker.welcome.wait()
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for worker in workers:
        worker.begin()
    await asyncio.sleep(WARM_UP * seconds)
    seen.counting = True
    await asyncio.sleep(seconds)
    seen.counting = False
    for worker in workers:
        worker.task.cancel()
    return seen


def measured(generator: str, workers: int, seconds: float) -> dict[str, Any]:
    """One round."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "headway", "coordinate", "--listen", "127.0.0.1:0", "--json", "--lease", "120s",
            "--generator", generator, "--journal", str(Path(folder) / "journal"),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
            assert coordinator.stdout is not None
            address = json.loads(coordinator.stdout.readline())["address"]
            clients = [_clients(address, index, workers // PROCESSES, seconds) for index in range(PROCESSES)]
            try:
                for client in clients:
                    _line(client)
                process = psutil.Process(coordinator.pid)
                used_s = sum(process.cpu_times()[:2])
                for client in clients:
                    assert client.stdin is not None
                    client.stdin.write("\n")
                    client.stdin.flush()
                found = [json.loads(_line(client)) for client in clients]
                used_s = sum(process.cpu_times()[:2]) - used_s
                memory_bytes = process.memory_info().rss
            finally:
                for client in clients:
                    client.kill()
                    client.communicate()
                coordinator.kill()
    requests = sum(each["requests"] for each in found)
    return {
        "requests_per_s": requests / seconds,
        # The first quarter, in which nothing is counted, has as many requests a second.
        "cpu_us": used_s / max(1.0, requests * (1 + WARM_UP)) * 1e6,
        "grants_s": [value for each in found for value in each["grants_s"]],
        "decisions_s": [value for each in found for value in each["decisions_s"]],
        "memory_mb": memory_bytes / 1e6,
    }


def _clients(address: str, index: int, count: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, CLIENTS, address, str(index * count), str(count), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line, "simulated workers ended early"
    return line


def row(case: str, generator: str, rounds: list[dict[str, Any]], decision_us: float) -> dict[str, Any]:
    """The rounds of one generator as a row."""
    found: dict[str, Any] = {"case": case, "method": generator}
    for name in ("requests_per_s", "memory_mb", "cpu_us"):
        found[name] = statistics.median(each[name] for each in rounds)
    found |= {"capacity_per_s": 1e6 / found["cpu_us"], "decision_us": decision_us}
    for name in ("grant", "decision"):
        values = sorted(value for each in rounds for value in each[f"{name}s_s"])
        for percent in (50, 95, 99):
            place = min(len(values) - 1, len(values) * percent // 100)
            found[f"{name}_p{percent}_ms"] = 1000 * values[place] if values else None
    found["rounds"] = len(rounds)
    return found


def computed(
    case: str, generator: str, rows: Sequence[dict[str, Any]], load: ledger_load.Load
) -> dict[str, Any]:
    """What the measured rows of a generator, the last of more workers, come to for those of a case."""
    workers = COMPUTED[case]
    *_, last = own = [each for each in rows if each["method"] == generator and each["case"] in CASES]
    cpu_us = last["cpu_us"] - last["decision_us"] + load.request_us
    memory_mb = None
    if len(own) > 1:
        sizes = [CASES[each["case"]] for each in own]
        a_worker = (last["memory_mb"] - own[0]["memory_mb"]) / (sizes[-1] - sizes[0])
        memory_mb = last["memory_mb"] + a_worker * (workers - sizes[-1])
    return {
        "case": case, "method": generator, "memory_mb": memory_mb, "cpu_us": cpu_us, "capacity_per_s": 1e6 / cpu_us,
        "decision_us": load.request_us,
    }  # fmt: skip


def measured_rows(case: str, generators: Sequence[str], *, quick: bool) -> list[dict[str, Any]]:
    """A row a generator, of interleaved rounds."""
    seconds = QUICK_SECONDS if quick else SECONDS
    rounds: dict[str, list[dict[str, Any]]] = {generator: [] for generator in generators}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for generator in generators:
            rounds[generator].append(measured(generator, CASES[case], seconds))
    return [
        row(case, generator, found, _decisions(generator, CASES[case], quick=quick).request_us)
        for generator, found in rounds.items()
    ]


def _decisions(generator: str, workers: int, *, quick: bool) -> ledger_load.Load:
    return ledger_load.measured(generator, workers, LEDGER_SECONDS / 4 if quick else LEDGER_SECONDS)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", [*CASES, *COMPUTED])
    generators = GENERATORS[:1] if arguments.quick else GENERATORS
    rows: list[dict[str, Any]] = []
    wanted = [arguments.only] if arguments.only else [*CASES, *COMPUTED]
    for case in wanted:
        if case in CASES:
            rows += measured_rows(case, generators, quick=arguments.quick)
            continue
        if not any(each["case"] == COMPUTED_FROM for each in rows):
            rows += measured_rows(COMPUTED_FROM, generators, quick=arguments.quick)
        for generator in generators:
            load = _decisions(generator, COMPUTED[case], quick=arguments.quick)
            rows.append(computed(case, generator, rows, load))
    report("coordinator", rows, arguments, WORDS)


if __name__ == "__main__":
    if CLIENTS in sys.argv:
        _, _, its_address, its_first, its_count, its_seconds = sys.argv
        outcome = asyncio.run(be_clients(its_address, int(its_first), int(its_count), float(its_seconds)))
        print(json.dumps(outcome.__dict__), flush=True)
    else:
        main()
