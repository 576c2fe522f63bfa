"""DeAR's search for a bucket size (arXiv 2302.12445), as a baseline: Bayesian optimisation of one threshold.

Only rank 0 searches. What it says is shared before anybody acts on it, so that no two ranks ever use different
thresholds, at the end of the search as in its course.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from headway.errors import UserError

Share = Callable[[float], float]
"""Called on every rank at the same time; returns rank 0's argument on all of them."""


class ThresholdSearch:
    """Asks for thresholds to try, and is told the step times they gave. Every rank holds one and calls it alike.

    ``bounds_mb`` times ``scale`` bounds the threshold; the first trial is ``start_mb`` times ``scale``, and expected
    improvement with ``xi`` chooses the other ``trials - 1``. ``rank`` is this process's; ``share`` gives rank 0's
    suggestion to all, and may be left out where there is one rank only (see ``share_over``).

    Raises UserError on rank 0 where the library ``bayesian-optimization`` is missing.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        share: Share | None = None,
        start_mb: float = 25.0,
        bounds_mb: tuple[float, float] = (1.0, 256.0),
        scale: float = 1.0,
        trials: int = 10,
        xi: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.trials = trials
        self.told = 0
        self._start_mb = start_mb * scale
        self._share = share or (lambda value: value)
        self._best: tuple[float, float] | None = None
        low, high = bounds_mb
        self._optimizer = _optimizer((low * scale, high * scale), xi, seed) if rank == 0 else None

    @property
    def done(self) -> bool:
        """Whether all trials have been told."""
        return self.told >= self.trials

    def ask(self) -> float:
        """The threshold to use now, in MB, the same on every rank: the next trial's, or the best once done."""
        return self._share(0.0 if self._optimizer is None else self._suggestion(self._optimizer))

    def tell(self, threshold_mb: float, step_s: float) -> None:
        """Report the measured step time of a threshold that was asked for. Rank 0's report is the one that counts."""
        self.told += 1
        if self._optimizer is None:
            return
        if self._best is None or step_s < self._best[0]:
            self._best = step_s, threshold_mb
        self._optimizer.register(params={"threshold_mb": threshold_mb}, target=-step_s)

    def _suggestion(self, optimizer: Any) -> float:
        if self.told == 0:
            return self._start_mb
        if self.done and self._best is not None:
            return self._best[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the Gaussian process complains of few points
            return float(optimizer.suggest()["threshold_mb"])


def share_over(group: Any = None, device: str = "cpu") -> Share:
    """Sharing over a process group of ``torch.distributed``, the default one where None, from its rank 0.

    ``device`` is one whose tensors the group takes: "cuda" for NCCL.
    """
    import torch
    import torch.distributed as dist

    def share(value: float) -> float:
        # A device tensor where the backend has no CPU tensors would go here as well; Gloo and MPI have them.
        message = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(message, group=group, group_src=0)
        return float(message)

    return share


def _optimizer(bounds_mb: tuple[float, float], xi: float, seed: int) -> Any:
    try:
        from bayes_opt import BayesianOptimization
        from bayes_opt.acquisition import ExpectedImprovement
    except ImportError as error:
        raise UserError(
            "the Bayesian search needs the library bayesian-optimization",
            got=str(error),
            fix="pip install bayesian-optimization",
        ) from error
    return BayesianOptimization(
        f=None,
        pbounds={"threshold_mb": bounds_mb},
        acquisition_function=ExpectedImprovement(xi=xi),
        random_state=seed,
        verbose=0,
        allow_duplicate_points=True,
    )
