"""Parts: what one worker runs besides its model, and its end, which may come after that of the wrapper."""

from __future__ import annotations

from dataclasses import dataclass

from headway.coordination.membership import Coordinator
from headway.strategies.live.stepping import Stepping
from headway.strategies.partial_all_reduce.averaging import Averaging
from headway.strategies.partial_all_reduce.contexts import Contexts
from headway.strategies.partial_all_reduce.joining import WorkerState
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer
from headway.strategies.partial_all_reduce.rounds import Rounds
from headway.strategies.partial_all_reduce.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Parts:
    """Connections, threads and hooks of one worker. None of them holds the wrapper."""

    stepping: Stepping
    snapshots: Snapshots[WorkerState]
    rounds: Rounds
    coordinator: Coordinator
    averaging: Averaging
    server: PeerServer
    peers: Peers
    contexts: Contexts

    def close(self, *, leave: bool = True) -> None:
        """Follow no more steps, answer nobody and close all connections; ``leave`` tells the coordinator."""
        self.stepping.close()
        self.snapshots.close()
        self.rounds.stop()
        try:
            if leave:
                self.coordinator.leave()
            self.averaging.drop()
        finally:
            self.server.close()
            self.peers.close()
            self.contexts.close()
