"""Clusters by name: the files that ship, or one's own."""

from __future__ import annotations

from importlib.resources import files as resources
from pathlib import Path

from headway import files
from headway.cluster import Cluster
from headway.errors import ClusterError, did_you_mean


def shipped() -> list[str]:
    """The names of the cluster files that ship."""
    return sorted(
        Path(each.name).stem
        for each in resources("headway.clusters").iterdir()
        if each.name.endswith(".yaml")
    )


def cluster_named(text: str) -> Cluster:
    """The cluster file at the path ``text``, or the one that ships under that name. Raises ClusterError."""
    if text in shipped():
        document = resources("headway.clusters").joinpath(f"{text}.yaml").read_text(encoding="utf-8")
        return files.parse_yaml(document, Cluster, ClusterError, f"cluster {text}")
    if not Path(text).suffix and not Path(text).exists():
        raise ClusterError(
            "there is no such cluster",
            got=repr(text),
            expected=f"a file, or one of {', '.join(shipped())}",
            fix=did_you_mean(text, shipped()),
        )
    return Cluster.load(text)
