"""What a synthetic job does, with known truth."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

MS = 1_000_000


@dataclass(frozen=True)
class Extra:
    """Work that a rank does in some steps on top of its own, within a part of the step.

    Where ``pause`` names it, the rank records it as a pause.
    """

    rank: int
    part: str
    ms: float
    steps: Container[int]
    pause: str = ""


@dataclass(frozen=True)
class Connections:
    """What ranks count of the connections of their ring: rank n sends to rank n + 1.

    ``gbps`` holds links that are not as fast as the job's, by source and target, in ``steps`` only, if given.
    ``held_up`` holds by which factor late acknowledgements make a connection look busier than it is.
    """

    gbps: dict[tuple[int, int], float] = field(default_factory=dict)
    steps: Container[int] | None = None
    held_up: dict[tuple[int, int], float] = field(default_factory=dict)
    memory_gbps: float = 200.0  # between ranks of one host
    counted: bool = True  # whether this is recorded
    spread: float = 0.0  # of the rates that the kernel estimates, as a share of them


@dataclass(frozen=True)
class SyntheticJob:
    """What the job does. Times are milliseconds a step, sizes bytes."""

    world_size: int = 4
    steps: int = 6
    ranks_a_host: int = 1
    input_ms: float = 1.0
    forward_ms: float = 10.0
    backward_ms: float = 20.0
    optimizer_ms: float = 2.0
    rest_ms: float = 0.5
    modules: tuple[str, ...] = ("stem", "layer1", "layer2", "head")
    bucket_bytes: tuple[int, ...] = (1_000_000, 1_000_000, 1_000_000, 1_000_000)
    gbps: float = 8.0
    latency_ms: float = 0.05
    slow: dict[tuple[int, str], float] = field(default_factory=dict)  # (rank, part) -> extra ms a step
    slow_steps: tuple[int, ...] | None = None  # where None, every step
    extras: tuple[Extra, ...] = ()
    connections: Connections | None = None
    by_hand: bool = False  # gradients are reduced one after another when backward is over
    blocking_loss: bool = False  # an all-reduce of the loss between forward and backward
    jitter: float = 0.0  # spread of computation, as a share of it
    seed: int = 0

    @property
    def one_module_a_bucket(self) -> bool:
        """Whether each bucket carries the one parameter of one module, so that a replay can rebuild the job."""
        return len(self.modules) == len(self.bucket_bytes)

    def transfer_ms(self, size_bytes: int, step: int = 0) -> float:
        """How long a ring all-reduce of a tensor takes: as long as its slowest link."""
        return self.latency_ms + 8e-6 * self.ring_bytes(size_bytes) / min(
            self.link_gbps(rank, step) for rank in range(self.world_size)
        )

    def ring_bytes(self, size_bytes: int) -> float:
        """What each rank sends to the next in a ring all-reduce of a tensor."""
        return 2 * (self.world_size - 1) / self.world_size * size_bytes

    def link_gbps(self, source: int, step: int) -> float:
        """The rate of the link from a rank to the next in the ring."""
        links = self.connections
        if links is None:
            return self.gbps
        target = (source + 1) % self.world_size
        if self.world_size > 1 and source // self.ranks_a_host == target // self.ranks_a_host:
            return links.memory_gbps
        now = links.steps is None or step in links.steps
        return links.gbps.get((source, target), self.gbps) if now else self.gbps
