"""``headway probe``: measure latency and rate of a job's links, from inside its ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from headway.cli import output
from headway.errors import CommunicationError, HeadwayError, LaunchError
from headway.units import format_rate

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "Run it as: torchrun --nproc-per-node N --no-python headway probe -o cluster.yaml."


@click.command()
@click.option("-o", "--output", "cluster_path", type=click.Path(path_type=Path), default=Path("cluster.yaml"),
              show_default=True, help="The cluster file to write.")  # fmt: skip
@click.option("--idle-cores", is_flag=True,
              help="Measure with idle cores: for jobs that compute on accelerators.")  # fmt: skip
@click.option("--nccl-tests", "logs", multiple=True, metavar="LOG", type=click.Path(path_type=Path),
              help="Do not measure: fit the cluster to a log of nccl-tests or rccl-tests; may be repeated.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def probe(cluster_path: Path, idle_cores: bool, logs: tuple[Path, ...], as_json: bool) -> None:
    """Measure the links between the ranks of a job. Start it in every rank.

    torchrun --nproc-per-node 2 --no-python headway probe -o cluster.yaml
    """
    if logs:
        _fit_logs(logs, cluster_path, as_json)
        return
    _check_environment()
    import torch
    import torch.distributed as dist

    from headway import torch_private
    from headway.measuring.probe import probe_cluster

    words = output.error_console()
    try:
        dist.init_process_group("gloo")
        first = dist.get_rank() == 0
        problem = _why_unwritable(cluster_path) if first else None
        refused = torch.tensor([problem is not None])
        dist.broadcast(refused, 0)
        if refused.item():
            raise LaunchError(
                f"{cluster_path} cannot be written", got=problem or "a failure on rank 0",
                fix="Choose another with -o.",
            )  # fmt: skip
        cluster = probe_cluster(
            (lambda what: words.print(f"probing {what}")) if first else lambda _what: None,
            busy_cores=not idle_cores,
        )
        dist.barrier()
        torch_private.let_gloo_finish()
        dist.destroy_process_group()
    except HeadwayError:
        raise
    except ValueError as failure:
        raise LaunchError(
            "the job's environment cannot be read", got=failure, expected="what torchrun sets", fix=TORCHRUN
        ) from None
    except RuntimeError as failure:  # every failure of torch.distributed
        raise CommunicationError(
            f"the probe was aborted: {' '.join(str(failure).split())[:200]}. A peer ended, fell silent or could not "
            "be reached: its own output says why. Start all ranks again."
        ) from None
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


def _fit_logs(logs: tuple[Path, ...], cluster_path: Path, as_json: bool) -> None:
    from headway import files
    from headway.errors import UserError
    from headway.network.nccl_tests import MAX_LOG_BYTES, cluster_of, slow_hosts

    texts = []
    for path in logs:
        if path.is_file() and path.stat().st_size > MAX_LOG_BYTES:
            raise UserError(
                f"{path} is too large for a log",
                got=path.stat().st_size,
                expected=f"at most {MAX_LOG_BYTES} bytes",
            )
        texts.append((str(path), files.read_text(path, UserError, "log")))
    slow = slow_hosts(text for _, text in texts)
    words = output.error_console()
    for name, share in slow.items():
        words.print(
            f"Host {name} reaches {share:.0%} of the usual bandwidth: check its network cards and cables."
        )
    with output.progress("fitting the logs"):
        cluster, accuracy = cluster_of(texts)
    cluster.save(cluster_path)
    if as_json:
        output.print_document("cluster", {**cluster.model_dump(mode="json"), "slow_hosts": slow})
        return
    host = cluster.hosts[0]
    rate = format_rate(host.up_gbps)
    output.console().print(
        f"{len(cluster.hosts)} hosts of {host.workers} workers, {rate} between hosts; {accuracy}; "
        f"written to {cluster_path}."
    )


def _check_environment() -> None:
    """Raise LaunchError unless the environment is that of a rank."""
    missing = [name for name in ENVIRONMENT if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            "headway probe must run in every rank of a job", got=f"no {', '.join(missing)} in the environment",
            fix=TORCHRUN,
        )  # fmt: skip


def _why_unwritable(path: Path) -> str | None:
    """The reason why ``path`` cannot be written, or None."""
    if path.is_dir():
        return "a folder"
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as failure:
        return failure.strerror
