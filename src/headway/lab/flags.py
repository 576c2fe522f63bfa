"""The lab's flags: one-line events, ``RANK=VALUE`` pairs, and how flags override a lab file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headway.errors import LabError
from headway.lab.spec import LabSpec, parse_spec

EVENT_FORM = (
    "TIME link HOST [up|down|both] RATE, TIME traffic FROM TO RATE [DURATION], TIME slow RANK SHARE "
    "or TIME kill RANK"
)


def parse_event(text: str) -> dict[str, Any]:
    """Read one event such as ``5s link host1 down 100mbit`` as it stands in a lab file's timeline."""
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
            return {"at": at, "slow": {"rank": _whole(rank, text), "share": share}}
        case [at, "kill", rank]:
            return {"at": at, "kill": _whole(rank, text)}
    raise LabError("event cannot be read", got=text, expected=EVENT_FORM)


def parse_pairs(pairs: Iterable[str], flag: str) -> dict[int, str]:
    """Read ``1=0.5`` pairs, rank to value. Raises LabError for another form."""
    values: dict[int, str] = {}
    for pair in pairs:
        rank, equals, value = pair.partition("=")
        if not equals or not value:
            raise LabError(f"{flag} cannot be read", got=pair, expected="RANK=VALUE such as 1=0.5")
        values[_whole(rank, pair)] = value
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

    A flag wins over the file, also over what the file says for single hosts. ``slow`` and ``pace`` replace
    the ranks they name, and ``timeline`` adds events. Raises LabError where the result does not fit together.
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
    """Drop what single hosts say about ``keys``, so that the whole lab's value counts."""
    if isinstance(data.get("hosts"), list | tuple):
        data["hosts"] = [{k: v for k, v in host.items() if k not in keys} for host in data["hosts"]]


def _spread_rate(data: dict[str, Any], key: str) -> None:
    """Make room for the whole lab's ``key`` (up or down): a host's ``rate`` keeps the other direction only."""
    other = "down" if key == "up" else "up"
    if isinstance(data.get("hosts"), list | tuple):
        hosts = []
        for host in data["hosts"]:
            kept = {k: v for k, v in host.items() if k not in {key, "rate"}}
            if host.get("rate") is not None:
                kept.setdefault(other, host["rate"])
            hosts.append(kept)
        data["hosts"] = hosts


def _whole(text: str, shown: str) -> int:
    try:
        return int(text, 10)
    except ValueError:
        raise LabError("rank cannot be read", got=shown, expected="a rank such as 1") from None
