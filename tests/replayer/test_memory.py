from __future__ import annotations

from tests.models import layered_model

from headway.job import Job
from headway.model import ModelSpec, PassMemory
from headway.simulator.memory import peak_bytes, peak_is_rough
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy

DDP = DistributedDataParallelStrategy()
GRADIENTS = DecoupledStrategy(gather="gradients")
PARAMETERS = DecoupledStrategy(gather="parameters")


def peak(model: ModelSpec, strategy: Strategy, world_size: int = 4) -> int:
    job = Job.of(model, world_size)
    return peak_bytes(job, strategy, strategy.decide(job))


def watched(model: ModelSpec, **changes: object) -> ModelSpec:
    """As if a pass had been watched: 1 MB at first, less and less from gradient to gradient."""
    ready = [parameter.name for parameter in model.ready_parameters()]
    memory = PassMemory(
        forward_bytes=1_000_000,
        backward=tuple((name, 1_000_000 - 1_000 * place) for place, name in enumerate(ready)),
    )
    return model.model_copy(update={"pass_memory": memory.model_copy(update=changes)})


def test_gathering_parameters_divides_the_optimizers_state_among_ranks() -> None:
    model = layered_model(4).model_copy(update={"optimizer_state_bytes": 4 * layered_model(4).size_bytes})
    world_size = 4
    replicated, shared = (peak(model, strategy, world_size) for strategy in (GRADIENTS, PARAMETERS))
    saved = model.optimizer_state_bytes * (world_size - 1) // world_size
    assert replicated - shared <= saved
    assert replicated - shared >= saved - 2 * model.size_bytes, (
        "shards of gradients, and a bucket's state twice"
    )


def test_buckets_that_are_the_gradients_save_those() -> None:
    gradients = tuple((parameter.name, 0) for parameter in layered_model(4).parameters)
    model = watched(layered_model(4), backward=gradients, forward_bytes=0)
    views = watched(layered_model(4), backward=gradients, forward_bytes=0, gradients_apart=False)
    assert peak(model, DDP) - peak(views, DDP) == model.size_bytes
    assert peak(model, GRADIENTS) == peak(views, GRADIENTS), "each rank's own are there in any case"


def test_activations_and_gradients_are_not_all_there_at_once() -> None:
    model = layered_model(4)
    for strategy in (DDP, GRADIENTS):
        always = peak(watched(model, backward=(), forward_bytes=0), strategy)
        assert 1_000_000 <= peak(watched(model), strategy) - always < 1_000_000 + model.size_bytes
    always = peak(watched(model, backward=(), forward_bytes=0), DDP)
    accumulating = watched(model, gradients_accumulate=True)
    assert peak(accumulating, DDP) - always == 1_000_000 + model.size_bytes
    kept = watched(model, gradients_kept=True)
    assert peak(kept, DDP) - always == 1_000_000 + model.size_bytes


def test_an_update_of_everything_at_once_may_be_the_worst() -> None:
    gradients = tuple((parameter.name, 0) for parameter in layered_model(4).parameters)
    without, with_it = (
        watched(layered_model(4), backward=gradients, forward_bytes=0, update_bytes=size)
        for size in (0, 9000)
    )
    assert peak(with_it, DDP) - peak(without, DDP) == 9000
    assert peak(with_it, GRADIENTS) == peak(without, GRADIENTS), "a bucket's own gradients are gone by then"
    assert 0 < peak(with_it, PARAMETERS) - peak(without, PARAMETERS) <= 9000 / 4


def test_servers_need_room_for_what_is_pushed_to_them() -> None:
    model = watched(layered_model(4))
    assert peak(model, ParameterServerStrategy()) > peak(model, DDP)


def test_without_a_watched_pass_activations_go_evenly() -> None:
    model = layered_model(4)
    without = peak(model, GRADIENTS)
    with_them = peak(model.model_copy(update={"activation_bytes": 1_000_000}), GRADIENTS)
    assert 0 < with_them - without < 1_000_000, "all gradients were there without them"


def test_frozen_parameters_are_there_all_the_time() -> None:
    model = watched(layered_model(4))
    frozen = model.model_copy(update={"frozen_bytes": 10**9})
    assert peak(frozen, DDP) - peak(model, DDP) == 10**9
    assert peak(frozen, PARAMETERS) - peak(model, PARAMETERS) == 10**9


def test_peaks_are_rough_where_no_pass_was_watched() -> None:
    def is_rough(model: ModelSpec) -> bool:
        job = Job.of(model, 4)
        return peak_is_rough(job, DDP, DDP.decide(job))

    assert is_rough(layered_model(4))
    assert not is_rough(watched(layered_model(4)))
