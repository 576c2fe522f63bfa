"""A coordinator for tests: a server in the test's process that grants groups at random, and its clients.

It serves one request a line of JSON. A connection that ends is a worker that died.
"""

from __future__ import annotations

import json
import random
import socket
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart, Member
from headway.strategies.partial_all_reduce.finishing import as_json, member_from


class Server:
    """Grants groups of ``sizes`` members among those that wait, once ``begin_with`` workers have joined.

    ``lose`` is a (worker, iteration): that worker's connection is cut once it has voted about that iteration's group.
    """

    def __init__(
        self, begin_with: int, sizes: Sequence[int], seed: int = 0, lose: tuple[int, int] | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._begin_with, self._sizes, self._lose = begin_with, sizes, lose
        self._begun = False
        self._lock = threading.RLock()
        self._members: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}  # where each worker's answers go
        self._absent: dict[int, Any] = {}  # did not vote while a group gave up; back with the next word
        self._waiting: dict[int, int] = {}
        self._groups: dict[int, dict[str, Any]] = {}
        self._size = self._random.choice(sizes)
        self.reports: list[tuple[int, Mapping[str, float]]] = []
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                owner.serve(self)

        socketserver.ThreadingTCPServer.daemon_threads = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, handler: Any) -> None:
        worker = -1
        with suppress(OSError):
            for line in handler.rfile:
                said = json.loads(line)
                with self._lock:
                    worker = said["worker"]
                    self._answers[worker] = handler
                    self._hear(worker, said)
        with self._lock:
            if self._answers.get(worker) is handler:
                self._gone(worker)

    def _tell(self, worker: int, **answer: Any) -> None:
        with suppress(OSError, KeyError):
            self._answers[worker].wfile.write(json.dumps(answer).encode() + b"\n")

    def _hear(self, worker: int, said: dict[str, Any]) -> None:
        if worker in self._absent:
            self._members[worker] = self._absent.pop(worker)
        match said["do"]:
            case "join":
                others = [m for w, m in self._members.items() if w != worker]
                self._members[worker] = said["member"]
                self._begun = self._begun or len(self._members) >= self._begin_with
                self._tell(worker, joined=others)
            case "ask":
                self._waiting[worker] = said["iteration"]
            case "vote":
                group = self._groups[said["number"]]
                group["votes"][worker] = said["reduced"]
                if self._lose == (worker, group["iterations"][worker]):
                    self._lose = None
                    handler = self._answers.pop(worker)
                    handler.connection.shutdown(socket.SHUT_RDWR)
                if group["decided"] is not None:
                    self._tell(worker, decided=said["number"], commit=group["decided"])
                self._decide(said["number"])
            case "outcome":
                decided = self._groups[said["number"]]["decided"]
                self._tell(worker, outcome=said["number"], commit=decided)
            case "report":
                self.reports.append((worker, said["metrics"]))
            case "leave":
                self._gone(worker)
        self._grant()

    def _gone(self, worker: int) -> None:
        self._members.pop(worker, None)
        self._waiting.pop(worker, None)
        for number, group in self._groups.items():
            if worker in group["members"] and group["decided"] is None and worker not in group["votes"]:
                group["members"].remove(worker)
                self._decide(number)
        self._grant()

    def _decide(self, number: int) -> None:
        group = self._groups[number]
        if group["decided"] is not None:
            return
        votes = [group["votes"].get(worker) for worker in group["members"]]
        if False in votes or None not in votes:
            group["decided"] = False not in votes
            for worker in group["votes"]:
                self._tell(worker, decided=number, commit=group["decided"])
            for worker in group["members"]:
                if worker not in group["votes"] and worker in self._members:
                    self._absent[worker] = self._members.pop(worker)

    def _grant(self) -> None:
        while self._begun and self._waiting:
            size = min(self._size, len(self._members))
            if len(self._waiting) < size:
                return
            members = sorted(self._random.sample(sorted(self._waiting), size))
            number = len(self._groups)
            iterations = {worker: self._waiting.pop(worker) for worker in members}
            self._groups[number] = {
                "members": list(members), "votes": {}, "iterations": iterations,
                "decided": None if size > 1 else False,
            }  # fmt: skip
            self._size = self._random.choice(self._sizes)
            for worker in members:
                described = [self._members[member] for member in members]
                self._tell(worker, granted=number, key=f"group/{number}", members=described)


class Client:
    """One worker's ``Coordinator``. Where its connection is lost, it connects again when asked ``patience`` times."""

    incarnation = 0

    def __init__(self, port: int, worker: int, patience: int = 3) -> None:
        self._port, self._worker, self._patience = port, worker, patience
        self._lost = threading.Event()
        self._changed = threading.Condition()
        self._answers: list[dict[str, Any]] = []
        self._asked_while_lost = 0
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), 10.0)
        self._socket.settimeout(None)
        self._lost = threading.Event()
        threading.Thread(target=self._read, args=(self._socket, self._lost), daemon=True).start()

    def _read(self, connection: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            for line in connection.makefile("rb"):
                with self._changed:
                    self._answers.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            lost.set()
            self._changed.notify_all()

    def _say(self, do: str, **said: Any) -> None:
        with suppress(OSError):
            self._socket.sendall(json.dumps({"do": do, "worker": self._worker, **said}).encode() + b"\n")

    def _answer(self, timeout_s: float, **wanted: Any) -> dict[str, Any] | None:
        (key, value), deadline = next(iter(wanted.items())), time.monotonic() + timeout_s
        with self._changed:
            while True:
                for answer in self._answers:
                    if key in answer and (value is None or answer[key] == value):
                        self._answers.remove(answer)
                        return answer
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._lost.is_set():
                    return None
                self._changed.wait(left_s)

    @property
    def is_reachable(self) -> bool:
        if self._lost.is_set():
            self._asked_while_lost += 1
            if self._asked_while_lost >= self._patience:
                self._connect()
        return not self._lost.is_set()

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        self._say("join", member=as_json(member))
        answer = self._answer(timeout_s, joined=None)
        assert answer is not None
        return [member_from(each) for each in answer["joined"]]

    def ask(self, iteration: int) -> None:
        self._say("ask", iteration=iteration)

    def granted(self, timeout_s: float) -> GroupStart | None:
        answer = self._answer(timeout_s, granted=None)
        if answer is None:
            return None
        return GroupStart(answer["granted"], answer["key"], [member_from(each) for each in answer["members"]])

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        self._say("vote", number=number, reduced=reduced)
        answer = self._answer(timeout_s, decided=number)
        return bool(answer and answer["commit"])

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        self._say("outcome", number=number)
        answer = self._answer(max(timeout_s, 1.0), outcome=number)
        return None if answer is None else answer["commit"]

    def report(self, metrics: Mapping[str, float]) -> None:
        self._say("report", metrics=dict(metrics))

    def leave(self) -> None:
        self._say("leave")
