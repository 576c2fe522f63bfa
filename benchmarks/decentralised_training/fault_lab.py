"""Plays schedules of faults with real processes, signals and links, in namespaces of its own.

    python -m decentralised_training.fault_lab MODE FOLDER SEED…

Workers are forked from this process, which has imported all that they need. For each seed a line of JSON goes to
stdout. Those that did not end as they should keep their logs in FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.lab import isolation, processes

if TYPE_CHECKING:
    from decentralised_training.fault_schedules import Fault, FaultSchedule

RATE_GBPS = 0.1
PORT = 29650
START_LIMIT_S = 60.0
RECOVERY_LIMIT_S = 60.0  # from the last fault's end until all have averaged again
END_LIMIT_S = 60.0
POLL_S = 0.05


class HungError(Exception):
    """Something did not happen in time."""


@dataclass(frozen=True)
class Placement:
    """Where workers are, and the coordinator, which takes those for dead that are silent for ``lease_s``."""

    host_of: Callable[[int], int]
    coordinator_host: int
    lease_s: float


class Job:
    """One job in the lab: its coordinator and workers, each life of a worker with a log of its own.

    ``work(config)`` is what a worker does; it never returns.
    """

    def __init__(
        self, network: Any, folder: Path, generator: str, placement: Placement, work: Callable[..., None],
        seed: int = 0, **config: Any,
    ) -> None:  # fmt: skip
        from headway.lab.network import address
        from headway.strategies.partial_all_reduce.coordinator.security import write_secret

        self._network, self._folder, self._placement, self._work = network, folder, placement, work
        self._generator, self._seed, self._config = generator, seed, config
        folder.mkdir(parents=True)
        self._secret = write_secret(folder / "secret")
        self._listen = f"{address(placement.coordinator_host)}:{PORT}"
        self._pids: dict[str, int] = {}  # of those that run, by name
        self.statuses: dict[str, int] = {}
        self._lives: dict[int, int] = {}
        self._coordinators = 0
        self._read: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    # Processes

    def start_coordinator(self) -> None:
        self._coordinators += 1
        said = self._folder / f"coordinator.{self._coordinators}"
        arguments = [
            "coordinate", "--json", "--listen", self._listen, "--secret-file", str(self._folder / "secret"),
            "--journal", str(self._folder / "journal"), "--lease",
            f"{self._placement.lease_s}s", "--generator", self._generator, "--seed", str(self._seed),
        ]  # fmt: skip
        network = self._network.namespace(self._placement.coordinator_host)
        self._pids["coordinator"] = processes.start_helper(
            partial(_coordinate, arguments, said), network=network
        )

    def await_coordinator(self) -> None:
        said = self._folder / f"coordinator.{self._coordinators}"
        self.until(lambda: said.exists() and "address" in said.read_text(), START_LIMIT_S, "the coordinator")

    def start_worker(self, worker: int, **more: Any) -> str:
        from headway.lab.network import address

        host = self._placement.host_of(worker)
        life = self._lives[worker] = self._lives.get(worker, 0) + 1
        name = f"{worker}.{life}"
        config = {
            "worker": worker, "host": address(host), "host_name": f"host{host}", "coordinator": self._listen,
            "secret": self._secret, "stop": str(self._folder / "stop"), **self._config,
            "log": str(self._folder / f"{name}.log"), "output": str(self._folder / f"{name}.output"), **more,
        }  # fmt: skip
        network = self._network.namespace(host)
        self._pids[name] = processes.start_helper(partial(self._work, config), network=network)
        return name

    def signal(self, name: str, number: int) -> None:
        if name in self._pids:
            with suppress(ProcessLookupError):
                os.kill(self._pids[name], number)

    def current(self, worker: int) -> str:
        return f"{worker}.{self._lives[worker]}"

    @property
    def workers(self) -> list[str]:
        """The names of the workers that run."""
        return [name for name in self._pids if name != "coordinator"]

    def until(self, what: Callable[[], bool], limit_s: float, words: str) -> None:
        """Wait for ``what``, and look after processes meanwhile. Raises HungError."""
        deadline = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > deadline:
                raise HungError(f"{words}: not within {limit_s:g} s")
            self.look()
            time.sleep(POLL_S)

    def look(self) -> None:
        """Take note of who has ended."""
        for pid, status in processes.reap():
            for name in [name for name, own in self._pids.items() if own == pid]:
                del self._pids[name]
                self.statuses[name] = status

    def ask_to_finish(self) -> None:
        (self._folder / "stop").touch()

    def end(self) -> None:
        """End everything; whoever still runs says where it stands first."""
        for name in self.workers:
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGUSR1)
        if self.workers:
            time.sleep(1.0)
        deadline = time.monotonic() + 10.0
        while self._pids and time.monotonic() < deadline:
            for name in list(self._pids):
                self.signal(name, signal.SIGKILL)
            self.look()
            time.sleep(POLL_S)

    # What is written down

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All lines of a life so far; only what is new is read."""
        place, known = self._read.get(name, (0, []))
        path = self._folder / f"{name}.log"
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                new, newline, _ = file.read().rpartition(b"\n")
            if newline:
                known += [json.loads(line) for line in new.split(b"\n")]
                self._read[name] = (place + len(new) + 1, known)
        return known

    def all_lines(self) -> dict[str, list[dict[str, Any]]]:
        """By the name of the life."""
        return {path.stem: self.lines(path.stem) for path in sorted(self._folder.glob("*.log"))}

    def has_averaged(self, name: str, since_s: float) -> bool:
        for line in reversed(self.lines(name)):
            if line["at"] <= since_s:
                return False
            if line.get("ending") == "committed":
                return True
        return False


class Player:
    """Has a schedule's faults happen to a job."""

    def __init__(self, job: Job, network: Any, schedule: FaultSchedule) -> None:
        self._job, self._network, self._schedule = job, network, schedule
        self.happened: list[dict[str, Any]] = []
        self.reached_s: dict[str, float] = {}  # when, for whoever asks where time goes

    def play(self) -> None:
        """From the start to the end. Raises HungError."""
        from decentralised_training.fault_schedules import WORKERS

        job = self._job
        job.start_coordinator()
        job.await_coordinator()
        for worker in range(WORKERS):
            job.start_worker(worker)
        begun_s = self.reached_s["started"] = time.monotonic()
        job.until(
            lambda: all(job.has_averaged(name, begun_s) for name in job.workers),
            START_LIMIT_S,
            "a first average",
        )
        self.reached_s["averaging"] = time.monotonic()
        self._inflict(time.monotonic())
        healed_s = self.reached_s["healed"] = time.monotonic()
        job.until(
            lambda: all(job.has_averaged(name, healed_s) for name in job.workers), RECOVERY_LIMIT_S,
            "an average of every worker after the last fault",
        )  # fmt: skip
        self.reached_s["recovered"] = time.monotonic()
        job.ask_to_finish()
        job.until(lambda: not job.workers, END_LIMIT_S, "the end of every worker")
        self.reached_s["finished"] = time.monotonic()

    def _inflict(self, zero_s: float) -> None:
        actions: list[tuple[float, int, Fault, bool]] = []
        for number, fault in enumerate(self._schedule.faults):
            actions.append((fault.at_s, number, fault, True))
            if fault.until_s > fault.at_s:
                actions.append((fault.until_s, number, fault, False))
            self.happened.append({**asdict(fault), "began_at": 0.0, "ended_at": 0.0})
        for at_s, number, fault, begins in sorted(actions, key=lambda each: each[:2]):
            while time.monotonic() < zero_s + at_s:
                self._job.look()
                time.sleep(min(POLL_S, max(0.0, zero_s + at_s - time.monotonic())))
            if begins:
                self._begin(fault)
                self.happened[number]["began_at"] = self.happened[number]["ended_at"] = time.monotonic()
            else:
                self._end(fault)
                self.happened[number]["ended_at"] = time.monotonic()

    def _begin(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._job.signal(self._job.current(fault.target), signal.SIGKILL)
            case "stop":
                self._job.signal(self._job.current(fault.target), signal.SIGSTOP)
            case "cut":
                self._network.connect(fault.target, up=False)
            case "join":
                self._job.start_worker(fault.target)
            case "coordinator":
                self._job.signal("coordinator", signal.SIGKILL)

    def _end(self, fault: Fault) -> None:
        match fault.kind:
            case "stop":
                self._job.signal(self._job.current(fault.target), signal.SIGCONT)
            case "cut":
                self._network.connect(fault.target, up=True)
            case "coordinator":
                self._job.start_coordinator()


def played(network: Any, folder: Path, schedule: FaultSchedule) -> dict[str, Any]:
    """Play one schedule; what came of it. Logs are kept where something is wrong."""
    from decentralised_training.fault_checks import recoveries, wrong
    from decentralised_training.fault_schedules import COORDINATOR_HOST, LEASE_S, host_of
    from decentralised_training.fault_worker import work

    placement = Placement(host_of, COORDINATOR_HOST, LEASE_S)
    job = Job(
        network, folder, schedule.generator, placement, work, schedule.seed, staleness=schedule.staleness
    )
    player = Player(job, network, schedule)
    hung = ""
    begun_s = time.monotonic()
    try:
        player.play()
    except HungError as error:
        hung = str(error)
    finally:
        survivors = [
            *job.workers,
            *(name for name, status in job.statuses.items() if _is_survivor(name, status)),
        ]
        job.end()
        for host in range(COORDINATOR_HOST + 1):
            network.connect(host, up=True)
    lines = job.all_lines()
    found = [f"hung: {hung}"] if hung else []
    found += [] if hung else wrong(lines, job.statuses, player.happened)
    result = {
        "seed": schedule.seed, "generator": schedule.generator, "staleness": schedule.staleness,
        "faults": player.happened, "survivors": sorted(survivors), "hung": bool(hung), "wrong": found,
        "reached_s": {name: round(at - begun_s, 2) for name, at in player.reached_s.items()},
        "recoveries": [] if hung else recoveries(lines, player.happened),
        "rounds": sum(line.get("ending") == "committed" for each in lines.values() for line in each),
    }  # fmt: skip
    if found:
        (folder / "found.json").write_text(json.dumps(result, indent=1))
    else:
        shutil.rmtree(folder)
    return result


def _is_survivor(name: str, status: int) -> bool:
    return name != "coordinator" and status == 0


def _coordinate(arguments: list[str], said: Path) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python that was not forked in the lab
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from headway.cli.main import main

        main(arguments)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0) if not isinstance(ended.code, str) else 1
    finally:
        os._exit(status)


def import_all() -> None:
    """Import what workers and coordinators need, so that forked processes start at once; no threads may begin."""
    import grpc.aio  # noqa: F401
    import torch
    import torch._dynamo

    import headway.cli.coordinate
    import headway.strategies.partial_all_reduce.coordinator.client
    import headway.strategies.partial_all_reduce.coordinator.server
    import headway.strategies.partial_all_reduce.runtime  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    mode, folder, *seeds = sys.argv[1:]
    isolation.isolate(mode, processes=True)
    import_all()
    from decentralised_training.fault_schedules import HOSTS, schedule_of
    from headway.lab.network import Network

    network = Network([(RATE_GBPS, RATE_GBPS)] * (HOSTS + 1))
    for seed in map(int, seeds):
        print(json.dumps(played(network, Path(folder) / f"seed-{seed}", schedule_of(seed))), flush=True)


if __name__ == "__main__":
    main()
