"""What may happen in a lab while the job runs, and the scalars that lab files are made of.

Rates, durations and times stay the text people wrote (``400mbit``, ``5s``); they are checked when the
value is made and read where they are used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from headway.errors import LabError
from headway.units import format_rate, parse_duration_s, parse_rate_gbps

MIN_RATE_GBPS = 1e-5
MAX_RATE_GBPS = 30.0
MAX_TIME_S = 7 * 86400.0


def _rate(text: object) -> object:
    gbps = parse_rate_gbps(text)
    if not MIN_RATE_GBPS <= gbps <= MAX_RATE_GBPS:
        raise LabError(
            "rate is out of a lab's range",
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
    """A value of a lab file: frozen, and no key but those named."""

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
