"""What tells the steps of an MXNet profile."""

import pytest

from headway.trace.events import Kind
from headway_readers.mxnet.steps import SINGLE
from mxnet_files import BEGIN_US, FORWARD, PUSH, a_step, profile, rank_of, spans

MARKS = 1_000_000


def test_a_pull_that_reaches_into_the_next_forward_does_not_cut_it() -> None:
    """The next step's forward begins while the step's last parameters are still on their way."""
    step = [
        FORWARD,
        ("_backward_FullyConnected", 1.0, 1.0),
        PUSH,
        ("KVStoreDistDefaultStoragePushPull", 2.1, 8.4),
    ]
    rows = [(name, start + 10 * number, length) for number in range(3) for name, start, length in step]
    events = rank_of(profile(spans(*rows))).events
    steps = events.of_kind(Kind.STEP)
    assert ((steps.start_ns - BEGIN_US * 1000) / MARKS).tolist() == [0.0, 10.0, 20.0]
    assert events.of_kind(Kind.PUSH).step.tolist() == [0, 0, 1, 1, 2, 2]
    waits = events.of_kind(Kind.WAIT)
    assert ((waits.start_ns - BEGIN_US * 1000) / MARKS).tolist() == [2.0, 12.0, 22.0]
    assert waits.duration_ns.tolist()[:2] == [8 * MARKS, 8 * MARKS]


def test_bulks_are_forward_before_the_last_named_forward_and_backward_after() -> None:
    step = [
        ("ImperativeBulk", 0.0, 1.0),
        ("mean", 1.0, 1.0),
        ("ImperativeBulk", 2.0, 1.0),
        (PUSH[0], 3.0, 1.0),
    ]
    rows = [(name, start + 10 * number, length) for number in range(2) for name, start, length in step]
    events = rank_of(profile(spans(*rows))).events
    assert events.of_kind(Kind.FORWARD).name.tolist() == ["ImperativeBulk", "mean"] * 2
    assert events.of_kind(Kind.BACKWARD).name.tolist() == ["ImperativeBulk"] * 2
    assert events.of_kind(Kind.BACKWARD).step.tolist() == [0, 1]


def test_without_communication_backward_tells_steps() -> None:
    rows = [(name, start + 10 * number, 1.0) for number in range(4)
            for name, start in (("dot", 0.0), ("_backward_dot", 2.0), ("sgd_update", 4.0))]  # fmt: skip
    found = rank_of(profile(spans(*rows)))
    assert len(found.events.of_kind(Kind.STEP)) == 4
    assert a_step(found.events) == {"step": 1, "forward": 1, "backward": 1, "optimizer": 1}
    assert "No communication is recorded." in found.notes


@pytest.mark.parametrize(("begin", "end"), [("b", "e"), ("(", ")"), ("B", "E")])
@pytest.mark.parametrize("name", ["step", "train_step 3", "Iteration", "batch"])
def test_tasks_frames_and_events_with_a_steps_name_mark_steps(name: str, begin: str, end: str) -> None:
    marks = spans(
        (name, 0.0, 4.0), (name, 5.0, 4.0), ("other", 0.0, 99.0), process="mine", begin=begin, end=end
    )
    rows = [(FORWARD[0], start, 1.0) for start in (0.5, 2.5, 5.5, 9.5)]
    events = rank_of(profile(spans(*rows), marks)).events
    steps = events.of_kind(Kind.STEP)
    assert ((steps.start_ns - BEGIN_US * 1000) / MARKS).tolist() == [0.0, 5.0]
    assert events.of_kind(Kind.FORWARD).step.tolist() == [0, 0, 1, -1]


def test_markers_with_a_steps_name_begin_steps() -> None:
    markers = [
        {"name": "step", "cat": "mine", "ph": "n", "pid": 9, "tid": 1, "ts": BEGIN_US + at}
        for at in (0, 5000)
    ]
    events = rank_of(profile(spans(FORWARD, (FORWARD[0], 6.0, 1.0)), markers)).events
    assert events.of_kind(Kind.FORWARD).step.tolist() == [0, 1]
    assert events.of_kind(Kind.STEP).duration_ns.tolist()[0] == 5 * MARKS


def test_of_marks_that_overlap_the_shorter_count() -> None:
    marks = spans(
        ("step", 0.0, 99.0), ("step", 0.0, 4.0), ("step", 5.0, 4.0), process="mine", begin="b", end="e"
    )
    rows = [(FORWARD[0], start, 1.0) for start in (0.5, 5.5)]
    steps = rank_of(profile(spans(*rows), marks)).events.of_kind(Kind.STEP)
    assert (steps.duration_ns / MARKS).tolist() == [4.0, 4.0]


def test_names_that_merely_contain_a_steps_name_mark_nothing() -> None:
    marks = spans(("stepladder", 0.0, 1.0), ("mybatches", 0.0, 1.0), process="mine", begin="b", end="e")
    assert SINGLE in rank_of(profile(spans(FORWARD), marks)).notes
