"""A worker that asks for groups and votes until its input ends; what happens to it goes to stdout as lines of JSON."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.coordinator.messages import Member

WAIT_S = 60.0
ALONE_S = 0.01  # what a step takes that nobody is waited for in


def main(address: str, worker: int, share_reduced: float) -> None:
    client = CoordinatorClient(address)
    client.join(Member(worker, 0, f"{worker}:1", f"{worker}"), WAIT_S)
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    drawn = random.Random(worker)
    iteration = 0
    while not over.is_set():
        client.ask(iteration)
        start = client.granted(WAIT_S)
        iteration += 1
        if start is None:
            time.sleep(ALONE_S)
            continue
        said: dict[str, Any] = {"number": start.number, "key": start.key, "rejoined": client.rejoined}
        said["members"] = [[member.worker, member.incarnation] for member in start.members]
        if len(start.members) == 1:
            time.sleep(ALONE_S)
        else:
            reduced = drawn.random() < share_reduced
            said["reduced"] = reduced
            said["committed"] = client.vote(start.number, reduced, WAIT_S)
            said["heard"] = client.outcome(start.number, 0)
        print(json.dumps(said), flush=True)
    client.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
