"""Headway: see, predict and choose the communication of distributed training."""

from __future__ import annotations

from headway.cluster import Cluster
from headway.errors import HeadwayError
from headway.plan import Plan
from headway.trace.format import Trace, load_trace
from headway.version import __version__

__all__ = ["Cluster", "HeadwayError", "Plan", "Trace", "__version__", "load_trace"]
