from __future__ import annotations

from tests.models import layered_model

from headway.replay.memory import peak_bytes
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy


def test_gathering_parameters_divides_the_optimizers_state_among_ranks() -> None:
    model = layered_model(4).model_copy(update={"optimizer_state_bytes": 40_000})
    replicated, shared = (
        peak_bytes(model, DecoupledStrategy(gather=form).decide(model), world_size=4)
        for form in ("gradients", "parameters")
    )
    assert replicated - shared == 30_000
