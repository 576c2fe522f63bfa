"""What computing a codec takes on a cluster: as it was measured there, or its stated default."""

from __future__ import annotations

from headway.cluster import Cluster
from headway.collectives.algorithms import NCCL
from headway.compression.codec import Codec
from headway.plugins import asking

MIB = 2**20
DEVICE_FACTOR = 250.0
"""By how much a device whose library is NCCL is taken to compute faster than a core: 1 TB/s instead of 4 GB/s."""


def stretches_ns(codec: Codec, cluster: Cluster, size_bytes: int, exchanges: int) -> list[int]:
    """What a bucket of ``size_bytes`` takes to compute: before each of its exchanges, and behind the last one."""
    cost = cluster.codecs.get(codec.cost_name)
    if cost is None:
        factor = 1.0 if cluster.library != NCCL else 1 / DEVICE_FACTOR
        with asking("codec", codec):
            each_us = [us * factor for us in codec.default_us(size_bytes, cluster.world_size)]
    else:
        pairs = zip(cost.bucket_us, cost.mib_us, strict=True)
        each_us = [bucket_us + mib_us * size_bytes / MIB for bucket_us, mib_us in pairs]
    return [round(us * 1e3) for us in (*each_us[:-1][:exchanges], each_us[-1])]


def slowdown_of(codec: Codec, cluster: Cluster) -> float:
    """How much longer training's computation takes while that is computed; 1 where both have half of the cores.

    Where it was not measured: 1 on cores that communication slows down too, and nothing elsewhere.
    """
    cost = cluster.codecs.get(codec.cost_name)
    if cost is not None:
        return cost.slowdown
    return 1.0 if cluster.compute_slowdown else 0.0
