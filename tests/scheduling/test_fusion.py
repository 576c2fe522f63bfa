from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models import layered_model

from headway.errors import PlanError
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, joined, make_buckets, whole_parameter
from headway.scheduling.fusion import Groups, cut, fill, size_bytes

MIB = 2**20


@st.composite
def models(draw: st.DrawFn, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> ModelSpec:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 5000), st.sampled_from(dtypes), st.integers(0, 5)),
            min_size=1,
            max_size=25,
        )
    )
    parameters = tuple(
        ParameterSpec(name=f"p{i}", shape=(numel,), dtype=dtype, module=f"m{module}")
        for i, (numel, dtype, module) in enumerate(rows)
    )
    ready = draw(st.permutations([p.name for p in parameters]))
    return ModelSpec(parameters=parameters, ready_order=tuple(ready))


def ready_times(model: ModelSpec, gap_ns: int = 1000) -> dict[str, int]:
    return {p.name: (index + 1) * gap_ns for index, p in enumerate(model.ready_parameters())}


def partitioned(model: ModelSpec, cap_bytes: int, limit_bytes: int) -> Groups:
    return fill(cut(model.ready_parameters(), limit_bytes), model, cap_bytes)


def each_alone(model: ModelSpec) -> Groups:
    return [[whole_parameter(parameter)] for parameter in model.ready_parameters()]


def done_ns(
    groups: Groups, model: ModelSpec, ready_ns: dict[str, int], time_ns: Callable[[int], float]
) -> float:
    """When the last of ``groups`` is done, one collective after the other."""
    now_ns = ready = 0.0
    for group in groups:
        ready = max(ready, *(ready_ns[part.parameter] for part in group))
        now_ns = max(now_ns, ready) + time_ns(sum(size_bytes(part, model) for part in group))
    return now_ns


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8), gap_ns=st.sampled_from([0, 100, 5000]),
    alpha_ns=st.sampled_from([0.0, 500.0, 20_000.0]),
)  # fmt: skip
def test_no_other_groups_are_done_before_the_earliest(sizes: list[int], gap_ns: int, alpha_ns: float) -> None:
    parameters = tuple(
        ParameterSpec(name=f"p{i}", shape=(numel,), dtype="float32", module="m")
        for i, numel in enumerate(sizes)
    )
    model = ModelSpec(parameters=parameters, ready_order=tuple(f"p{i}" for i in range(len(sizes))))
    ready_ns = ready_times(model, gap_ns)

    def time_ns(size: int) -> float:
        return alpha_ns + 0.3 * size

    found_ns = done_ns(fusion.earliest(model, ready_ns, time_ns), model, ready_ns, time_ns)
    for count in range(len(sizes)):
        for cuts in itertools.combinations(range(1, len(sizes)), count):
            bounds = (0, *cuts, len(sizes))
            groups = [
                [whole_parameter(each) for each in parameters[a:b]] for a, b in itertools.pairwise(bounds)
            ]
            assert found_ns <= done_ns(groups, model, ready_ns, time_ns) + 1e-6


POLICIES: dict[str, Callable[[ModelSpec, int], Groups]] = {
    "fixed": fusion.fixed,
    "mg_wfbp": lambda model, cap: fusion.mg_wfbp(model, ready_times(model), cap / 4, 0.1),
    "earliest": lambda model, cap: fusion.earliest(
        model, ready_times(model), lambda size: cap / 4 + 0.1 * size
    ),
    "partitioned": lambda model, cap: partitioned(model, cap, cap // 3 + 1),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(model=models(), cap_bytes=st.integers(1, 50_000))
def test_every_element_is_held_once_and_no_group_mixes_dtypes(
    name: str, model: ModelSpec, cap_bytes: int
) -> None:
    groups = POLICIES[name](model, cap_bytes)
    held: dict[str, list[tuple[int, int]]] = {}
    for group in groups:
        assert group
        assert len({model.by_name[part.parameter].dtype for part in group}) == 1
        for part in group:
            held.setdefault(part.parameter, []).append((part.start, part.end))
    assert set(held) == set(model.by_name)
    for parameter, bounds in held.items():
        ends = [0, *(end for _, end in sorted(bounds))]
        assert [start for start, _ in sorted(bounds)] == ends[:-1]
        assert ends[-1] == model.by_name[parameter].numel
    assert sum(b.size_bytes for b in make_buckets(groups, model)) == model.size_bytes


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(model=models(("float32",)), cap_bytes=st.integers(1, 50_000))
def test_groups_keep_the_order_of_readiness(name: str, model: ModelSpec, cap_bytes: int) -> None:
    order = [part.parameter for group in POLICIES[name](model, cap_bytes) for part in group]
    assert list(dict.fromkeys(order)) == [p.name for p in model.ready_parameters()]


@settings(deadline=None)
@given(model=models(), cap_bytes=st.integers(1, 50_000))
def test_groups_go_in_the_order_of_their_last_gradient(model: ModelSpec, cap_bytes: int) -> None:
    position = {p.name: index for index, p in enumerate(model.ready_parameters())}
    groups = partitioned(model, cap_bytes, cap_bytes)
    last = [position[group[-1].parameter] for group in groups]
    assert last == sorted(last)
    for group in groups:
        assert sum(size_bytes(part, model) for part in group) <= max(cap_bytes, 4)
        neighbours = itertools.pairwise(group)
        assert all(a.parameter != b.parameter or a.end != b.start for a, b in neighbours)


def brute_force_mg_wfbp(model: ModelSpec, alpha: float, beta: float) -> Groups:
    """The paper's loop: from the first gradient on, merge into the next while that is worth an alpha; start again."""
    parameters, ready = list(model.ready_parameters()), ready_times(model)
    groups = [[p] for p in parameters]
    index = 0
    while index < len(groups) - 1:
        free = 0.0
        for group in groups[: index + 1]:
            begin = max(free, ready[group[-1].name])
            free = begin + alpha + beta * sum(p.size_bytes for p in group)
        if ready[groups[index + 1][0].name] < begin + alpha:
            groups[index : index + 2] = [groups[index] + groups[index + 1]]
        else:
            index += 1
    return [[whole_parameter(p) for p in group] for group in groups]


@settings(deadline=None)
@given(model=models(("float32",)), alpha=st.floats(0, 20_000), beta=st.floats(0, 2))
def test_gradients_merge_where_waiting_costs_less_than_another_alpha(
    model: ModelSpec, alpha: float, beta: float
) -> None:
    found = fusion.mg_wfbp(model, ready_times(model), alpha, beta)
    assert found == brute_force_mg_wfbp(model, alpha, beta)


def test_merging_ends_in_single_gradients_or_in_one_group() -> None:
    model = layered_model(4)
    assert fusion.mg_wfbp(model, ready_times(model), 0.0, 1e-9) == each_alone(model)
    assert len(fusion.mg_wfbp(model, ready_times(model), 1e9, 1.0)) == 1


def test_large_tensors_are_cut_into_equal_parts() -> None:
    model = layered_model(1)
    parts = cut(model.ready_parameters(), 1300)
    assert [(p.parameter, p.start, p.end) for p in parts] == [
        ("layer0.bias", 0, 10), ("layer0.weight", 0, 250), ("layer0.weight", 250, 500),
        ("layer0.weight", 500, 750), ("layer0.weight", 750, 1000),
    ]  # fmt: skip


def test_a_cap_may_depend_on_where_a_group_begins() -> None:
    model = layered_model(1)
    parts = cut(model.ready_parameters(), 400)
    groups = fill(parts, model, lambda begun: 440 + begun)
    sizes = [sum(size_bytes(part, model) for part in group) for group in groups]
    assert sizes == [440, 800, 1600, 1200]


@settings(deadline=None)
@given(model=models(), cap_bytes=st.integers(1, 50_000))
def test_cut_parameters_draw_no_others_into_their_unit(model: ModelSpec, cap_bytes: int) -> None:
    groups = partitioned(model, cap_bytes, max(1, cap_bytes // 2))
    units = BucketSchedule(make_buckets(groups, model)).units
    assert sorted(index for unit in units for index in unit) == list(range(len(groups)))
    for unit in units:
        cut_names = {
            part.parameter
            for index in unit
            for part in groups[index]
            if part != whole_parameter(model.by_name[part.parameter])
        }
        assert len(cut_names) == (len(unit) > 1)


def test_buckets_are_joined_through_others() -> None:
    assert joined([["a", "b"], ["c"], ["d", "e"], ["b", "d"], [], ["c"]]) == ((0, 2, 3), (1, 5), (4,))


def test_merged_gradients_become_buckets_of_stock_ddp() -> None:
    from headway.strategies.ddp.policy import DistributedDataParallelStrategy

    model = layered_model(6)
    ready = {p.name: index // 2 * 5000 + index for index, p in enumerate(model.ready_parameters())}
    groups = fusion.mg_wfbp(model, ready, 1500.0, 0.1)
    assert 1 < len(groups) < 12
    strategy = DistributedDataParallelStrategy(bucket_caps_mb=fusion.bucket_caps_mb(groups, model))
    assert [list(bucket.parts) for bucket in strategy.decide(Job.of(model)).buckets] == groups
    assert f"{len(groups)}" in strategy.describe()


def test_what_stock_ddp_cannot_do_is_refused() -> None:
    model = layered_model(2)
    with pytest.raises(PlanError, match="stock DDP"):
        fusion.bucket_caps_mb(partitioned(model, 1000, 1000), model)
    with pytest.raises(PlanError, match="stock DDP"):
        fusion.bucket_caps_mb(each_alone(model)[::-1], model)
    other = ParameterSpec(name="x", shape=(3,), dtype="float64", module="x")
    mixed = ModelSpec(parameters=(*model.parameters, other))
    with pytest.raises(PlanError, match="per dtype"):
        fusion.bucket_caps_mb(each_alone(mixed), mixed)
