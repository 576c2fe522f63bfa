"""Training in parallel is training alone on everybody's data: every situation of a script, in every way of wrapping."""

from __future__ import annotations

import importlib

import pytest
from tests import workers
from tests.behaviour.decoupled import harness
from tests.behaviour.decoupled.job import CASES, DDP, GRADIENTS, HANDED_OVER, PARAMETERS, TURNS

MODES = (DDP, GRADIENTS, PARAMETERS, HANDED_OVER, TURNS)
WORLD_SIZES = (2, 3)
MODULES = tuple(
    f"tests.behaviour.decoupled.{subject}_cases"
    for subject in (
        "accumulation", "scaling", "schedule", "partial", "join", "structure", "reading", "reader", "optimizer",
        "own_ways",
    )
)  # fmt: skip

for _module in MODULES:
    importlib.import_module(_module)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(harness.ALL_LIMIT_S + 20)]


def of_size(mode: str, size: int, *, exhaustive: bool) -> tuple[str, ...]:
    """The cases of ``mode`` that are run on ``size`` ranks by default, or only where everything is.

    Those that can be run on two ranks and on three are by default run on two in one decoupled mode, and half of them on
    three in the other mode. Under stock DDP they only prove the cases themselves. Where it does all steps they prove
    less than where it does every other one, and that needs two ranks; a quarter of those is run by default.
    """
    if mode in (DDP, HANDED_OVER) or (mode == TURNS and size != WORLD_SIZES[0]):
        return tuple(harness.names_of(mode, size)) if exhaustive else ()
    elsewhere = {case for other in WORLD_SIZES if other != size for case in harness.names_of(mode, other)}
    number_of = {name: number for number, name in enumerate(CASES)}

    def repeats(name: str) -> bool:
        number = number_of[name]
        turn, pair = (number + MODES.index(mode)) % len(WORLD_SIZES), number // len(WORLD_SIZES)
        if mode == TURNS:
            return number % 4 > 0
        return name in elsewhere and (WORLD_SIZES[turn] != size or (size == WORLD_SIZES[1] and pair % 2 == 1))

    return tuple(name for name in harness.names_of(mode, size) if repeats(name) == exhaustive)


@pytest.mark.parametrize(
    ("mode", "world_size", "exhaustive", "case"),
    [
        pytest.param(
            mode, size, exhaustive, case, id=f"{mode}-{size}-{case}",
            marks=[pytest.mark.exhaustive] if exhaustive else [],
        )
        for mode in MODES
        for size in WORLD_SIZES
        for exhaustive in (False, True)
        for case in of_size(mode, size, exhaustive=exhaustive)
    ],
)  # fmt: skip
def test_same_as_in_one_process(mode: str, world_size: int, exhaustive: bool, case: str) -> None:
    names = of_size(mode, world_size, exhaustive=exhaustive)
    problem = harness.problems(MODULES, mode, world_size, names=names)[case]
    assert not problem, problem


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [GRADIENTS, PARAMETERS, TURNS])
def test_many_steps_while_other_threads_read(mode: str) -> None:
    differ = workers.run(2, "tests.behaviour.decoupled.reader_cases:for_long", mode, timeout_s=200)
    assert differ == [[], []]
