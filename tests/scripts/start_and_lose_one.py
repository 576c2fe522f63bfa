"""Start N copies of a command as ranks, and leave the others alone when one ends: ``start_and_lose_one.py N CMD …``.

The last one is killed when it has finished its first epoch. The status is the worst of the others'.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main() -> None:
    count, command = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            command, env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == count - 1 else None,
        )
        for rank in range(count)
    ]  # fmt: skip
    lost = started[-1]
    assert lost.stdout is not None
    lost.stdout.readline()
    lost.kill()
    lost.wait()
    sys.exit(max(abs(process.wait()) for process in started[:-1]))


if __name__ == "__main__":
    main()
