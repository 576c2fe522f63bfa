"""Imports of harmed recordings: what comes out is a trace or one line, soon, in little memory."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.fuzzing import cases

from fuzz_jobs import JOBS
from headway.interop.readers.formats import SHIPPED, readers

cases.JOBS.update(JOBS)


def test_every_format_is_among_the_cases() -> None:
    own = set(readers()) - {reader.name for reader in SHIPPED}
    assert own <= {job.split()[0].rstrip(",") for job in JOBS}


@settings(max_examples=examples(60))
@given(st.sampled_from(list(JOBS)), st.integers(0, 2**32))
def test_harm_is_reported_and_nothing_else_escapes(job: str, seed: int) -> None:
    outcome = cases.run_case(cases.make_case(random.Random(seed), job))
    assert outcome.kind in cases.GOOD, f"{outcome.kind} after {outcome.seconds:.1f} s: {outcome.said}"
