"""``headway coordinate``: serve the coordinator of a job whose workers average in groups."""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.errors import PlanError
from headway.strategies.partial_all_reduce.generators.rules import names

if TYPE_CHECKING:
    from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

DEFAULT_LISTEN = "127.0.0.1:29650"
MOST_DESCRIPTORS = 65_536


@click.command()
@click.option("--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, show_default=True,
              help="Address to listen on; port 0 picks a free port.")  # fmt: skip
@click.option("--secret-file", type=click.Path(path_type=Path, dir_okay=False),
              help="File with the secret that workers must know; required unless listening on loopback.")  # fmt: skip
@click.option("--new-secret", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a new secret to this file and exit.")  # fmt: skip
@click.option("--journal", type=click.Path(path_type=Path, dir_okay=False),
              help="Save state to this file and resume from it after a crash.")  # fmt: skip
@click.option("--lease", metavar="TIME", default="10s", show_default=True,
              help="How long a worker may be silent before it is considered dead.")  # fmt: skip
@click.option("--generator", metavar="NAME[:OPTION=VALUE,…]", default="first-come", show_default=True,
              help=f"How groups are formed: {', '.join(names())}.")  # fmt: skip
@click.option("--plan", type=click.Path(path_type=Path, dir_okay=False),
              help="Take generator, options and seed from this partial all-reduce plan.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True,
              help="Seed of random groups.")  # fmt: skip
@click.option(
    "--metrics", metavar="[HOST:]PORT", help="Serve Prometheus metrics there; on loopback by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as one line of JSON.")
@click.option("--with-parent", is_flag=True, hidden=True, help="Exit when standard input closes.")
def coordinate(
    listen: str,
    secret_file: Path | None,
    new_secret: Path | None,
    journal: Path | None,
    lease: str,
    generator: str,
    plan: Path | None,
    seed: int,
    metrics: str | None,
    as_json: bool,
    with_parent: bool,
) -> None:
    """Coordinate a job whose workers average in groups, until SIGTERM or SIGINT.

    headway coordinate --listen 10.0.0.1:29650 --secret-file secret --journal job.journal

    Prints the address on stdout, then logs workers that join and leave on stderr. After a crash, start it again with
    the same options: workers train alone meanwhile and reconnect by themselves.
    """
    from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice, ServiceOptions
    from headway.strategies.partial_all_reduce.coordinator.prometheus import (
        MetricsPort,
        Narrating,
        NarratingWithMetrics,
    )
    from headway.strategies.partial_all_reduce.coordinator.security import read_secret, write_secret
    from headway.strategies.partial_all_reduce.coordinator.server import serve
    from headway.units import parse_duration_s

    if new_secret:
        write_secret(new_secret)
        click.echo(f"secret written to {new_secret}")
        return
    choice = _planned(plan) if plan else GeneratorChoice.parse(generator, seed)
    options = ServiceOptions(
        lease_s=parse_duration_s(lease, "lease"),
        journal=journal,
        secret=read_secret(secret_file) if secret_file else None,
    )
    observer: Narrating
    port = None
    if metrics:
        observer = with_metrics = NarratingWithMetrics(_say)
        port = MetricsPort(with_metrics, *_metrics_address(metrics))
    else:
        observer = Narrating(_say)

    def ready(address: str) -> None:
        if as_json:
            document = files.document(
                "coordinator", address=address, metrics_port=port.port if port else None
            )
            text = json.dumps(document)
        else:
            text = f"coordinator at {address}" + (f", metrics on port {port.port}" if port else "")
        print(text, flush=True, file=sys.stdout)

    _raise_descriptor_limit()
    try:
        serve(listen, choice, options, observer, ready, until_input_ends=with_parent)
    finally:
        if port:
            port.close()


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files, since each connection takes a descriptor and the default is about 1000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say(line: str) -> None:
    with suppress(OSError):  # stderr may be closed: the job continues
        click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


def _planned(path: Path) -> GeneratorChoice:
    from headway.plan import Plan
    from headway.strategies.partial_all_reduce.meeting import choice_of
    from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

    strategy = Plan.load(path).strategy
    if not isinstance(strategy, PartialAllReduceStrategy) or strategy.is_static:
        raise PlanError(
            "the plan does not need a coordinator", got=strategy.describe(),
            expected="partial all-reduce with groups other than static",
            fix="Remove --plan, or run without a coordinator.",
        )  # fmt: skip
    return choice_of(strategy)


def _metrics_address(text: str) -> tuple[str, int]:
    from headway.strategies.partial_all_reduce.coordinator.transport import parse_address

    return parse_address(text if ":" in text else f"127.0.0.1:{text}", "the metrics address")
