from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import LabError
from headway.lab import slow
from headway.lab.spec import LabSpec, parse_event, parse_spec

SLOW = {0: 0.5, 1: 1.0}
PARENT = slow.Parent(Path("/groups"), 2, is_own=False)


@pytest.fixture(params=[True, False])
def permitted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def find_parent() -> slow.Parent:
        if request.param:
            return PARENT
        raise slow.NotPermittedError("no groups")

    monkeypatch.setattr(slow, "find_parent", find_parent)
    return bool(request.param)


def test_auto_prefers_quotas_where_they_are_permitted(permitted: bool) -> None:
    quotas, why = slow.choose(LabSpec(slow=SLOW), "lab-1")
    expected = slow.Quotas.within(PARENT, "lab-1") if permitted else None
    assert (quotas, why) == (expected, "" if permitted else "no groups")
    assert ("(cgroup v2)" if permitted else "(no CPU quota: no groups)") in slow.announcement(quotas, why)


def test_a_quota_that_is_insisted_on_is_had_or_refused(permitted: bool) -> None:
    if permitted:
        assert slow.choose(LabSpec(slow=SLOW, slow_by="quota"), "lab-1")[0] is not None
        assert slow.choose(LabSpec(slow_by="quota"), "lab-1")[0] is None
        return
    with pytest.raises(LabError, match="not permitted here; got no groups"):
        slow.choose(LabSpec(slow_by="quota"), "lab-1")


@pytest.mark.usefixtures("permitted")
def test_quotas_are_not_made_for_nothing() -> None:
    assert slow.choose(LabSpec(slow={1: 1.0}), "lab-1") == (None, "")
    assert slow.choose(LabSpec(slow=SLOW, slow_by="signals"), "lab-1") == (None, "")
    tiny = LabSpec(slow={0: 1e-5})
    assert slow.choose(tiny, "lab-1")[0] is None


def test_later_shares_count() -> None:
    events = [parse_event("1s slow 1 0.25"), parse_event("2s slow 1 1")]
    assert parse_spec({"slow": SLOW, "timeline": events}).slow_shares == (0.5, 0.25)
