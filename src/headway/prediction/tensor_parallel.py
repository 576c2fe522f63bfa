"""Tensor parallelism within hosts, for predictions: groups of workers that share every layer, as one worker each.

The workers of a group do the same at the same moment, so one of them stands for all (Megatron-LM, arXiv 1909.08053): it
has the T-th part of every layer, and trains on the batches of all T, so layers take as long as before. Behind attention
and behind the perceptron of each block the group adds up activations, once forward and once back. Between stages each
worker sends its part, as in arXiv 2104.04473, section 4.1.
"""

from __future__ import annotations

from dataclasses import replace

from headway.cluster import Cluster, Host
from headway.errors import UserError
from headway.model import ModelSpec
from headway.prediction.collective import collective_time
from headway.prediction.workload import Workload

ALL_REDUCES_A_PASS = 2  # of each block
DIVIDED = ("optimizer_state_bytes", "buffer_bytes", "frozen_bytes")  # among the workers of a group


def on_groups(cluster: Cluster, tensor: int) -> Cluster:
    """``cluster`` as one worker of each group of ``tensor`` has it, with its part of what the group shares.

    Raises UserError where hosts are not made of whole groups.
    """
    if tensor == 1:
        return cluster
    for host in cluster.hosts:
        if host.workers % tensor:
            raise UserError(
                "tensor parallelism is within hosts, whose workers do not make whole groups",
                got=f"{host.workers} workers on {host.name}", expected=f"a multiple of {tensor}",
                fix="Give pipeline:tensor=N with a divisor of the workers of every host.",
            )  # fmt: skip
    nccl = cluster.nccl
    if nccl is not None and nccl.cards:
        cards = max(1, nccl.cards // tensor)
        part = {"cards": cards, "cards_gb_s": nccl.cards_gb_s * nccl.cards / tensor / cards}
        nccl = nccl.model_copy(update=part)
    changed = {
        "hosts": tuple(_part_of(host, tensor) for host in cluster.hosts),
        "traffic": tuple(each.model_copy(update={"gbps": each.gbps / tensor}) for each in cluster.traffic),
        "burst_bytes": cluster.burst_bytes // tensor,
        "window_bytes": cluster.window_bytes // tensor,
        "nccl": nccl,
    }
    return cluster.model_copy(update=changed)


def _part_of(host: Host, tensor: int) -> Host:
    return host.model_copy(
        update={
            "workers": host.workers // tensor,
            "up_gbps": host.up_gbps / tensor,
            "down_gbps": host.down_gbps / tensor,
        }
    )


def with_all_reduces(
    workload: Workload, cluster: Cluster, tensor: int, share: float, slowness: float = 1.0
) -> Workload:
    """What one worker of a group computes for the batches of all, with all-reduces of activations as a part of layers.

    A micro-batch is ``share`` of a group's batch. A block ends where the model may be cut, and what it hands on is what
    is added up. The times are such that they are right if layers take ``slowness`` times as long in the end.
    """
    if tensor == 1:
        return workload
    group = cluster.model_copy(
        update={
            "hosts": (cluster.hosts[0].model_copy(update={"workers": tensor}),),
            "paths": (),
            "traffic": (),
        }
    )
    sizes = {layer.cut_bytes for layer in workload.layers if layer.cut_bytes}
    took_ns = {
        size: round(
            ALL_REDUCES_A_PASS
            * collective_time(group, "all-reduce", max(1, round(size * tensor * share))).time_us
            * 1e3
            / (share * slowness)
        )
        for size in sizes
    }
    spec = workload.spec
    parameters = tuple(
        parameter.model_copy(update={"shape": (-(-parameter.numel // tensor),)})
        for parameter in spec.parameters
    )
    fields = {name: getattr(spec, name) for name in ModelSpec.model_fields}
    fields |= {name: fields[name] // tensor for name in DIVIDED}
    return replace(
        workload,
        spec=ModelSpec(**{**fields, "parameters": parameters}),
        samples=workload.samples * tensor,
        layers=tuple(
            replace(
                layer,
                forward_ns=layer.forward_ns + took_ns.get(layer.cut_bytes, 0),
                backward_ns=layer.backward_ns + took_ns.get(layer.cut_bytes, 0),
            )
            for layer in workload.layers
        ),
        optimizer_ns=workload.optimizer_ns // tensor,
    )
