"""LabSpec describes a lab: hosts, workers, link rates, slow workers, and changes while the job runs.

Host ``i`` of a plain count is called ``host{i}``; ranks fill the hosts in order, as in
`headway.cluster.Cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from headway import files
from headway.errors import LabError, UserError
from headway.units import format_rate, parse_duration_s, parse_rate_gbps

MIN_RATE_GBPS = 1e-5
MAX_RATE_GBPS = 30.0
MAX_TIME_S = 7 * 86400.0


# Scalars and events of lab files. Rates, durations and times stay text as written (``400mbit``, ``5s``): they are checked
# on construction and parsed where they are used.


def _rate(text: object) -> object:
    gbps = parse_rate_gbps(text)
    if not MIN_RATE_GBPS <= gbps <= MAX_RATE_GBPS:
        raise LabError(
            "rate is out of range for a lab",
            got=text,
            expected=f"{format_rate(MIN_RATE_GBPS)} to {format_rate(MAX_RATE_GBPS)}",
        )
    return text


def _moment(text: object) -> object:
    return _bounded(text, parse_duration_s(text, "time", zero=True))


def _duration(text: object) -> object:
    return _bounded(text, parse_duration_s(text))


def _bounded(text: object, seconds: float) -> object:
    if seconds > MAX_TIME_S:
        raise LabError("time is too long for a lab", got=text, expected="at most a week")
    return text


Rate = Annotated[str, BeforeValidator(_rate)]
Moment = Annotated[str, BeforeValidator(_moment)]
Duration = Annotated[str, BeforeValidator(_duration)]
Share = Annotated[float, Field(gt=0, le=1)]
Pace = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
RankIndex = Annotated[int, Field(strict=True, ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Direction = Literal["up", "down", "both"]


class Strict(BaseModel):
    """Base of lab file values: frozen, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)


class LinkChange(Strict):
    """At ``at`` after the ranks started, ``link``'s rate becomes ``rate`` in ``direction``."""

    at: Moment
    link: Name
    rate: Rate
    direction: Direction = "both"


class Traffic(Strict):
    """Another tenant's TCP connection from ``source`` to ``target`` at ``rate``, at most; ``for`` ends it."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    rate: Rate
    duration: Duration | None = Field(default=None, alias="for")


class TrafficStart(Strict):
    """At ``at``, ``traffic`` starts."""

    at: Moment
    traffic: Traffic


class Slowdown(Strict):
    """``rank`` gets ``share`` of the time; 1 is full speed."""

    rank: RankIndex
    share: Share


class SlowChange(Strict):
    """At ``at``, a rank's share of the time changes."""

    at: Moment
    slow: Slowdown


class Kill(Strict):
    """At ``at``, rank ``kill`` gets SIGKILL."""

    at: Moment
    kill: RankIndex


_EVENTS = ("link", "traffic", "slow", "kill")


def _event_kind(event: Any) -> str | None:
    kinds = [kind for kind in _EVENTS if (kind in event if isinstance(event, dict) else hasattr(event, kind))]
    return kinds[0] if len(kinds) == 1 else None


Event = Annotated[
    Annotated[LinkChange, Tag("link")]
    | Annotated[TrafficStart, Tag("traffic")]
    | Annotated[SlowChange, Tag("slow")]
    | Annotated[Kill, Tag("kill")],
    Discriminator(
        _event_kind,
        custom_error_type="event",
        custom_error_message="expected a mapping with at and exactly one of link, traffic, slow, kill",
    ),
]


MAX_HOSTS = 200
MAX_WORKERS = 200
MAX_SPEC_BYTES = 2**20
SlowBy = Literal["auto", "signals", "quota"]


class HostSpec(Strict):
    """One host; defaults come from the lab's settings."""

    name: Name
    workers: int | None = Field(default=None, strict=True, ge=1, le=MAX_WORKERS)
    rate: Rate | None = None
    up: Rate | None = None
    down: Rate | None = None


@dataclass(frozen=True)
class HostLink:
    """A host as it will be built: its workers and its link's nominal rates, None if unshaped."""

    name: str
    workers: int
    up_gbps: float | None
    down_gbps: float | None


class LabSpec(Strict):
    """A lab. ``LabSpec(hosts=2, rate="400mbit")`` is two hosts of one worker on 400 Mbit/s links.

    The constructor raises pydantic's ValidationError; `parse_spec` and `load_spec` raise LabError.
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
            raise LabError("host names repeat", expected="a unique name for every host")
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
    """Read a lab file. Raises LabError if it is missing, damaged or invalid."""
    what = f"lab file {path}"
    text = files.read_text(Path(path), LabError, "lab file", MAX_SPEC_BYTES)
    return parse_spec(files.plain_yaml(text, LabError, what), what)


EVENT_FORM = (
    "TIME link HOST [up|down|both] RATE, TIME traffic FROM TO RATE [DURATION], TIME slow RANK SHARE "
    "or TIME kill RANK"
)


def parse_event(text: str) -> dict[str, Any]:
    """Read one event such as ``5s link host1 down 100mbit`` into an entry of a lab file's timeline."""
    match text.split():
        case [at, "link", host, ("up" | "down" | "both") as direction, rate]:
            return {"at": at, "link": host, "rate": rate, "direction": direction}
        case [at, "link", host, rate]:
            return {"at": at, "link": host, "rate": rate}
        case [at, "traffic", source, target, rate]:
            return {"at": at, "traffic": {"from": source, "to": target, "rate": rate}}
        case [at, "traffic", source, target, rate, duration]:
            return {"at": at, "traffic": {"from": source, "to": target, "rate": rate, "for": duration}}
        case [at, "slow", rank, share]:
            return {"at": at, "slow": {"rank": _rank_number(rank, text), "share": share}}
        case [at, "kill", rank]:
            return {"at": at, "kill": _rank_number(rank, text)}
    raise LabError("event cannot be read", got=text, expected=EVENT_FORM)


def parse_pairs(pairs: Iterable[str], flag: str) -> dict[int, str]:
    """Read ``1=0.5`` pairs, rank to value. Raises LabError for another form."""
    values: dict[int, str] = {}
    for pair in pairs:
        rank, equals, value = pair.partition("=")
        if not equals or not value:
            raise LabError(f"{flag} cannot be read", got=pair, expected="RANK=VALUE such as 1=0.5")
        values[_rank_number(rank, pair)] = value
    return values


def override(
    base: LabSpec | None,
    *,
    hosts: int | None = None,
    workers_per_host: int | None = None,
    rate: str | None = None,
    up: str | None = None,
    down: str | None = None,
    slow: dict[int, str] | None = None,
    slow_by: str | None = None,
    pace: dict[int, str] | None = None,
    timeline: Iterable[dict[str, Any]] = (),
) -> LabSpec:
    """``base`` with flags on top of it.

    A flag overrides the file, including settings of single hosts. ``slow`` and ``pace`` replace
    the ranks they name, and ``timeline`` adds events. Raises LabError if the result is inconsistent.
    """
    data: dict[str, Any] = base.model_dump(by_alias=True, exclude_unset=True) if base else {}
    if hosts is not None:
        data["hosts"] = hosts
    if workers_per_host is not None:
        data["workers_per_host"] = workers_per_host
        _forget(data, "workers")
    if rate is not None:
        data["rate"] = rate
        _forget(data, "rate", "up", "down")
        for key in ("up", "down"):
            data.pop(key, None)
    for key, value in (("up", up), ("down", down)):
        if value is not None:
            _spread_rate(data, key)
            data[key] = value
    if slow_by is not None:
        data["slow_by"] = slow_by
    data["slow"] = {**data.get("slow", {}), **(slow or {})}
    data["pace"] = {**data.get("pace", {}), **(pace or {})}
    data["timeline"] = [*data.get("timeline", ()), *timeline]
    return parse_spec(data, "lab")


def _forget(data: dict[str, Any], *keys: str) -> None:
    """Remove ``keys`` from single hosts, so that the lab's value counts."""
    if isinstance(data.get("hosts"), list | tuple):
        data["hosts"] = [{k: v for k, v in host.items() if k not in keys} for host in data["hosts"]]


def _spread_rate(data: dict[str, Any], key: str) -> None:
    """Remove ``key`` (up or down) from single hosts; their ``rate`` then only sets the other direction."""
    opposite = "down" if key == "up" else "up"
    if isinstance(data.get("hosts"), list | tuple):
        hosts = []
        for host in data["hosts"]:
            kept = {k: v for k, v in host.items() if k not in {key, "rate"}}
            if host.get("rate") is not None:
                kept.setdefault(opposite, host["rate"])
            hosts.append(kept)
        data["hosts"] = hosts


def _rank_number(text: str, shown: str) -> int:
    try:
        return int(text, 10)
    except ValueError:
        raise LabError("rank cannot be read", got=shown, expected="a rank such as 1") from None
