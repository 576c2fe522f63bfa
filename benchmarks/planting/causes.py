"""What is planted, what the diagnosis has to say of it, and what it ought to cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

RANKS = 4
HEALTHY = "healthy"
LOOPBACK = "healthy, loopback"

_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z])")
_BLAMED = re.compile(
    r"[Rr]ank \d+ is a straggler|the others wait for ranks? [\d, and]+|; ranks? [\d, ]+ to a lesser"
)
"""Where a sentence blames ranks, whatever else it names."""


@dataclass(frozen=True)
class Cause:
    """One planted cause. The first sentence must contain every one of ``words``; ``rank`` is the one to be blamed.

    No other rank may be accused, nor anything else in the sentences that follow.
    """

    plant: dict[str, Any] = field(default_factory=dict)
    lab: dict[str, Any] = field(default_factory=dict)  # keys of a lab's specification
    words: tuple[str, ...] = ()
    rank: int | None = None
    planted_ms: float | None = None  # a step; where None, what the step is longer than the healthy one's
    skewed: dict[int, float] = field(default_factory=dict)  # milliseconds that a rank's clock is ahead
    healthy: bool = False

    def accused_wrongly(self, verdict: str) -> str:
        """What the paragraph ``verdict`` says besides that is no part of what was planted."""
        first, *others = _SENTENCES.split(verdict)
        blamed = {int(rank) for words in _BLAMED.findall(first) for rank in re.findall(r"\d+", words)}
        wrong = [f"rank {rank}" for rank in sorted(blamed - {self.rank})]
        return " ".join([*wrong, *(one for one in others if not one.startswith("Nothing stands out"))])


def _host(name: int, **rates: str) -> dict[str, Any]:
    return {"name": f"host{name}", **rates}


CAUSES: dict[str, Cause] = {
    HEALTHY: Cause(words=("Nothing stands out",), healthy=True),
    LOOPBACK: Cause(
        plant={"computing": 192, "layers": 4, "bucket_mb": 25.0},
        lab={"hosts": [{"name": "host0", "workers": 2}]},
        words=("Nothing stands out",), healthy=True
    ),
    "slow forward": Cause(
        plant={"slow": {"forward": [2, 0.03]}}, words=("Rank 2", "forward"), rank=2, planted_ms=30.0
    ),
    "slow backward": Cause(
        plant={"slow": {"backward": [1, 0.03]}}, words=("Rank 1", "backward"), rank=1, planted_ms=30.0
    ),
    "slow input": Cause(plant={"slow": {"input": [3, 0.03]}}, words=("Rank 3", "input"), rank=3, planted_ms=30.0),
    "slow link": Cause(
        lab={"hosts": [_host(0), _host(1, up="60mbit"), _host(2), _host(3)]},
        words=("link from host1 to host0", "slow"),
    ),
    "another tenant": Cause(
        lab={
            "timeline": [
                {"at": f"{at}s", "traffic": {"from": "host3", "to": "host2", "rate": "2gbit", "for": "700ms"}}
                for at in range(1, 60)
            ]
        },
        words=("link from host3 to host2", "other traffic"),
    ),
    "many small collectives": Cause(
        plant={"pieces": 40, "bucket_mb": 0.0001}, words=("collectives of", "larger buckets")
    ),
    "huge last bucket": Cause(
        plant={"first_numel": 1_500_000}, words=("bucket carries", "starts only when backward ends")
    ),
    "late launch": Cause(plant={"by_hand": True}, words=("launched late",)),
    "blocking collective": Cause(
        plant={"blocking_numel": 500_000}, words=("the program blocks on", "all_reduce")
    ),
    "moving imbalance": Cause(
        plant={"moving_s": 0.04}, words=("each time for a different one",),
        planted_ms=40.0 * (1 - 1 / RANKS),  # what the others wait; who works does not
    ),
    "clock skew": Cause(skewed={2: 40.0}, words=("clock of rank 2", "not slowness")),
    "stalls": Cause(
        plant={"stall_rank": 1, "stall_s": 0.2, "stall_every": 5},
        words=("Every 5th step", "rank 1"),
        rank=1,
        planted_ms=40.0,
    ),
}  # fmt: skip
