from __future__ import annotations

import pytest

from headway.cluster import DEFERRED_UPDATE, STEP_CALL, AlgorithmCost, Cluster, Host
from headway.errors import UserError
from headway.replay.what_if import WhatIf


def test_what_ifs_compose() -> None:
    what_if = WhatIf.parse(["bandwidth=2x", "compute=0.5x", "workers=8", "bandwidth=3x"])
    assert what_if == WhatIf(bandwidth=6, compute=0.5, workers=8)
    assert "8 workers" in what_if.describe()
    assert WhatIf.parse([]).describe() == ""


@pytest.mark.parametrize(
    "text", ["bandwidth", "bandwidth=", "bandwidth=0x", "bandwidth=-2x", "workers=0", "workers=2.5", "workers=99999",
             "magic=2x", "", "compute=nan", "latency=1e20x", "bandwidth=1e-200x"],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_on_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        WhatIf.parse([text])
    assert "\n" not in str(caught.value)


def test_quicker_hosts_spend_less_on_optimizers_calls() -> None:
    hosts = (Host(name="a", workers=2, up_gbps=1, down_gbps=1),)
    costs = {name: AlgorithmCost(overhead_us=100) for name in (DEFERRED_UPDATE, STEP_CALL, "ring")}
    changed = WhatIf(compute=0.5).apply(Cluster(hosts=hosts, algorithms=costs))
    assert [changed.cost_of(name).overhead_us for name in costs] == [50, 50, 100]
