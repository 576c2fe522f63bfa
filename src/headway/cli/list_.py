"""``headway list``: list models, devices, clusters, strategies and so on by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from headway.cli.output import console, print_document

if TYPE_CHECKING:
    from headway.cluster import Cluster
    from headway.models.table import LayerTable

Row = dict[str, str]


def _models() -> list[Row]:
    from headway.models.catalogue import MODELS

    return [{"name": name, "what": _describe_model(make())} for name, make in MODELS.items()]


def _describe_model(table: LayerTable) -> str:
    layers = f"{len(table.layers)} layers with parameters"
    return f"{table.spec.size_bytes / 4e6:.1f} million parameters, {layers}; batch: {table.batch}"


def _devices() -> list[Row]:
    from headway.models.roofline import DEVICES

    here = {"name": "here", "what": "this machine, timed; for models that are functions of modules"}
    rows = [
        {"name": name, "what": f"{sheet.name}; {', '.join(sheet.flops_per_s)}"}
        for name, sheet in DEVICES.items()
    ]
    return [*rows, here]


def _clusters() -> list[Row]:
    from headway.prediction.clusters import cluster_named, shipped

    return [{"name": name, "what": _describe_cluster(cluster_named(name))} for name in shipped()]


def _describe_cluster(cluster: Cluster) -> str:
    from headway.units import counted, format_rate

    workers = sum(host.workers for host in cluster.hosts)
    rate = format_rate(min(host.up_gbps for host in cluster.hosts))
    source = cluster.source.partition(". ")[0]
    return (
        f"{counted(workers, 'worker')} on {counted(len(cluster.hosts), 'host')}, {rate} out of each: {source}"
    )


def _strategies() -> list[Row]:
    from headway.strategies.registry import GROUP, plugins

    return _classes(GROUP, {name: plugin.policy for name, plugin in plugins().items()})


def _passes() -> list[Row]:
    from headway.passes.registry import GROUP, passes

    return _classes(GROUP, passes())


def _codecs() -> list[Row]:
    from headway.compression.registry import GROUP, codecs

    return _classes(GROUP, codecs())


def _readers() -> list[Row]:
    from headway.interop.readers.formats import GROUP, readers

    packages = _packages(GROUP)
    return [
        {"name": name, "what": reader.title + packages.get(name, "")} for name, reader in readers().items()
    ]


def _classes(group: str, classes: dict[str, type]) -> list[Row]:
    """Rows for classes by name: the first sentence of the docstring, and the package if it is not Headway."""
    packages = _packages(group)
    return [
        {"name": name, "what": _first_sentence(kind) + packages.get(name, "")}
        for name, kind in classes.items()
    ]


def _packages(group: str) -> dict[str, str]:
    """What to add to the names that other packages bring, once the plug-ins of the group are loaded."""
    from headway.plugins import loaded_plugins

    return {
        plugin.name: f" (package {plugin.package})" for plugin in loaded_plugins() if plugin.group == group
    }


def _first_sentence(kind: type) -> str:
    text = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.replace("``", "").split()).removesuffix(".")


def _plugins() -> list[Row]:
    from headway.plugins import loaded_plugins

    for load in (_strategies, _passes, _codecs, _readers):
        load()
    return [
        {
            "name": plugin.name,
            "what": f"{plugin.group} of the package {plugin.package}, {plugin.value}",
            "state": plugin.why_not or "in use",
        }
        for plugin in loaded_plugins()
    ]


KINDS: dict[str, tuple[str, Callable[[], Iterable[Row]]]] = {
    "models": ("models that ship, for headway predict MODEL", _models),
    "devices": ("for headway predict --device", _devices),
    "clusters": ("cluster files that ship, for --cluster", _clusters),
    "strategies": ("for --strategy and parallel: in plan files", _strategies),
    "passes": ("changes to the computation, for passes: in plan files", _passes),
    "codecs": ("how gradients are compressed, for wire: in plan files", _codecs),
    "readers": ("formats of other tools' traces, for headway import", _readers),
    "plugins": ("plug-ins of installed packages, and why any is not used", _plugins),
}


@click.command("list", epilog="\b\n" + "\n".join(f"{kind}: {what}" for kind, (what, _) in KINDS.items()))
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(kind: str, as_json: bool) -> None:
    """List everything of a KIND, by the names that options and plan files use."""
    from rich.table import Table

    rows = list(KINDS[kind][1]())
    if as_json:
        print_document("list", {"of": kind, "rows": rows})
        return
    if not rows:
        click.echo(f"There are no {kind}.", err=True)
        return
    table = Table(*rows[0], box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row.values())
    console().print(table)
