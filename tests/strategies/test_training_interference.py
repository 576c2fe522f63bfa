"""By how much passes are slowed down under the decoupled all-reduce, told from the passes of a small model."""

from __future__ import annotations

import pytest

from headway.strategies.decoupled.training_interference import Passes, compared

STOCK = Passes(forward_ns=10e6, backward_ns=22e6, forward_overlap=0.0, backward_overlap=1.0)


def test_a_backward_that_ddp_slows_down_too_is_held_against_one_that_nothing_does() -> None:
    found = compared(STOCK, Passes(13e6, 25e6, 0.7, 0.7), of_collectives=0.1)
    assert found is not None
    assert found.forward == pytest.approx(0.3)
    assert found.backward == pytest.approx(0.25)


def test_passes_that_are_no_slower_are_not_sped_up() -> None:
    found = compared(STOCK, Passes(9e6, 19e6, 0.7, 0.7), of_collectives=0.1)
    assert found is not None
    assert (found.forward, found.backward) == (0, 0)


def test_nothing_is_told_where_hardly_anything_was_in_flight() -> None:
    assert compared(STOCK, Passes(13e6, 25e6, 0.7, 0.1), of_collectives=0.1) is None
