"""What rank 0 answers a question with: a shortlist, or why there is none."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from headway.strategies.adaptive.tuning.planned import guesses, shortlist
from headway.strategies.adaptive.tuning.proposals import Candidate, Question


class Shortlist(BaseModel):
    """What rank 0 tells the others: what to try, or why nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidates: tuple[Candidate, ...] = ()
    problem: str = ""


def planned(question: Question) -> str:
    """The shortlist, as JSON."""
    try:
        found = guesses(question) if question.learned is None else shortlist(question, question.learned)
        short = Shortlist(candidates=tuple(found))
    except Exception as error:  # the other ranks wait for an answer, and training goes on without a plan
        short = Shortlist(problem=f"planning failed: {type(error).__name__}: {error}")
    return short.model_dump_json()
