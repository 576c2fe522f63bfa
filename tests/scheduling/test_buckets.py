from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.models import layered_model

from headway.model import ModelSpec, ParameterSpec
from headway.scheduling.buckets import forward_gather_order, group_by_size, make_buckets, whole_parameter

specs = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from(["float32", "float64"])), min_size=1, max_size=30
).map(
    lambda rows: [
        ParameterSpec(name=f"p{i}", shape=(numel,), dtype=dtype, module=f"m{i}")
        for i, (numel, dtype) in enumerate(rows)
    ]
)


@given(parameters=specs, cap_bytes=st.integers(1, 50_000))
def test_groups_keep_order_hold_everything_once_and_mix_no_dtypes(
    parameters: list[ParameterSpec], cap_bytes: int
) -> None:
    groups = group_by_size(parameters, cap_bytes)
    assert [p for group in groups for p in group] == parameters
    for group in groups:
        assert len({p.dtype for p in group}) == 1
        assert len(group) == 1 or sum(p.size_bytes for p in group) <= cap_bytes


def test_gathers_follow_the_first_use_in_forward() -> None:
    model = layered_model(3)
    groups = [
        ["layer2.weight", "layer0.bias"],
        ["layer1.weight", "layer1.bias"],
        ["layer2.bias"],
        ["layer0.weight"],
    ]
    buckets = make_buckets(
        [[whole_parameter(model.by_name[name]) for name in group] for group in groups], model
    )
    assert forward_gather_order(model, buckets) == (3, 0, 1, 2)


def test_orders_fall_back_to_registration_where_nothing_was_recorded() -> None:
    model = ModelSpec(parameters=layered_model(2).parameters)
    assert [p.name for p in model.forward_parameters()] == [p.name for p in model.parameters]
    assert [p.name for p in model.ready_parameters()] == [p.name for p in reversed(model.parameters)]
