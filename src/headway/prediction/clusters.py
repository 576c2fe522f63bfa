"""Loads clusters by name or by path."""

from __future__ import annotations

from importlib.resources import files as resources
from pathlib import Path

from headway import files
from headway.cluster import Cluster
from headway.errors import ClusterError, did_you_mean


def shipped() -> list[str]:
    """The names of the bundled cluster files."""
    return sorted(
        Path(entry.name).stem
        for entry in resources("headway.clusters").iterdir()
        if entry.name.endswith(".yaml")
    )


def cluster_named(text: str) -> Cluster:
    """Load the bundled cluster named ``text``, or the file at that path. Raises ClusterError."""
    if text in shipped():
        document = resources("headway.clusters").joinpath(f"{text}.yaml").read_text(encoding="utf-8")
        return files.parse_yaml(document, Cluster, ClusterError, f"cluster {text}")
    if not Path(text).suffix and not Path(text).exists():
        raise ClusterError(
            "unknown cluster",
            got=repr(text),
            expected=f"a file, or one of {', '.join(shipped())}",
            fix=did_you_mean(text, shipped()),
        )
    return Cluster.load(text)
