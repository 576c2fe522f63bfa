"""A coordinator under the load of many workers: requests a second, latencies, memory.

    python benchmarks/coordinator.py [--quick] [--only CASE] [--json FILE]

Workers are simulated: each has a connection of its own over loopback, asks, and votes as soon as it is granted a group.
They run as tasks of a few processes; the coordinator is a process of its own, with a journal on this machine's disk.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import parse_arguments, report

from headway.coordination import messages
from headway.coordination.link import Link
from headway.coordination.membership import Member

CLIENTS = "--clients"
PROCESSES = 4
SECONDS, QUICK_SECONDS = 20.0, 4.0
ROUNDS, QUICK_ROUNDS = 5, 1
START_S = 120.0
CASES = {"100 workers": 100, "1000 workers": 1000}
GENERATORS = ("first-come:group_size=4", "pairs", "group-buffer:group_size=4")
WORDS = (
    "What one coordinator process does with simulated workers on the same machine, which share its cores with it: so "
    "rates are lower, and latencies longer, than with workers elsewhere. Workers do nothing but ask and vote, as fast "
    "as they are answered: no job asks as often. `requests_per_s`: questions and votes together. `grant_*_ms`: from a "
    "question to its group, waiting for the other members included; `decision_*_ms`: from a vote to the decision, "
    "waiting for the others' votes and for the journal (fsync) included; of all workers and rounds, as percentiles. "
    "`memory_mb`: resident memory of the coordinator at the end. Medians of the rounds, methods interleaved."
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
    await asyncio.sleep(seconds / 4)
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
                for client in clients:
                    assert client.stdin is not None
                    client.stdin.write("\n")
                    client.stdin.flush()
                found = [json.loads(_line(client)) for client in clients]
                memory_bytes = psutil.Process(coordinator.pid).memory_info().rss
            finally:
                for client in clients:
                    client.kill()
                    client.communicate()
                coordinator.kill()
    return {
        "requests_per_s": sum(each["requests"] for each in found) / seconds,
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


def row(case: str, generator: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of one generator as a row."""
    found: dict[str, Any] = {"case": case, "method": generator}
    for name in ("requests_per_s", "memory_mb"):
        found[name] = statistics.median(each[name] for each in rounds)
    for name in ("grant", "decision"):
        values = sorted(value for each in rounds for value in each[f"{name}s_s"])
        for percent in (50, 95, 99):
            place = min(len(values) - 1, len(values) * percent // 100)
            found[f"{name}_p{percent}_ms"] = 1000 * values[place] if values else None
    found["rounds"] = len(rounds)
    return found


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    generators = GENERATORS[:1] if arguments.quick else GENERATORS
    rows = []
    for case in [arguments.only] if arguments.only else list(CASES):
        rounds: dict[str, list[dict[str, Any]]] = {generator: [] for generator in generators}
        for _ in range(QUICK_ROUNDS if arguments.quick else ROUNDS):
            for generator in generators:
                rounds[generator].append(measured(generator, CASES[case], seconds))
        rows += [row(case, generator, found) for generator, found in rounds.items()]
    report("coordinator", rows, arguments, WORDS)


if __name__ == "__main__":
    if CLIENTS in sys.argv:
        _, _, its_address, its_first, its_count, its_seconds = sys.argv
        outcome = asyncio.run(be_clients(its_address, int(its_first), int(its_count), float(its_seconds)))
        print(json.dumps(outcome.__dict__), flush=True)
    else:
        main()
