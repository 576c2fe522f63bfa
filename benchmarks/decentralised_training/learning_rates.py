"""Learning rates: the best of each method, chosen on a seed that no other figure is of.

Where each worker's optimizer sees its own small batch, Adam's second moments are larger than of the mean gradient and
its updates smaller, so a rate chosen for all-reduce says nothing of the others.
"""

from __future__ import annotations

TRIED: dict[str, tuple[float, ...]] = {
    "digits": (0.01, 0.02, 0.04, 0.08),
    "gpt": (2e-3, 8e-3, 16e-3, 32e-3),
}
SEED = 7
_BEST = {"digits": 0.04, "gpt": 16e-3}
_BEST_OF_OTHERS = {("digits", "ad-psgd"): 0.08}


def best(model: str, method: str) -> float:
    """The rate of those in ``TRIED`` that left the lowest loss, as the cases ``rates-…`` measured."""
    return _BEST_OF_OTHERS.get((model, method), _BEST[model])
