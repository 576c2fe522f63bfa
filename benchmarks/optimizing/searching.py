"""What is done with a recording: the search that users get, and a replay of every plan of a stated space."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headway.cluster import Cluster
from headway.errors import PlanError
from headway.interop.settings import ddp
from headway.interop.settings.request import SettingsRequest
from headway.optimization.candidate import UNCHANGED, Candidate
from headway.optimization.measured import contenders
from headway.optimization.result import SearchResult, plan_of
from headway.optimization.search import search
from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import Simulation, Simulator
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.folder import load_trace
from optimizing.ranks import PROBED, TRACE
from optimizing.spaces import describe, space_of

MEASURED_PLANS = 4


@dataclass(frozen=True)
class Sought:
    """A plan that was found: what is predicted of it, how long finding it took, and by how many replays."""

    plan: Plan
    name: str
    predicted_ms: float
    uncertainty_ms: float
    search_s: float
    replays: int


class Recording:
    """The recorded default, what the search makes of it, and the best of the space."""

    def __init__(self, folder: Path, runs: int) -> None:
        begun = time.perf_counter()
        with _counted() as replays:
            self.replayer = Replayer(load_trace(folder / TRACE), Cluster.load(folder / PROBED))
            self.found: SearchResult = search(self.replayer)
        self.headway = self._sought(self.found.best(), begun, len(replays))
        space = space_of(self.replayer.job, runs)
        self.space = describe(space)
        begun = time.perf_counter()
        with _counted() as replays:
            expected = {strategy: self._candidate(strategy) for strategy in space}
        fastest = min(expected.values(), key=lambda each: each.predicted_ms)
        self.exhaustive = self._sought(fastest, begun, len(replays))
        of_ddp = [
            each for each in expected.values() if isinstance(each.strategy, DistributedDataParallelStrategy)
        ]
        self._best_ddp = min(of_ddp, key=lambda each: each.predicted_ms, default=None)

    def contenders(self) -> tuple[list[Sought], int]:
        """The plans that ``headway optimize --measure N`` would measure, and how many of them, the first, are kept."""
        found = contenders(self.found, self.found.best(), MEASURED_PLANS)
        return [self._sought(each, time.perf_counter(), 0) for each in found.all], len(found.kept)

    def stock_caps_mb(self) -> list[tuple[float, ...]]:
        """Lists of caps that the search among DDP's settings is given: what ours has found, as such settings.

        They are those of the plan as ``headway settings`` says them, of the best DDP that the search has replayed, and
        of the best of the space.
        """
        if len(self.replayer.job.stages) > 1:
            return []
        found: list[tuple[float, ...]] = []
        try:
            said = ddp.settings(SettingsRequest(self.headway.plan, self.replayer.job.stages))
            found.append(_caps_mb(said.files[ddp.FILE]))
        except PlanError:
            pass  # a plan that DDP has nothing for
        stock = [
            each
            for each in self.found.candidates
            if isinstance(each.strategy, DistributedDataParallelStrategy)
        ]
        stock += [] if self._best_ddp is None else [self._best_ddp]
        for each in (*stock[:1], *stock[-1:]):
            assert isinstance(each.strategy, DistributedDataParallelStrategy)
            found.append(tuple(limit / 2**20 for limit in each.strategy.size_limits_bytes()))
        return found

    def expected_ms(self, caps_mb: Sequence[float]) -> tuple[float, float]:
        """What is predicted of DDP with these caps, and by how much that may be off."""
        made = self._candidate(DistributedDataParallelStrategy(bucket_caps_mb=tuple(caps_mb)))
        return made.predicted_ms, made.uncertainty_ms

    def _candidate(self, strategy: Strategy) -> Candidate:
        played: Simulation = self.replayer.replay(strategy)
        return Candidate(
            strategy.describe(), strategy, played.graph.schedule, self.replayer.expect(played), UNCHANGED
        )

    def _sought(self, best: Candidate, begun: float, replays: int) -> Sought:
        return Sought(
            plan_of(best, self.replayer), best.name, best.predicted_ms, best.uncertainty_ms,
            time.perf_counter() - begun, replays,
        )  # fmt: skip


def _caps_mb(text: str) -> tuple[float, ...]:
    """The caps in a file of settings for DDP."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARGUMENTS":
            arguments: dict[str, Any] = ast.literal_eval(node.value)
            caps = arguments.get("bucket_cap_mb_list") or [arguments.get("bucket_cap_mb") or 25.0]
            return tuple(map(float, caps))
    raise AssertionError(text)


@contextmanager
def _counted() -> Iterator[list[None]]:
    """A list that grows by one with every replay."""
    replays: list[None] = []
    played = Simulator.simulate

    def simulate(*arguments: Any, **options: Any) -> Simulation:
        replays.append(None)
        return played(*arguments, **options)

    with patch.object(Simulator, "simulate", simulate):
        yield replays
