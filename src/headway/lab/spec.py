"""What a lab is asked to be: hosts, workers, link rates, slow workers, and changes while the job runs.

Host ``i`` of a plain count is called ``host{i}``; ranks fill the hosts in order, as in
`headway.cluster.Cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from headway import files
from headway.errors import LabError, UserError
from headway.lab.events import (
    Event,
    Kill,
    LinkChange,
    Name,
    Pace,
    RankIndex,
    Rate,
    Share,
    SlowChange,
    Strict,
    TrafficStart,
)
from headway.units import parse_rate_gbps

MAX_HOSTS = 200
MAX_WORKERS = 200
MAX_SPEC_BYTES = 2**20
SlowBy = Literal["auto", "signals", "quota"]


class HostSpec(Strict):
    """One host; what is left out comes from the whole lab's settings."""

    name: Name
    workers: int | None = Field(default=None, strict=True, ge=1, le=MAX_WORKERS)
    rate: Rate | None = None
    up: Rate | None = None
    down: Rate | None = None


@dataclass(frozen=True)
class HostLink:
    """A host as it will be built: its workers and its link's nominal rates, None where unshaped."""

    name: str
    workers: int
    up_gbps: float | None
    down_gbps: float | None


class LabSpec(Strict):
    """A lab. ``LabSpec(hosts=2, rate="400mbit")`` is two hosts of one worker on 400 Mbit/s links.

    Made directly it raises pydantic's ValidationError; `parse_spec` and `load_spec` raise LabError.
    """

    hosts: Annotated[
        Annotated[Annotated[int, Field(strict=True, ge=1, le=MAX_HOSTS)], Tag("count")]
        | Annotated[Annotated[tuple[HostSpec, ...], Field(min_length=1, max_length=MAX_HOSTS)], Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, (list, tuple)) else "count"),
    ] = 2
    workers_per_host: int = Field(default=1, strict=True, ge=1, le=MAX_WORKERS)
    rate: Rate | None = None
    up: Rate | None = None
    down: Rate | None = None
    slow: dict[RankIndex, Share] = {}
    slow_by: SlowBy = "auto"
    pace: dict[RankIndex, Pace] = {}
    timeline: tuple[Event, ...] = Field(default=(), max_length=10_000)

    @property
    def links(self) -> tuple[HostLink, ...]:
        """The hosts in rank order, with every default filled in."""
        hosts = self.hosts
        if isinstance(hosts, int):
            hosts = tuple(HostSpec(name=f"host{index}") for index in range(hosts))
        return tuple(
            HostLink(
                name=host.name,
                workers=host.workers or self.workers_per_host,
                up_gbps=_first_rate(host.up, host.rate, self.up, self.rate),
                down_gbps=_first_rate(host.down, host.rate, self.down, self.rate),
            )
            for host in hosts
        )

    @property
    def world_size(self) -> int:
        """The number of workers over all hosts."""
        return sum(link.workers for link in self.links)

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """For each rank, the index of its host."""
        return tuple(index for index, link in enumerate(self.links) for _ in range(link.workers))

    @property
    def shapes_links(self) -> bool:
        """Whether any link has a rate, now or later."""
        return any(link.up_gbps is not None or link.down_gbps is not None for link in self.links) or any(
            isinstance(event, LinkChange) for event in self.timeline
        )

    @property
    def slow_shares(self) -> tuple[float, ...]:
        """Every share below 1 that a rank gets, now or later."""
        later = (event.slow.share for event in self.timeline if isinstance(event, SlowChange))
        return tuple(share for share in (*self.slow.values(), *later) if share < 1)

    @model_validator(mode="after")
    def _fits_together(self) -> LabSpec:
        names = [link.name for link in self.links]
        if len(set(names)) != len(names):
            raise LabError("host names repeat", expected="a name of its own for every host")
        if self.world_size > MAX_WORKERS:
            raise LabError(
                "too many workers for one machine", got=self.world_size, expected=f"at most {MAX_WORKERS}"
            )
        for what, ranks in (("slow", self.slow), ("pace", self.pace)):
            for rank in ranks:
                self._check_rank(rank, what)
        for index, event in enumerate(self.timeline):
            self._check_event(event, f"timeline.{index}", names)
        return self

    def _check_event(self, event: Event, where: str, names: list[str]) -> None:
        if isinstance(event, LinkChange):
            _check_host(event.link, where, names)
        elif isinstance(event, TrafficStart):
            _check_host(event.traffic.source, where, names)
            _check_host(event.traffic.target, where, names)
            if event.traffic.source == event.traffic.target:
                raise LabError(f"{where}: traffic goes from a host to itself", got=event.traffic.source)
        else:
            self._check_rank(event.kill if isinstance(event, Kill) else event.slow.rank, where)

    def _check_rank(self, rank: int, where: str) -> None:
        if rank >= self.world_size:
            raise LabError(f"{where}: no such rank", got=rank, expected=f"0 to {self.world_size - 1}")


def _first_rate(*texts: str | None) -> float | None:
    return next((parse_rate_gbps(text) for text in texts if text is not None), None)


def _check_host(name: str, where: str, names: list[str]) -> None:
    if name not in names:
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise LabError(f"{where}: no such host", got=name, expected=f"one of {shown}")


def parse_spec(data: object, what: str = "lab") -> LabSpec:
    """Validate plain ``data``. Raises LabError, one line, for the first thing wrong with it."""
    if isinstance(data, dict):
        try:
            return LabSpec.model_validate(data)
        except ValidationError as failure:
            complaint = failure.errors(include_url=False)[0]
            cause = complaint.get("ctx", {}).get("error")
            if isinstance(cause, UserError):
                where = ".".join(str(part) for part in complaint["loc"])
                raise LabError(": ".join(filter(None, (what, where, str(cause))))) from None
    return files.validate(data, LabSpec, LabError, what)


def load_spec(path: str | Path) -> LabSpec:
    """Read a lab file. Raises LabError where it is missing, damaged or does not validate."""
    what = f"lab file {path}"
    text = files.read_text(Path(path), LabError, "lab file", MAX_SPEC_BYTES)
    return parse_spec(files.plain_yaml(text, LabError, what), what)
