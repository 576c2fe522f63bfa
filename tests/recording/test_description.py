"""What a recording says of the model and its wrapper."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.recording.description import describe_machine, refusals
from headway.trace.format import RankInfo


def wrapper_of(module: nn.Module, **attributes: Any) -> Any:
    """What is looked at of a DistributedDataParallel, which needs a process group."""
    return SimpleNamespace(module=module, mixed_precision=None, **{"static_graph": False, **attributes})


def compiled_in_place() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("model", "unseen", "said"),
    [
        (wrapper_of(nn.Linear(2, 2)), False, ""),
        (wrapper_of(nn.Linear(2, 2)), True, "the model was compiled after it was wrapped"),
        (wrapper_of(nn.Linear(2, 2), static_graph=True), False, "static_graph=True is not supported"),
        (wrapper_of(compiled_in_place()), False, "modules that are compiled in place are not supported"),
        (wrapper_of(nn.Linear(2, 2, dtype=torch.complex64)), False, "a parameter"),
        (None, False, ""),
    ],
    ids=["plain", "compiled around", "static graph", "compiled in place", "complex", "none"],
)
def test_why_a_wrapper_cannot_be_decoupled(model: Any, unseen: bool, said: str) -> None:
    found = refusals(model, {}, compiled_around=unseen).get("decoupled", "")
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_script_that_names_an_implementation_of_its_optimizer_is_given_no_other() -> None:
    assert refusals(None, {"fused": True}, compiled_around=False) == {
        "optimizer": "the script sets fused=True itself"
    }


def test_a_machine_is_described_as_a_rank_keeps_it() -> None:
    told = describe_machine(nn.Linear(2, 2))
    info = RankInfo(rank=0, host="here", world_size=1, backend="gloo", version="2", **told)
    assert info.device == "cpu"
    assert info.threads == torch.get_num_threads()
    assert sum(high - low + 1 for low, high in info.cores) == len(os.sched_getaffinity(0))
    assert info.load is not None
    assert describe_machine(None)["device"] == ""
