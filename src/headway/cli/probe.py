"""``headway probe``: measure latency and rate of the links of a job, from inside its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headway.cli import output
from headway.errors import LaunchError
from headway.units import format_rate


@click.command()
@click.option("-o", "--output", "cluster_path", type=click.Path(path_type=Path), default=Path("cluster.yaml"),
              show_default=True, help="The cluster file to write.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def probe(cluster_path: Path, as_json: bool) -> None:
    """Measure the links between the ranks of a job, started in each of them.

    torchrun --nproc-per-node 2 --no-python headway probe -o cluster.yaml
    """
    if "RANK" not in os.environ:
        raise LaunchError(
            "headway probe must run in every rank of a job", got="no RANK in the environment",
            fix="Run it as: torchrun --nproc-per-node N --no-python headway probe -o cluster.yaml.",
        )  # fmt: skip
    import torch.distributed as dist

    from headway import torch_private
    from headway.network.probe import probe_cluster

    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    words = output.error_console()
    cluster = probe_cluster((lambda what: words.print(f"probing {what}")) if first else lambda _what: None)
    dist.barrier()
    torch_private.let_gloo_finish()
    dist.destroy_process_group()
    if not first:
        return
    cluster.save(cluster_path)
    if as_json:
        output.print_document("cluster", cluster.model_dump(mode="json"))
        return
    slowest = min(min(host.up_gbps, host.down_gbps) for host in cluster.hosts)
    output.console().print(
        f"{len(cluster.hosts)} hosts, slowest link {format_rate(slowest)}, latency {cluster.latency_us:.0f} us; "
        f"written to {cluster_path}."
    )
