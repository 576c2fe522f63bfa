"""Begins of loops with passes: a recording of an unmodified script, and links on which only computation counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.commands import headway, torchrun

from headway.compression.registry import proposed

# Of links that take no time and codecs that take much, for no bucket or codec to gain by them.
CLUSTER = {
    "format": 1,
    "hosts": [{"name": "a", "workers": 2, "up_gbps": 10, "down_gbps": 10}],
    "local_gbps": 1000,
    "local_latency_us": 1,
    "codecs": {each.cost_name: {"bucket_us": [1e5] * 4, "mib_us": [1e5] * 4} for each in proposed()},
}


def fast_cluster(folder: Path) -> Path:
    """The file of a cluster of two ranks with such links."""
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    return path


def recorded(out: Path, *script: Any) -> None:
    """Record five steps of a script on two ranks, into ``out``."""
    recording = headway("record", "-o", out, "--steps", "3:8", "--", *torchrun(*script))
    assert recording.returncode == 0, recording.stderr
