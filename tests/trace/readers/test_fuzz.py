"""Every reader, through whole imports of harmed recordings: what comes out is a trace or one line, soon, in little memory.

``benchmarks/fuzz_readers.py`` runs the same kinds of cases in thousands.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trace.readers.fuzzing.cases import CRASHED, GOOD, JOBS, LARGE, SLOW, make_case, run_case

from headway.trace.readers.formats import FORMATS


def test_every_format_is_among_the_cases() -> None:
    assert {one.name for one in FORMATS} <= {job.split()[0].rstrip(",") for job in JOBS}


@settings(max_examples=300)
@given(st.sampled_from(list(JOBS)), st.integers(0, 2**32))
def test_harm_is_reported_and_nothing_else_escapes(job: str, seed: int) -> None:
    outcome = run_case(make_case(random.Random(seed), job))
    assert outcome.kind in GOOD, f"{outcome.kind} after {outcome.seconds:.1f} s: {outcome.said}"


def test_bounds_are_held_against_what_happens() -> None:
    """That what should not be would be seen: a case that takes long, much memory, or raises."""
    case = make_case(random.Random(1), "horovod")
    assert run_case(case).kind in GOOD
    for what, kind in ((_slow, SLOW), (_large, LARGE), (_crash, CRASHED)):
        assert run_case(case, what).kind == kind
