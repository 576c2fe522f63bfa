"""Predicts tensor parallelism within hosts (Megatron-LM, arXiv 1909.08053).

The T workers of a group act in lockstep, so one of them stands for all. It holds 1/T of every layer and trains on the
batches of all T workers, so layers take as long as before. The group all-reduces activations after the attention and
after the MLP of each block, in forward and in backward. Between stages, each worker sends its part (arXiv 2104.04473,
section 4.1).
"""

from __future__ import annotations

from dataclasses import replace

from headway.cluster import Cluster, Host
from headway.errors import UserError
from headway.model import ModelSpec
from headway.prediction.collective import collective_time
from headway.prediction.workload import Workload

ALL_REDUCES_A_PASS = 2  # per block
DIVIDED = ("optimizer_state_bytes", "buffer_bytes", "frozen_bytes")  # divided among the workers of a group


def on_groups(cluster: Cluster, tensor: int) -> Cluster:
    """``cluster`` with one worker for each group of ``tensor`` workers, and that worker's share of the links.

    Raises UserError if the workers of a host do not divide into groups.
    """
    if tensor == 1:
        return cluster
    for host in cluster.hosts:
        if host.workers % tensor:
            raise UserError(
                "the workers of a host do not divide into tensor-parallel groups",
                got=f"{host.workers} workers on {host.name}", expected=f"a multiple of {tensor}",
                fix="Use pipeline:tensor=N with a divisor of the workers of every host.",
            )  # fmt: skip
    nccl = cluster.nccl
    if nccl is not None and nccl.cards:
        cards = max(1, nccl.cards // tensor)
        part = {"cards": cards, "cards_gb_s": nccl.cards_gb_s * nccl.cards / tensor / cards}
        nccl = nccl.model_copy(update=part)
    changed = {
        "hosts": tuple(_part_of(host, tensor) for host in cluster.hosts),
        "traffic": tuple(flow.model_copy(update={"gbps": flow.gbps / tensor}) for flow in cluster.traffic),
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
    """The workload of one worker of a group, for the group's batch, with activation all-reduces added to the layers.

    A micro-batch is ``share`` of a group's batch. A block ends where the model may be split, and its output is what is
    all-reduced. Times are divided by ``slowness``, by which the caller multiplies all layers later.
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
