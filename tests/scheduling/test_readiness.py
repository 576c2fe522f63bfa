from __future__ import annotations

from tests.models import layered_model

from headway.scheduling.buckets import BucketReadiness, BucketSchedule, make_buckets, whole_parameter


def test_a_full_bucket_waits_for_those_before_it() -> None:
    model = layered_model(2)
    groups = [["layer1.bias", "layer1.weight"], ["layer0.bias"], ["layer0.weight"]]
    buckets = make_buckets(
        [[whole_parameter(model.by_name[name]) for name in group] for group in groups], model
    )
    filling = BucketReadiness(BucketSchedule(buckets))
    launched = [
        list(filling.ready(n)) for n in ("layer0.bias", "layer1.weight", "layer1.bias", "layer0.weight")
    ]
    assert launched == [[], [], [0, 1], [2]]
    assert filling.complete
    filling.restart()
    assert not filling.complete
