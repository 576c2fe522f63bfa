"""The life of a parameter: every event in every phase, and who may change what is known of a parameter."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.errors import InternalError
from headway.strategies import decoupled
from headway.strategies.decoupled.deferred import DeferredGradient, DeferredParameter
from headway.strategies.decoupled.parameter_state import TRANSITIONS, Event, ParameterState, Phase, Replaced

LEGAL = {
    # phase: REDUCE, STEP, BRING, FIND_UNUSED, REPLACE, SETTLE; RELEASE leads to CURRENT
    Phase.CURRENT: ("REDUCING", "GATHERING", "", "", "CURRENT", ""),
    Phase.REDUCING: ("", "STEPPED", "CURRENT", "UNUSED", "CURRENT", ""),
    Phase.UNUSED: ("", "STEPPED_UNUSED", "", "", "CURRENT", ""),
    Phase.STEPPED: ("", "", "GATHERING", "STEPPED_UNUSED", "CLEARED", "REDUCING"),
    Phase.STEPPED_UNUSED: ("", "", "", "", "CLEARED", "UNUSED"),
    Phase.CLEARED: ("", "", "", "", "CLEARED", "CURRENT"),
    Phase.GATHERING: ("", "", "", "", "GATHERING", "CURRENT"),
}
EVENTS = (Event.REDUCE, Event.STEP, Event.BRING, Event.FIND_UNUSED, Event.REPLACE, Event.SETTLE)


def happen(state: ParameterState, event: Event) -> None:
    """Let ``event`` happen to a parameter."""
    {
        Event.REDUCE: state.begin_reduction,
        Event.STEP: state.step,
        Event.BRING: lambda: state.show_average(Replaced(None, torch.ones(2))),
        Event.FIND_UNUSED: state.find_unused,
        Event.REPLACE: state.leave_gradient,
        Event.SETTLE: state.settle,
        Event.RELEASE: state.release,
    }[event]()


def state_in(phase: Phase) -> ParameterState:
    """A parameter that has come to ``phase`` by legal events."""
    for length in range(len(Phase)):
        for events in itertools.product(EVENTS, repeat=length):
            state = ParameterState("weight", nn.Parameter(torch.ones(2)))
            try:
                for event in events:
                    happen(state, event)
            except InternalError:
                continue
            if state.phase is phase:
                return state
    raise AssertionError(f"{phase} cannot be reached")


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_what_may_happen_in_a_phase_and_what_comes_of_it(phase: Phase, event: Event) -> None:
    expected = "CURRENT" if event is Event.RELEASE else LEGAL[phase][EVENTS.index(event)]
    state = state_in(phase)
    if expected:
        happen(state, event)
        assert state.phase is Phase[expected]
    else:
        with pytest.raises(InternalError, match=phase.name):
            happen(state, event)
        assert state.phase is phase, "it stays"


def test_every_event_has_its_row_in_the_table() -> None:
    assert set(TRANSITIONS) == set(Event)
    assert set(LEGAL) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_a_parameter_notices_uses_of_what_is_not_current(phase: Phase) -> None:
    state = state_in(phase)
    notices = DeferredParameter if phase.stepped else DeferredGradient if phase.pending else nn.Parameter
    assert type(state.parameter) is notices
    assert phase.to_bring == (phase in (Phase.REDUCING, Phase.STEPPED))
    if phase is Phase.CURRENT:
        assert state.taken is None
        assert not state.grad_referenced


def test_only_its_own_methods_change_a_parameter_state() -> None:
    fields = set(vars(ParameterState("weight", nn.Parameter(torch.ones(2))))) - {"parameter", "name", "views"}
    for file in sorted(Path(next(iter(decoupled.__path__))).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in fields:
                assert isinstance(node.value, ast.Name), (file.name, node.lineno)
                assert node.value.id == "self", (file.name, node.lineno, node.attr)
