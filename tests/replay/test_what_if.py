from __future__ import annotations

import pytest

from headway.errors import UserError
from headway.replay.what_if import WhatIf


def test_what_ifs_compose() -> None:
    what_if = WhatIf.parse(["bandwidth=2x", "compute=0.5x", "workers=8", "bandwidth=3x"])
    assert what_if == WhatIf(bandwidth=6, compute=0.5, workers=8)
    assert "8 workers" in what_if.describe()
    assert WhatIf.parse([]).describe() == ""


@pytest.mark.parametrize(
    "text", ["bandwidth", "bandwidth=", "bandwidth=0x", "bandwidth=-2x", "workers=0", "workers=2.5", "workers=99999",
             "magic=2x", "", "compute=nan"],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_on_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        WhatIf.parse([text])
    assert "\n" not in str(caught.value)
