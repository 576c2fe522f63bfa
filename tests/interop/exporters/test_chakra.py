import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.chakra_files import put_together, taken_apart
from tests.synthetic import MS, SyntheticJob, synthetic_trace, trace_of

from headway.errors import TraceError
from headway.interop.exporters.chakra import write_chakra
from headway.interop.readers.chakra import reader
from headway.interop.readers.chakra.schema import NodeType
from headway.interop.readers.foreign import Document, ForeignRank
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Trace

US = 1000
PARTS = (Kind.INPUT, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)


def read_back(path: Path) -> ForeignRank:
    (rank,) = reader.read(Document(path.name, path.read_bytes())).ranks
    return rank


def values(message: Any) -> dict[str, Any]:
    return {one.name: getattr(one, one.WhichOneof("value")) for one in message.attr}


def nodes_of(path: Path) -> dict[int, Any]:
    return {one.id: one for one in taken_apart(path.read_bytes())[1]}


def time_by(events: Events, *kinds: str) -> dict[tuple[int, str, str], tuple[int, int]]:
    """Total time in ns and number of pieces by step, kind and name."""
    found: dict[tuple[int, str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for event in events.of_kind(*kinds):
        total, count = found[event.step, event.kind, event.name]
        found[event.step, event.kind, event.name] = (total + event.duration_ns, count + 1)
    return found


def close(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return len(one) == len(other) and bool((np.abs(one - other) <= US).all())


jobs = st.builds(
    SyntheticJob,
    world_size=st.integers(1, 4),
    steps=st.integers(1, 3),
    input_ms=st.floats(0.01, 2),
    forward_ms=st.floats(0.05, 10),
    backward_ms=st.floats(0.05, 10),
    rest_ms=st.floats(0, 1),
    bucket_bytes=st.lists(st.integers(0, 5_000_000), min_size=1, max_size=6).map(tuple),
    gbps=st.floats(0.5, 100),
    blocking_loss=st.booleans(),
    jitter=st.floats(0, 1),
    slow=st.just({}) | st.just({(0, "backward"): 7.0}) | st.just({(0, "input"): 3.0}),
    seed=st.integers(0, 5),
)


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(jobs)
def test_what_was_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, job: SyntheticJob) -> None:
    trace = synthetic_trace(job)
    paths = write_chakra(trace, tmp_path_factory.mktemp("chakra") / "out")
    assert [path.name for path in paths] == [f"synthetic.{rank}.et" for rank in range(job.world_size)]
    origin_ns = min(int(events.of_kind(Kind.STEP).start_ns.min()) for events in trace.events.values())
    for rank, path in enumerate(paths):
        found = read_back(path)
        assert (found.rank, found.world_size, found.host, found.dropped_events) == (
            rank,
            job.world_size,
            f"host{rank}",
            0,
        )
        ours, theirs = trace.events[rank], found.events
        for kind in (Kind.STEP, Kind.COLLECTIVE):
            mine, read = ours.of_kind(kind), theirs.of_kind(kind)
            assert close(mine.start_ns - origin_ns, read.start_ns)
            assert close(mine.end_ns - origin_ns, read.end_ns)
            for column in ("step", "group", "sequence", "size_bytes", "bucket", "algorithm"):
                assert getattr(mine, column).tolist() == getattr(read, column).tolist(), column
        asked = [events.of_kind(Kind.COLLECTIVE).enqueue_ns for events in (ours, theirs)]
        assert close(asked[0] - origin_ns, asked[1])
        mine_by, read_by = time_by(ours, *PARTS), time_by(theirs, *PARTS)
        assert {key for key, (total, _) in mine_by.items() if total > US} <= read_by.keys() <= mine_by.keys()
        for key, (total, count) in read_by.items():
            assert abs(mine_by[key][0] - total) <= (count + mine_by[key][1]) * US
        waited = [int(events.of_kind(Kind.WAIT).duration_ns.sum()) for events in (ours, theirs)]
        assert abs(waited[0] - waited[1]) <= 2 * US * (len(ours.of_kind(Kind.WAIT)) + 1)


@settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(jobs)
def test_dependencies_alone_give_the_recorded_time_where_nobody_came_late(
    tmp_path_factory: pytest.TempPathFactory, job: SyntheticJob
) -> None:
    trace = synthetic_trace(replace(job, jitter=0.0, slow={}))
    (path, *_) = write_chakra(trace, tmp_path_factory.mktemp("chakra") / "out")
    metadata, nodes = taken_apart(path.read_bytes())
    for one in nodes:
        one.start_time_micros = 0
        kept = [attribute for attribute in one.attr if not attribute.name.startswith("headway_asked")]
        del one.attr[:]
        one.attr.extend(kept)
    (found,) = reader.read(Document("a.0.et", put_together(metadata, nodes))).ranks
    mine, read = trace.events[0].of_kind(Kind.COLLECTIVE), found.events.of_kind(Kind.COLLECTIVE)
    slack = US * (len(nodes) + 1)
    origin_ns = trace.events[0].of_kind(Kind.STEP).start_ns[0]
    assert (np.abs(mine.enqueue_ns - origin_ns - read.enqueue_ns) <= slack).all()
    assert (np.abs(mine.end_ns - origin_ns - read.end_ns) <= slack).all()
    last = trace.events[0].of_kind(Kind.OPTIMIZER).end_ns.max() - origin_ns
    assert abs(found.events.of_kind(Kind.OPTIMIZER).end_ns.max() - last) <= slack


def test_nodes_depend_on_what_was_recorded(tmp_path: Path) -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=2, blocking_loss=True))
    nodes = nodes_of(write_chakra(trace, tmp_path / "out")[0])
    assert all(need < number for number, one in nodes.items() for need in one.data_deps)
    end_us = {number: one.start_time_micros + one.duration_micros for number, one in nodes.items()}
    computed = [one for one in nodes.values() if one.type == NodeType.COMP]
    for before, after in pairwise(computed):
        assert before.id in after.data_deps
    for one in nodes.values():
        if one.type == NodeType.COLLECTIVE:
            (needed,) = (need for need in one.data_deps if nodes[need].type == NodeType.COMP)
            assert end_us[needed] == values(one)["headway_asked"]
            assert max(end_us[need] for need in one.data_deps) <= one.start_time_micros
    loss = next(one for one in nodes.values() if values(one).get("comm_size") == 4)
    backward = next(one for one in computed if "backward" in one.name)
    assert loss.id in backward.data_deps  # it was waited for
    buckets = [one.id for one in nodes.values() if values(one).get("headway_bucket", -1) >= 0][:4]
    rest = next(one for one in computed if one.id > buckets[-1] and "rest" in one.name)
    assert buckets[-1] in rest.data_deps
    assert not set(buckets) & {need for one in computed for need in one.data_deps if one.id < rest.id}


def test_attributes_are_of_the_types_that_simulators_read(tmp_path: Path) -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=1))
    metadata, nodes = taken_apart(write_chakra(trace, tmp_path / "out")[1].read_bytes())
    assert metadata.version == "1.0.0"
    assert values(metadata)["rank"] == 1
    collective = next(one for one in nodes if one.type == NodeType.COLLECTIVE)
    assert {one.name: one.WhichOneof("value") for one in collective.attr}.items() >= {
        ("is_cpu_op", "bool_val"), ("comm_type", "int64_val"), ("comm_size", "int64_val"), ("pg_name", "string_val"),
    }  # fmt: skip
    assert values(collective)["is_cpu_op"] is False
    assert (values(collective)["comm_type"], values(collective)["comm_size"]) == (0, 1_000_000)
    assert collective.name == "COMM_COLL_NODE_all_reduce"
    assert all(one.name.startswith("COMP_NODE_") for one in nodes if one.type == NodeType.COMP)


# Jobs that are no data-parallel ones -------------------------------------------------------------------------


def span(kind: str, start_ms: float, took_ms: float, name: str = "") -> Event:
    return Event(kind, name, Stream.COMPUTE, 0, round(start_ms * MS), round(took_ms * MS))


def communication(
    kind: str, name: str, start_ms: float, took_ms: float, *, asked_ms: float = -1, **more: Any
) -> Event:
    asked_ns = round(asked_ms * MS) if asked_ms >= 0 else round(start_ms * MS)
    return Event(
        kind, name, Stream.COMMUNICATION, 0, round(start_ms * MS), round(took_ms * MS), asked_ns, **more
    )


def written(
    tmp_path: Path, *ranks: list[Event], groups: dict[str, tuple[int, ...]] | None = None
) -> list[Path]:
    trace = trace_of(dict(enumerate(ranks)))
    manifest = trace.manifest.model_copy(update={"groups": groups or {}})
    return write_chakra(Trace(trace.path, manifest, trace.model, trace.events), tmp_path / "out")


def test_both_ends_of_a_message_give_it_the_same_tag(tmp_path: Path) -> None:
    first = [span(Kind.STEP, 0, 10), span(Kind.FORWARD, 0, 2)] + [
        communication(Kind.SEND, "send", at, 1, peer=1, size_bytes=size, group="pp")
        for at, size in ((2, 64), (4, 32))
    ]
    second = [span(Kind.STEP, 0, 10), span(Kind.FORWARD, 5, 3)] + [
        communication(Kind.RECEIVE, "receive", at, 1, peer=0, size_bytes=size, group="pp")
        for at, size in ((2, 64), (4, 32))
    ]
    paths = written(tmp_path, first, second)
    sent = [values(one) for one in nodes_of(paths[0]).values() if one.type == NodeType.SEND]
    received = [values(one) for one in nodes_of(paths[1]).values() if one.type == NodeType.RECEIVE]
    assert [(one["comm_src"], one["comm_dst"], one["comm_size"]) for one in sent] == [(0, 1, 64), (0, 1, 32)]
    assert [one["comm_tag"] for one in sent] == [one["comm_tag"] for one in received]
    assert len({one["comm_tag"] for one in sent}) == 2
    found = read_back(paths[1]).events.of_kind(Kind.RECEIVE)
    assert (found.peer.tolist(), found.size_bytes.tolist(), found.group.tolist()) == (
        [0, 0],
        [64, 32],
        ["pp", "pp"],
    )


def test_the_messages_of_a_collective_are_not_written_besides_it(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"group": "decoupled", "sequence": 3}
    rows = [
        span(Kind.STEP, 0, 10), communication(Kind.COLLECTIVE, "all_reduce", 1, 4, size_bytes=400, **whole),
        communication(Kind.SEND, "all_reduce", 1, 2, peer=1, size_bytes=200, **whole),
        communication(Kind.RECEIVE, "all_reduce", 1, 2, peer=1, size_bytes=200, **whole),
    ]  # fmt: skip
    types = {one.type for one in nodes_of(written(tmp_path, rows, rows)[0]).values()}
    assert types == {NodeType.METADATA, NodeType.COMP, NodeType.COLLECTIVE}


def test_of_a_gather_the_share_is_written_and_the_whole_read_back(tmp_path: Path) -> None:
    rows = [span(Kind.STEP, 0, 10)] + [
        communication(Kind.COLLECTIVE, name, at, 1, size_bytes=103, group="0", sequence=at)
        for at, name in enumerate(
            ("all_gather", "reduce_scatter", "gather", "all_to_all", "barrier", "mystery")
        )
    ]
    paths = written(tmp_path, rows, rows)
    nodes = [one for one in nodes_of(paths[0]).values() if one.type == NodeType.COLLECTIVE]
    assert [values(one)["comm_size"] for one in nodes] == [52, 103, 52, 103, 103, 103]
    assert [values(one).get("comm_type") for one in nodes] == [2, 7, 3, 6, 9, None]
    found = read_back(paths[0]).events.of_kind(Kind.COLLECTIVE)
    assert found.size_bytes.tolist() == [103] * 6
    assert found.name.tolist() == [
        "all_gather",
        "reduce_scatter",
        "gather",
        "all_to_all",
        "barrier",
        "mystery",
    ]


def test_groups_become_numbers_and_are_described_as_pytorch_does(tmp_path: Path) -> None:
    names = {"tensor 'a' [{": (0, 2), "7": (1, 2), "0": (0, 1), "world": (0, 1, 2)}
    rows = [span(Kind.STEP, 0, 10)] + [
        communication(Kind.COLLECTIVE, "all_reduce", at, 0.5, size_bytes=8, group=name)
        for at, name in enumerate(names)
    ]
    paths = written(tmp_path, rows, rows, rows, groups=names)
    described = next(iter(nodes_of(paths[0]).values()))
    assert described.type == NodeType.METADATA
    groups = {
        one["pg_desc"]: one for one in json.loads(described.inputs.values[2:-2])
    }  # as ASTRA-sim takes it apart
    assert {name: tuple(one["ranks"]) for name, one in groups.items()} == names
    numbers = {name: int(one["pg_name"]) for name, one in groups.items()}
    assert len(set(numbers.values())) == 4
    assert numbers["7"] == 7
    assert 0 not in numbers.values()  # which stands for all ranks
    found = read_back(paths[0])
    assert found.events.of_kind(Kind.COLLECTIVE).group.tolist() == list(names)
    assert found.groups == names


def test_a_wait_for_nothing_that_is_known_takes_its_time(tmp_path: Path) -> None:
    rows = [
        span(Kind.STEP, 0, 20), span(Kind.FORWARD, 0, 2), span(Kind.WAIT, 2, 3, "barrier"), span(Kind.BACKWARD, 5, 4),
        span(Kind.WAIT, 9, 6, "gradients"), span(Kind.OPTIMIZER, 15, 5),
        communication(Kind.COLLECTIVE, "all_reduce", 8, 5, asked_ms=7, size_bytes=8, group="0"),
    ]  # fmt: skip
    (path, _) = written(tmp_path, rows, rows)
    computed = [one for one in nodes_of(path).values() if one.type == NodeType.COMP]
    assert [(one.name.removeprefix("COMP_NODE_"), one.duration_micros) for one in computed] == [
        ("forward", 2000), ("rest_barrier", 3000), ("backward", 2000), ("backward", 2000), ("rest_gradients", 2000),
        ("optimizer", 5000),
    ]  # fmt: skip
    events = read_back(path).events
    assert events.of_kind(Kind.WAIT).duration_ns.tolist() == [4 * MS]
    assert events.of_kind(Kind.STEP).duration_ns.tolist() == [20 * MS]


def test_one_blocking_collective_after_another_depend_on_each_other(tmp_path: Path) -> None:
    rows = [
        span(Kind.STEP, 0, 10), span(Kind.FORWARD, 0, 2), span(Kind.WAIT, 2, 3), span(Kind.WAIT, 5, 3),
        span(Kind.OPTIMIZER, 8, 2),
        communication(Kind.COLLECTIVE, "all_reduce", 2, 3, size_bytes=8, group="a"),
        communication(Kind.COLLECTIVE, "all_reduce", 5, 3, size_bytes=8, group="b"),
    ]  # fmt: skip
    (path, _) = written(tmp_path, rows, rows)
    nodes = nodes_of(path)
    first, second = (number for number, one in nodes.items() if one.type == NodeType.COLLECTIVE)
    assert first in nodes[second].data_deps
    assert second in next(one for one in nodes.values() if "optimizer" in one.name).data_deps


# What cannot be written --------------------------------------------------------------------------------------


def test_parameter_servers_are_refused(tmp_path: Path) -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=1))
    with pytest.raises(TraceError, match="Chakra cannot represent parameter servers"):
        write_chakra(replace(trace, servers={0: trace.events[0]}), tmp_path / "out")
    rows = [span(Kind.STEP, 0, 10), span(Kind.PUSH, 1, 2, "weight")]
    with pytest.raises(TraceError, match="Chakra cannot represent parameter servers"):
        written(tmp_path, rows)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_is_left_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    with pytest.raises(TraceError, match="already exists"):
        write_chakra(trace, tmp_path / "full")
    broken = replace(trace, events={0: trace.events[0]})
    with pytest.raises(KeyError):
        write_chakra(broken, tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    trace = synthetic_trace(SyntheticJob(world_size=1, steps=1))
    with pytest.raises(TraceError, match="no complete step"):
        write_chakra(
            replace(trace, manifest=trace.manifest.model_copy(update={"steps": ()})), tmp_path / "out"
        )
