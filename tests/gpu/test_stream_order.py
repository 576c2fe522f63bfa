"""On streams nobody overtakes anybody: the path for NCCL with imitated streams, which find every missing wait.

This needs no GPU. One case of every kind is run; which cases there are is in ``tests.behaviour.decoupled``.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
from tests import workers
from tests.behaviour.decoupled import harness, test_exactness
from tests.behaviour.decoupled.job import GRADIENTS, PARAMETERS
from tests.gpu import overtaking

CASES = (
    "plain_training",
    "accumulation_of_both_kinds_with_reads_between",
    "steps_without_a_backward_of_their_own",
    "backward_whose_gradients_are_thrown_away",
    "closures",
    "zero_grad by optimizer, to zero",
    "two_forwards_then_two_backwards",
    "clipping by norm",
    "gradients_changed_in_place",
    "gradients_changed_through_kept_references",
    "loss scaling, unscale never, fused",
    "loss scaling, unscale and clip",
    "autocast bfloat16",
    "rate_that_is_a_tensor",
    "two_optimizers_for_one_model",
    "tied_weights",
    "activation checkpointing, reentrant",
    "parameters_of_two_precisions",
    "batch normalisation",
    "gradients by grad on rank 0",
    "values by state_dict on rank 0",
    "optimizer_state_on_rank_0_alone",
    "averaged models on every rank",
    "join, first has most, over all ranks, SGD",
    "optimizer Adam foreach",
    "optimizer ASGD",
    "optimizer own Lamb",
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@lru_cache
def _problems(mode: str, imitation: str) -> dict[str, str]:
    known = harness.names_of(mode, 2)
    names = [name for name in CASES if name in known]
    modules = (imitation, *test_exactness.MODULES)
    with tempfile.TemporaryDirectory() as reports:
        workers.launch(
            2, f"{harness.__name__}:run_cases", modules, mode, names, reports, reports, "cpu",
            timeout_s=180, group_timeout_s=20, bare=True,
        )  # fmt: skip
        found = harness._reports(Path(reports), 2)
    return {name: found.get(name, "did not come to its end") for name in names}


@pytest.mark.parametrize("mode", [GRADIENTS, PARAMETERS])
def test_every_use_waits_for_those_before(mode: str) -> None:
    found = _problems(mode, "tests.gpu.imitated_streams")
    assert len(found) > 20
    assert not {name: problem for name, problem in found.items() if problem}


@pytest.mark.parametrize("fault", overtaking.FAULTS)
def test_a_missing_wait_is_found(fault: str) -> None:
    (message,) = workers.run(1, f"{overtaking.__name__}:train", fault)
    assert "RaceError" in message, message


def test_several_producers_of_a_bucket_are_waited_for() -> None:
    ((in_turns, in_no_order),) = workers.run(1, f"{overtaking.__name__}:fill_from_two_streams")
    assert not in_turns
    assert "does not wait for" in in_no_order
