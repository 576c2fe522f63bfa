"""Rounds of averaging: how one rank of a job averaged its model with groups of others, as a trace holds it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_ROUNDS = 20_000
MOST_MEMBERS = 1024

_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AveragingRound(BaseModel):
    """One round. Times are nanoseconds on rank 0's clock.

    The rank asked for a group at ``asked_ns``; the group began at ``begun_ns`` and was decided about at ``ended_ns``.
    Training stood still for ``blocked_ns`` until ``told_ns``, whatever went on meanwhile. ``iteration`` is the step of
    this rank whose result was averaged, ``step`` the one that was recorded when the round ended. ``members`` are
    workers, ``iterations`` what they had finished, in their order. ``staleness`` counts the rank's own steps between
    the copy that was averaged and the taking of the mean. ``distance`` is the norm of the rank's parameters minus the
    group's mean, ``relative_distance`` that divided by the norm of the mean. ``reason`` says why there is no mean.
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

    ``dropped`` were too many to be kept.
    """

    model_config = ConfigDict(frozen=True)

    worker: int
    rounds: Annotated[tuple[AveragingRound, ...], Field(max_length=MOST_ROUNDS)] = ()
    dropped: _Count = 0
