from __future__ import annotations

from typing import Any

import pytest
from tests.interop.settings.plans import BY_NAME, asked, meshed
from tests.models import layered_model

from headway.interop.settings.elements import one_size
from headway.interop.settings.request import Bucketed, SettingsRequest
from headway.strategies.ddp.policy import DistributedDataParallelStrategy


def sized(asked_for: SettingsRequest, *, closes_before: bool = False) -> tuple[int, str]:
    assert isinstance(asked_for.data, Bucketed)
    return one_size(asked_for, asked_for.data, closes_before=closes_before)


def test_one_cap_is_exact_in_the_models_own_type() -> None:
    assert sized(asked("ddp", bucket_cap_mb=1)) == (2**18, "")
    assert sized(asked("ddp", bucket_cap_mb=1, model=layered_model(dtype="bfloat16"))) == (2**19, "")
    assert sized(asked("ddp", bucket_caps_mb=[1, 1])) == (2**18, "")
    assert sized(asked("decoupled", bucket_cap_bytes=1), closes_before=True) == (1, "")


@pytest.mark.parametrize("closes_before", [False, True])
def test_where_the_tool_ends_buckets_otherwise_is_said(closes_before: bool) -> None:
    ddp, decoupled = (
        sized(each, closes_before=closes_before)[1]
        for each in (asked("ddp", bucket_cap_mb=1), asked("decoupled", bucket_cap_bytes=1))
    )
    assert bool(ddp) == closes_before
    assert bool(decoupled) != closes_before
    assert "bucket boundaries" in ddp + decoupled


@pytest.mark.parametrize("options", [{}, {"bucket_caps_mb": [0.001, 0.002]}])
def test_several_caps_become_the_mean_of_their_buckets(options: dict[str, Any]) -> None:
    size, lack = sized(asked("ddp", **options))
    assert size > 0
    assert f"all get {size:,}" in lack


def test_buckets_of_all_stages_count() -> None:
    stages = (layered_model(1), layered_model(3))
    size, lack = sized(meshed(DistributedDataParallelStrategy(), stages))
    assert (size, "1,010 to 3,030" in lack) == (2020, True)
    assert sized(asked("decoupled", buckets=BY_NAME))[0] == 1347
