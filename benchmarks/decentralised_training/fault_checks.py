"""What the logs of a job say: whether every state followed from the one before, and how soon workers averaged again.

``lines[life]`` are what one life of a worker wrote down, in order; a life is called "worker.number".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decentralised_training.fault_schedules import COORDINATOR_HOST, host_of
from decentralised_training.fault_worker import stepped

Line = Mapping[str, Any]
Lines = Mapping[str, Sequence[Line]]
CLOSE = 1e-4  # of numbers of about 3 in float32, after sums over a few members
KILLED = 128 + 9
STALENESS = 1  # at most: a worker may have made so many steps since it gave its state to a group


def wrong(lines: Lines, statuses: Mapping[str, int], faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """All that is not as it should be: ends, states, groups that some took and others did not, final models."""
    found: list[str] = []
    killed = _killed(lines, faults)
    for life, own in lines.items():
        status = statuses.get(life)
        if life in killed:
            if status != KILLED:
                found.append(f"{life} was killed and ended with status {status}")
        elif status != 0 or not own or own[-1]["kind"] != "finished":
            found.append(
                f"{life} ended with status {status}, {own[-1]['kind'] if own else 'before it had joined'}"
            )
        found += _torn(life, own)
    return [*found, *_groups(lines), *_ended_alike(lines, killed)]


def worker_of(life: str) -> int:
    """The worker of a life."""
    return int(life.partition(".")[0])


def _killed(lines: Lines, faults: Sequence[Mapping[str, Any]]) -> set[str]:
    """The lives that were killed: the one before, where a worker came back later, or the only one."""
    return {
        max((life for life in lines if worker_of(life) == fault["target"] and _begins_before(lines[life], fault)),
            default=f"{fault['target']}.1")
        for fault in faults if fault["kind"] == "kill"
    }  # fmt: skip


def _begins_before(own: Sequence[Line], fault: Mapping[str, Any]) -> bool:
    return bool(own) and own[0]["at"] < fault["began_at"]


# States ------------------------------------------------------------------------------------------------


def _torn(life: str, own: Sequence[Line]) -> list[str]:
    """Where elements differ, a step begins elsewhere than where the last state was, or a failed group changed it."""
    found = []
    for before, line in zip([None, *own], own, strict=False):
        if line["high"] - line["low"] > CLOSE:
            found.append(f"{life}: elements differ by {line['high'] - line['low']:.2g} at {line['kind']}")
        if before is None:
            continue
        if line["kind"] == "step":
            expected = stepped(before["x"], worker_of(life), line["iteration"])
            if abs(line["x"] - expected) > CLOSE:
                found.append(
                    f"{life}: step {line['iteration']} came to {line['x']:.6f}, expected {expected:.6f}"
                )
        elif line["kind"] == "round" and line["ending"] != "committed" and line["x"] != before["x"]:
            found.append(
                f"{life}: changed by a group that ended {line['ending']} in iteration {line['iteration']}"
            )
    return found


# Groups ------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """What one life says of one group: what it gave to it (``own``), and how its own round ended."""

    life: str
    own: float
    endings: list[Line] = field(default_factory=list)
    change: float | None = None  # of the state when it took the mean


def _groups(lines: Lines) -> list[str]:
    """Where a group was taken by some and not by others, taken twice, or was not the mean of what members had."""
    parts: dict[int, dict[int, _Part]] = {}
    first: dict[int, Line] = {}
    for life, own in lines.items():
        for place, line in enumerate(own):
            if line["kind"] != "round" or line["number"] < 0 or len(line["members"]) < 2:
                continue
            group = parts.setdefault(line["number"], {})
            part = group.setdefault(worker_of(life), _Part(life, _given(own, line)))
            part.endings.append(line)
            if line["ending"] == "committed":
                part.change = line["x"] - own[place - 1]["x"]
                first.setdefault(line["number"], line)
    found = []
    for number, line in sorted(first.items()):
        found += _group(number, line, parts[number], lines)
    return found


def _group(number: int, line: Line, group: Mapping[int, _Part], lines: Lines) -> list[str]:
    found = []
    given: list[float] = []
    for worker, iteration in zip(line["members"], line["iterations"], strict=True):
        part = group.get(worker)
        if part is None:
            lost = _lost_part(lines, worker, iteration, line["at"])
            if lost is None:
                found.append(f"group {number}: worker {worker} says nothing of it")
                continue
            given.append(lost)
            continue
        given.append(part.own)
        endings = [each["ending"] for each in part.endings]
        if endings.count("committed") > 1:
            found.append(f"group {number}: worker {worker} took it twice")
        if "committed" not in endings and not _ends_there(lines[part.life], part):
            reason = part.endings[-1]["reason"]
            found.append(f"group {number}: others took it, worker {worker} ended {endings} ({reason})")
    if len(given) < len(line["members"]):
        return found
    mean = sum(given) / len(given)
    for worker, part in group.items():
        if part.change is not None and abs(part.change - (mean - part.own)) > CLOSE:
            found.append(
                f"group {number}: worker {worker} took {part.change:.6f}, expected {mean - part.own:.6f}"
            )
    return found


def _given(own: Sequence[Line], ended: Line) -> float:
    """The state that was averaged: after the step of that iteration, and after what earlier groups then brought."""
    given = float("nan")
    seen = False
    for line in own:
        if line["kind"] == "step":
            if seen:
                break
            seen = line["iteration"] == ended["iteration"]
            given = line["x"] if seen else given
        elif seen and line["kind"] == "round":
            if line["iteration"] >= ended["iteration"]:
                break
            given = line["x"]
    return given


def _lost_part(lines: Lines, worker: int, iteration: int, at: float) -> float | None:
    """What a life gave that ended before it could say so; None where it went on, and should have."""
    for life, own in lines.items():
        steps = [line for line in own if line["kind"] == "step"]
        if (
            worker_of(life) != worker
            or not steps
            or steps[-1]["iteration"] not in (iteration, iteration + STALENESS)
        ):
            continue
        if own[-1]["kind"] != "finished" and own[-1]["at"] <= at:
            return _given(own, {"iteration": iteration})
    return None


def _ends_there(own: Sequence[Line], part: _Part) -> bool:
    """Whether a life was killed before it knew the decision: an uncertain vote was the last that it said of it."""
    return bool(part.endings[-1]["ending"] == "uncertain" and own[-1]["kind"] != "finished")


def _ended_alike(lines: Lines, killed: set[str]) -> list[str]:
    """Where the survivors' final models are not one."""
    ends = {life: own[-1] for life, own in lines.items() if own and own[-1]["kind"] == "finished"}
    found = []
    alive = sorted(worker_of(life) for life in lines if life not in killed)
    for life, line in ends.items():
        if sorted(line["workers"]) != alive:
            found.append(f"{life}: the final model is of workers {line['workers']}, expected {alive}")
        if line["iteration"] < 1 or abs(line["x"] - 3.0) > 2.5:
            found.append(f"{life}: has not trained: {line['x']:.3f} after {line['iteration']} iterations")
    if len({line["checksum"] for line in ends.values()}) > 1:
        found.append("the final models differ")
    return found


# Recovery ----------------------------------------------------------------------------------------------


def recoveries(lines: Lines, faults: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each fault, how long until the survivors' next groups committed (s), and until who was hit came back.

    ``first_s`` is until one survivor had averaged, ``all_s`` until every one had; survivors of a fault are the workers
    that no fault hits before they have averaged again. A join counts from when the process was started.
    """
    return [{"kind": fault["kind"], **_recovery(lines, fault, faults)} for fault in faults]


def _recovery(
    lines: Lines, fault: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]
) -> dict[str, float | None]:
    since = fault["began_at"]
    all_hit = fault["kind"] == "coordinator" or (
        fault["kind"] == "cut" and fault["target"] == COORDINATOR_HOST
    )
    taken: list[float] = []
    for life, own in lines.items():
        if not own or own[0]["at"] > since or own[-1]["at"] < since:
            continue
        next_at = _next_average(own, fault["ended_at"] if all_hit else since)
        if next_at is not None and not _is_hit(
            worker_of(life), since, next_at, faults, but=fault if all_hit else None
        ):
            taken.append(next_at - (fault["ended_at"] if all_hit else since))
    return {
        "first_s": min(taken, default=None), "all_s": max(taken, default=None), "back_s": _back(lines, fault),
    }  # fmt: skip


def _back(lines: Lines, fault: Mapping[str, Any]) -> float | None:
    """From the end of a fault until the workers that it hit had averaged; None where they never do."""
    kind = fault["kind"]
    if kind in ("kill", "coordinator"):
        return None
    ends = fault["ended_at"]
    taken = []
    for life, own in lines.items():
        worker = worker_of(life)
        hit = host_of(worker) == fault["target"] if kind == "cut" else worker == fault["target"]
        if kind == "join":
            hit = hit and bool(own) and own[0]["at"] >= ends
        if hit and own and (next_at := _next_average(own, ends)) is not None:
            taken.append(next_at - ends)
    return max(taken, default=None)


def _next_average(own: Sequence[Line], since: float) -> float | None:
    return next(
        (line["at"] for line in own if line.get("ending") == "committed" and line["at"] > since), None
    )


def _is_hit(
    worker: int,
    since: float,
    until: float,
    faults: Sequence[Mapping[str, Any]],
    but: Mapping[str, Any] | None,
) -> bool:
    for fault in faults:
        if fault is but or fault["kind"] not in ("kill", "stop", "cut"):
            continue
        mine = fault["target"] in (host_of(worker), COORDINATOR_HOST) if fault["kind"] == "cut" else (
            fault["target"] == worker
        )  # fmt: skip
        ends = float("inf") if fault["kind"] == "kill" else fault["ended_at"]
        if mine and fault["began_at"] < until and ends > since:
            return True
    return False
