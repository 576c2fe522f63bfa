"""The contents of a trace: the job and its ranks, their clocks, and every rank's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from headway.cluster import Cluster
from headway.model import ModelSpec
from headway.notebook import table_html
from headway.trace.events import Events
from headway.units import format_bytes
from headway.version import __version__

MOST_ROUNDS = 20_000
MOST_MEMBERS = 1024

_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AveragingRound(BaseModel):
    """One averaging round of a rank. Times are nanoseconds on rank 0's clock.

    The rank requested a group at ``asked_ns``; the group began at ``begun_ns`` and its outcome was decided at
    ``ended_ns``. Training was blocked for ``blocked_ns`` until ``told_ns``, when the rank learned the outcome.
    ``iteration`` is this rank's step whose parameters were averaged, ``step`` the recorded step in which the round
    ended. ``members`` are workers, and ``iterations`` the last step that each had finished. ``staleness`` counts the
    rank's steps between copying its parameters and applying the mean. ``distance`` is the norm of the rank's
    parameters minus the group's mean; ``relative_distance`` divides it by the norm of the mean. ``reason`` says why
    there is no mean.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    iteration: int
    ending: Literal["committed", "aborted", "uncertain", "alone"]
    number: int = -1
    members: Annotated[tuple[int, ...], Field(max_length=MOST_MEMBERS)] = ()
    iterations: Annotated[tuple[int, ...], Field(max_length=MOST_MEMBERS)] = ()
    asked_ns: int
    begun_ns: int
    ended_ns: int
    told_ns: int
    blocked_ns: _Count = 0
    staleness: _Count = 0
    size_bytes: _Count = 0
    distance: _Number = 0.0
    relative_distance: _Number = 0.0
    reason: Annotated[str, Field(max_length=500)] = ""


class RankRounds(BaseModel):
    """The rounds of one rank, in the order in which they ended; ``worker`` is its number among members.

    ``dropped`` counts rounds beyond the limits, which were not kept.
    """

    model_config = ConfigDict(frozen=True)

    worker: int
    rounds: Annotated[tuple[AveragingRound, ...], Field(max_length=MOST_ROUNDS)] = ()
    dropped: _Count = 0


FORMAT: Literal[2] = 2
MAX_WORLD_SIZE = 100_000
MAX_COMMAND_WORDS, MAX_COMMAND_WORD = 1024, 4096


class ClockFit(BaseModel):
    """How a rank's clock is aligned with rank 0's: ``t0 = t + offset + drift · (t - reference)``.

    ``by`` is the method: round trips to rank 0, or causality (collectives and messages between ranks).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset_ns: float = 0.0
    drift_ppm: float = 0.0
    reference_ns: int = 0
    uncertainty_ns: float = 0.0
    by: Literal["round trips", "causality"] = "round trips"


class RankInfo(BaseModel):
    """Where a rank ran, how its clock was aligned and which strategy was in force.

    ``version`` is the framework's; ``source`` is the file that an imported rank was read from. ``notes`` say what
    could not be recorded; ``other_models`` were wrapped in addition to the recorded one; ``fully_sharded``: the job
    uses ``fully_shard``. ``groups`` are the ranks of the process groups that this rank used and that lack some rank;
    a manifest merges those of all ranks. ``refusals`` says, for each strategy or pass by name, why it cannot be applied
    to the recorded model. ``device`` holds the model's parameters; ``threads`` is torch's number of threads (0 if
    unknown), ``cores`` are the ranges of cores (first and last) that the process may use, and ``load`` is the host's
    one-minute load average at the end of the recording.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0)
    host: str
    pid: int = 0
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)
    backend: str
    version: str = Field(validation_alias=AliasChoices("version", "torch"))
    source: str = ""
    clock: ClockFit = ClockFit()
    strategy: dict[str, dict[str, Any]] = {}
    buckets: tuple[tuple[str, ...], ...] = ()
    dropped_events: int = 0
    notes: tuple[str, ...] = ()
    other_models: tuple[str, ...] = ()
    fully_sharded: bool = False
    groups: dict[str, tuple[int, ...]] = {}
    refusals: dict[str, str] = {}
    device: str = Field(default="", max_length=200)
    threads: int = Field(default=0, ge=0)
    cores: tuple[tuple[int, int], ...] = Field(default=(), max_length=4096)
    load: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _one_refusal(cls, data: Any) -> Any:
        """Read earlier recordings, in which only one strategy could refuse."""
        if isinstance(data, dict) and "why_not_decoupled" in data:
            why, data = data["why_not_decoupled"], {k: v for k, v in data.items() if k != "why_not_decoupled"}
            data["refusals"] = {"decoupled": why} if why else {}
        return data


class Manifest(BaseModel):
    """Describes a trace: the job, the recorded steps and the ranks.

    ``steps`` are the recorded steps' numbers in the job. A trace may lack ranks. ``servers`` are the processes of
    parameter servers, counted from 0. ``groups`` has the ranks of process groups, if known. ``notes`` say what the
    importer could not know, or which ranks wrote no file. ``run`` is torchrun's run id, or one that Headway chose;
    ``attempt`` counts torchrun's restarts of the ranks. ``command`` has the words of the recorded command; empty if
    unknown. ``recorded_at`` is when its ranks began.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = FORMAT
    headway: str = __version__
    framework: str = "pytorch"
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)
    steps: tuple[int, ...]
    ranks: tuple[RankInfo, ...]
    servers: tuple[RankInfo, ...] = ()
    groups: dict[str, tuple[int, ...]] = {}
    notes: tuple[str, ...] = ()
    run: str = ""
    attempt: int = Field(default=0, ge=0)
    command: tuple[Annotated[str, Field(max_length=MAX_COMMAND_WORD)], ...] = Field(
        default=(), max_length=MAX_COMMAND_WORDS
    )
    recorded_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ranks = [info.rank for info in self.ranks]
        if len(set(ranks)) != len(ranks):
            raise ValueError("a rank is listed twice")
        if (last := max(ranks, default=-1)) >= self.world_size:
            raise ValueError(f"rank {last} is out of range for world_size {self.world_size}")
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError("steps are out of order or listed twice")
        return self


@dataclass(frozen=True)
class Trace:
    """One recording: the job, the model, and every rank's events on rank 0's clock.

    ``cluster`` holds the links and machines that the job measured, if it did. ``stages`` are the models of a pipeline's
    stages if every stage is on equally many ranks, and no rank has several unless it alone has them; ``model`` is then
    that of the first recorded rank. ``rounds`` are the averaging rounds of ranks that train under partial all-reduce.
    """

    path: Path
    manifest: Manifest
    model: ModelSpec
    events: dict[int, Events]
    servers: dict[int, Events] = field(default_factory=dict)
    cluster: Cluster | None = None
    stages: tuple[ModelSpec, ...] = ()
    rounds: dict[int, RankRounds] = field(default_factory=dict)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return {info.rank: info.host for info in self.manifest.ranks}

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self.manifest.world_size

    @cached_property
    def ranks_of_stages(self) -> dict[int, tuple[int, ...]]:
        """The recorded ranks of each pipeline stage."""
        ranks_of: dict[int, list[int]] = {}
        for rank, events in sorted(self.events.items()):
            for stage in events.stages:
                ranks_of.setdefault(stage, []).append(rank)
        return {stage: tuple(ranks) for stage, ranks in sorted(ranks_of.items())}

    @property
    def stages_a_rank(self) -> int:
        """The largest number of pipeline stages on one rank."""
        return max((len(events.stages) for events in self.events.values()), default=0)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the recorded steps."""
        return self.manifest.steps

    def _repr_html_(self) -> str:
        """A summary for notebooks: the number of ranks and steps, and a table of ranks."""
        strategies = sorted({name for info in self.manifest.ranks for name in info.strategy})
        under = f" under {' and '.join(strategies)}" if strategies else ""
        return table_html(
            f"{len(self.steps)} steps of {len(self.events)} of {self.world_size} ranks{under}, "
            f"{len(self.model.parameters)} parameters in {format_bytes(self.model.size_bytes)}",
            ("rank", "host", "backend", "events"),
            (
                (info.rank, info.host, info.backend, len(self.events.get(info.rank, ())))
                for info in self.manifest.ranks
            ),
        )

    @cached_property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks of the job that the trace lacks."""
        return tuple(sorted(set(range(self.world_size)) - set(self.events)))

    def members(self, group: str) -> Sequence[int]:
        """The ranks of a process group; all ranks of the job if it is not listed."""
        return self.manifest.groups.get(group, ()) or range(self.world_size)
