"""Which servers are worth a measurement while training: those with unequal shares, where links are unequal."""

from __future__ import annotations

from headway.strategies.adaptive.tuning.proposals import Question
from headway.strategies.parameter_server.policy import LEAST_PIECE_MB, ParameterServerStrategy
from headway.strategies.parameter_server.shares import shares_on

MOST_KEY_MB = 16.0  # and half of the model at the most
SMALLER = 4  # as many times smaller are the other keys that are tried
MOST_PIECES = 16


def servers_for(question: Question) -> list[ParameterServerStrategy]:
    """Servers that serve as much as their links carry, other than those in force; keys of the largest size first.

    Nothing is predicted of them. Links that are equal now are a reason to try equal shares where those in force are
    not.
    """
    if not question.may_serve or question.learned is None:
        return []
    shares = shares_on(question.learned.cluster)
    begun = question.on_stock_ddp if isinstance(question.on_stock_ddp, ParameterServerStrategy) else None
    model_mb = question.model.size_bytes / 2**20
    largest_mb = min(MOST_KEY_MB, model_mb / 2)
    caps_mb = [largest_mb, largest_mb / SMALLER] if shares else []
    caps_mb = list(dict.fromkeys(caps_mb if begun is None else [begun.bucket_cap_mb, *caps_mb]))
    found = [
        ParameterServerStrategy(
            bucket_cap_mb=cap_mb,
            channels=min(2, question.channels) if begun is None else begun.channels,
            shares=shares,
            pieces=_pieces(min(cap_mb, model_mb)) if shares else 1,
        )
        for cap_mb in caps_mb
    ]
    return [each for each in found if each != begun]


def _pieces(key_mb: float) -> int:
    return max(1, min(MOST_PIECES, int(key_mb / LEAST_PIECE_MB)))
