"""How much memory a process is said to have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.integrations import pipeline_injection
from headway.integrations.pipeline_injection import memory_bytes


@pytest.mark.parametrize(("limit", "is_limit"), [("max", False), (str(2**20), True), (str(2**60), False)])
def test_of_a_host_its_own_or_what_its_control_group_permits(
    limit: str, is_limit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_injection, "_GROUP_LIMIT", tmp_path / "limit")
    whole = memory_bytes(torch.device("cpu"))
    assert whole is not None
    assert whole > 2**28
    (tmp_path / "limit").write_text(f"{limit}\n")
    assert memory_bytes(torch.device("cpu")) == (2**20 if is_limit else whole)
