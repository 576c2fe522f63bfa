"""What-ifs that say what a job lives through: ``dies:3@2s``, ``joins:3@5s``, ``random-slowdown:10%=3x``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from headway.errors import UserError
from headway.incidents import Incidents
from headway.units import parse_duration_s, parse_factor

SLOWDOWN, DIES, JOINS = "random-slowdown", "dies", "joins"
FORMS = "random-slowdown:10%=3x, dies:3@2s, joins:3@5s"
_RANK_AT = re.compile(r"([0-9]{1,9})@(.+)")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%")
LONGEST_S = 1e6
LARGEST = 1e6  # factor


def incidents_of(texts: Iterable[str]) -> tuple[Incidents, list[str]]:
    """What ``texts`` say of incidents, and those that are about something else. Raises UserError."""
    found, others = Incidents(), []
    for text in texts:
        said = _with_incident(text, found)
        if said is None:
            others.append(text)
        else:
            found = said
    if (rank := found.twice()) is not None:
        raise UserError(
            f"--what-if: rank {rank} dies or joins twice, one time after the other", got=", ".join(found.describe()),
            expected="a death between two joins, and a join between two deaths",
        )  # fmt: skip
    return found, others


def _with_incident(text: str, known: Incidents) -> Incidents | None:
    """``known`` and what ``text`` says; None where it says nothing of that kind. Raises UserError."""
    key, equals, value = text.partition("=")
    what, _, whose = key.partition(":")
    if what == SLOWDOWN:
        if known.slow_share:
            raise UserError(f"--what-if {SLOWDOWN} is given twice", got=repr(text), expected="one of them")
        share = _SHARE.fullmatch(whose)
        if not equals or share is None or not 0 < float(share[1]) <= 100:
            raise UserError(
                f"--what-if {SLOWDOWN} cannot be read", got=repr(text),
                expected="a share of iterations and a factor, such as random-slowdown:10%=3x",
            )  # fmt: skip
        factor = parse_factor(value, f"--what-if {key}")
        if factor > LARGEST:
            raise UserError(
                f"--what-if {key} is out of range", got=f"{factor:g}x", expected=f"at most {LARGEST:g}x"
            )
        return replace(known, slow_share=float(share[1]) / 100, slow_factor=factor)
    if what not in (DIES, JOINS) or ":" not in key:
        return None
    read = None if equals else _RANK_AT.fullmatch(whose)
    if read is None:
        raise UserError(
            f"--what-if {what} cannot be read",
            got=repr(text),
            expected=f"a rank and a time, such as {what}:3@2s",
        )
    time_s = parse_duration_s(read[2], f"--what-if {what}")
    if not 1e-9 <= time_s <= LONGEST_S:
        raise UserError(f"--what-if {what} is out of range", got=read[2], expected=f"1 ns to {LONGEST_S:g} s")
    event = (round(time_s * 1e9), int(read[1]))
    if what == DIES:
        return replace(known, deaths=(*known.deaths, event))
    return replace(known, joins=(*known.joins, event))
