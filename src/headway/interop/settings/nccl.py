"""Exports plans as choices of NCCL's and RCCL's algorithms: environment variables or a tuner table.

The variables choose by function, for every communicator of a process; the table by function, size and number of ranks.
An algorithm that the plan leaves to NCCL is only set if NCCL's cost model, fitted to the plan's cluster, predicts that
NCCL's own choice is slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

from headway.cluster import Cluster
from headway.collectives.algorithms import NATIVE
from headway.collectives.nccl import Algorithm, Choice, Kind, Protocol, choose, fabric_of, time_us, tuned
from headway.errors import UserError
from headway.interop.settings.request import SettingsRequest, unexpressed
from headway.interop.settings.tuner_table import ANY, ANY_SIZE, COLLECTIVES, TunerRule, table
from headway.simulator.expectation import collectives_error
from headway.strategies.base import DATA
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.registry import plugin_of
from headway.tool_settings import Settings

NCCL, RCCL = "NCCL", "RCCL"
FILE = "tuner.csv"
RING: Algorithm = "ring"
SIMPLE: Protocol = "simple"
PLUGIN = "libnccl-tuner-example.so"
PART = "carry out this plan's collectives"
OF_PROTOCOL = f"a rule must name a protocol; these use {SIMPLE} for all sizes"
# Safe to force: other algorithms are not available on every communicator, and LL128 corrupts data on some links.
_FORCED: tuple[tuple[Algorithm, Protocol], ...] = (
    ("ring", "ll"), ("ring", "simple"), ("tree", "ll"), ("tree", "simple"),
)  # fmt: skip
_KINDS: dict[str, Kind] = {
    "allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather",
}  # fmt: skip


class FasterChoice(NamedTuple):
    """A choice predicted to be ``gain`` times as fast as NCCL's own, over all buckets of a plan."""

    algorithm: Algorithm
    protocol: Protocol
    gain: float


def nccl(request: SettingsRequest) -> Settings:
    """NCCL_ALGO and NCCL_PROTO; with a number of channels, a table for NCCL's example tuner.

    That tuner uses one channel if no rule matches or a rule leaves channels open, so the table has a rule with channels
    for everything. If the plan leaves algorithms to the library, only those that NCCL's model predicts to be faster are
    set. Raises PlanError for plans without collectives, and UserError for appended rules that leave channels open.
    """
    chosen, faster = _chosen(request, NCCL), _faster(request)
    protocols: dict[str, str] = {function: choice.protocol for function, choice in faster.items()}
    chosen |= {function: choice.algorithm for function, choice in faster.items()}
    if not chosen:
        return _nothing_to_set(request, NCCL)
    predicted = tuple(
        f"{choice.algorithm} with {choice.protocol} is predicted to be {choice.gain:.2g} times as fast for the plan's "
        f"{function} as NCCL's own choice: measure both with nccl-tests before you keep it"
        for function, choice in faster.items()
    )
    if request.collectives.channels is not None:
        return _nccl_table(request, chosen, protocols, request.collectives.channels, predicted)
    environment = {"NCCL_ALGO": ";".join(f"{function}:{name}" for function, name in chosen.items())}
    if _replayed_as_rings(request):
        protocols = {function: protocols.get(function, SIMPLE) for function in chosen}
    if protocols:
        environment["NCCL_PROTO"] = ";".join(f"{function}:{name}" for function, name in protocols.items())
    return Settings(
        NCCL,
        _gist(chosen),
        "Export the variables on every host; NCCL 2.24 or newer reads them by function.",
        _left_out(request, chosen),
        (*predicted, "the variables apply to all sizes, and to every communicator of the process"),
        environment=environment,
        part=PART,
    )


def rccl(request: SettingsRequest) -> Settings:
    """A table for RCCL's built-in tuner, if the plan chooses an algorithm. Raises PlanError without collectives."""
    chosen = _chosen(request, RCCL)
    if not chosen:
        return _nothing_to_set(request, RCCL)
    appended = request.collectives.appended
    channels = ANY if request.collectives.channels is None else request.collectives.channels
    rules = (*_rules(request, chosen, channels), *appended)
    cautions = [OF_PROTOCOL]
    if not appended:
        cautions.append("this table replaces RCCL's own table for this GPU; keep its rules with --append")
    return Settings(
        RCCL,
        _gist(chosen),
        "Copy the file to every host and export the variable there; RCCL 2.28.3 or newer reads it without a plugin.",
        _left_out(request, chosen),
        tuple(cautions),
        {FILE: table(rules, _comments(RCCL, _gist(chosen)))},
        environment={"NCCL_TUNER_CONFIG_FILE": FILE},
        part=PART,
    )


def _nothing_to_set(request: SettingsRequest, library: str) -> Settings:
    """The settings for a plan that leaves all algorithms to the library, or has none that it supports."""
    cluster = request.plan.cluster
    why, more = "the plan leaves the choice of algorithms to the library", ""
    if cluster is not None and cluster.nccl is not None:
        more = " A replay of the plan's cluster uses NCCL's model, so --as-replayed fixes nothing."
        if library == NCCL and _sizes(request) and _is_whole(request, cluster):
            why = (
                "no algorithm is predicted to beat NCCL's own choice by more than the model's error, "
                f"{collectives_error(cluster):.0%}"
            )
        elif library == NCCL and not request.stages:
            more += " To check whether NCCL could choose better, pass --trace TRACE for the sizes of buckets."
    else:
        more = f" --as-replayed fixes {library} to rings, as in a replay; the library's own choice may be better."
    return Settings(
        library,
        f"nothing needs to be set, because {why}",
        f"Run the job without settings for {library}; export the plan's buckets with --for ddp and the like."
        + more,
        _left_out(request, {}),
        part=PART,
    )


def _faster(request: SettingsRequest) -> dict[str, FasterChoice]:
    """The faster choice for each function left to NCCL, if it gains more than the model's error on this cluster."""
    cluster, sizes = request.plan.cluster, _sizes(request)
    if cluster is None or cluster.nccl is None or not sizes or not _is_whole(request, cluster):
        return {}
    data = request.data
    functions = ["allreduce"]
    if isinstance(data, DecoupledStrategy):
        functions = [function for function, name in _halves(data).items() if name == NATIVE]
    compared = {function: _fastest(cluster, _KINDS[function], sizes) for function in functions}
    least = 1 + collectives_error(cluster)
    return {function: choice for function, choice in compared.items() if choice.gain > least}


def _is_whole(request: SettingsRequest, cluster: Cluster) -> bool:
    """Whether collectives span all workers, with equally many per host, as the model requires."""
    alike = len({host.workers for host in cluster.hosts}) == 1
    return alike and request.pipeline is None and 1 < request.replicas == cluster.world_size


def _fastest(cluster: Cluster, kind: Kind, sizes_bytes: Sequence[int]) -> FasterChoice:
    """The fastest choice that can be forced, for tensors of ``sizes_bytes`` over all workers, against NCCL's own."""
    hosts, a_host = len(cluster.hosts), cluster.hosts[0].workers
    ranks, fabric = hosts * a_host, fabric_of(cluster, range(hosts), a_host)

    def plain_us(algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
        latency_us, gb_s = tuned(kind, algorithm, protocol, ranks, hosts, fabric)
        return latency_us + size_bytes / (1e3 * gb_s)

    def expected_us(algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
        return cast("float", time_us(kind, algorithm, protocol, size_bytes, ranks, hosts, fabric))

    taken: list[Choice] = [choose(kind, size_bytes, ranks, hosts, fabric) for size_bytes in sizes_bytes]
    best = FasterChoice(RING, SIMPLE, 0.0)
    for algorithm, protocol in _FORCED:
        if tuned(kind, algorithm, protocol, ranks, hosts, fabric).gb_s <= 0:
            continue
        # NCCL corrects its times heuristically for some sizes: a choice must be faster with and without that.
        gain = min(
            sum(
                us(choice.algorithm, choice.protocol, size)
                for choice, size in zip(taken, sizes_bytes, strict=True)
            )
            / sum(us(algorithm, protocol, size) for size in sizes_bytes)
            for us in (plain_us, expected_us)
        )
        best = max(best, FasterChoice(algorithm, protocol, gain), key=lambda choice: choice.gain)
    return best


def _nccl_table(
    request: SettingsRequest,
    chosen: dict[str, str],
    protocols: Mapping[str, str],
    channels: int,
    predicted: tuple[str, ...],
) -> Settings:
    if any(rule.channels == ANY for rule in request.collectives.appended):
        raise UserError(
            "an appended rule leaves the number of channels open, so NCCL's tuner would use one", got=ANY,
            expected="a number in the sixth field",
        )  # fmt: skip
    remaining = tuple(TunerRule(name, 0, ANY_SIZE, RING, SIMPLE, channels) for name in COLLECTIVES)
    rules = (*_rules(request, chosen, channels, protocols), *request.collectives.appended, *remaining)
    gist = f"{_gist(chosen)}, {channels} channels"
    return Settings(
        NCCL,
        gist,
        f"Build {PLUGIN} from plugins/tuner/example of NCCL's source, copy the files to every host, and export the "
        "variables there. NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING shows which rule it applies.",
        _left_out(request, chosen),
        (
            *predicted,
            *(() if chosen.keys() == protocols.keys() else (OF_PROTOCOL,)),
            "without a matching rule the tuner uses one channel, so the last five rules set all other collectives to "
            f"rings with {channels}",
            "the example tuner overwrites some of NCCL's constants for Blackwell GPUs",
        ),
        {FILE: table(rules, _comments(NCCL, gist))},
        environment={"NCCL_TUNER_PLUGIN": PLUGIN, "NCCL_TUNER_CONFIG_FILE": FILE},
        part=PART,
    )


def _comments(library: str, gist: str) -> tuple[str, ...]:
    fields = "collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks"
    return f"Written by Headway for {library}: {gist}", fields


def _gist(chosen: dict[str, str]) -> str:
    return ", ".join(f"{name} for {function}" for function, name in chosen.items())


def _chosen(request: SettingsRequest, library: str) -> dict[str, str]:
    """The plan's algorithm for each function that it decides. Raises PlanError if it uses no collectives."""
    data = request.data
    choices: dict[str, str | None]
    if isinstance(data, DecoupledStrategy):
        choices = {
            f: RING if name == RING and not data.by_size else None for f, name in _halves(data).items()
        }
    elif data is not None and (functions := plugin_of(data).library_calls):
        choices = dict.fromkeys(functions)
    else:
        request.refuse(
            library,
            f"a strategy such as ddp or decoupled along {DATA}: others do not use collectives",
        )
    if _replayed_as_rings(request):
        choices = dict.fromkeys(choices, RING)
    return {function: name for function, name in choices.items() if name is not None}


def _replayed_as_rings(request: SettingsRequest) -> bool:
    """Whether to fix to rings what the plan leaves to the library; not if replays use NCCL's model."""
    cluster = request.plan.cluster
    return request.collectives.as_replayed and (cluster is None or cluster.nccl is None)


def _halves(data: DecoupledStrategy) -> dict[str, str]:
    """The algorithm of each half of the all-reduce, by function."""
    return {"reducescatter": data.reduce_scatter, "allgather": data.all_gather}


def _left_out(request: SettingsRequest, chosen: dict[str, str]) -> tuple[str, ...]:
    """The parts of the plan that ``chosen`` leaves out."""
    lacks = unexpressed(request)
    if isinstance(data := request.data, DecoupledStrategy):
        for function, name in _halves(data).items():
            if name not in (RING, NATIVE):
                instead = (
                    f"rings for {function}" if function in chosen else f"{function} is left to the library"
                )
                lacks.append(f"{name} collectives: {instead}")
        if data.by_size:
            lacks.append("other algorithms for smaller buckets: all use rings")
        if data.ring_order:
            lacks.append("the order of ranks in rings: the library chooses its own")
    return tuple(lacks)


def _rules(
    request: SettingsRequest,
    chosen: dict[str, str],
    channels: int,
    protocols: Mapping[str, str] = MappingProxyType({}),
) -> tuple[TunerRule, ...]:
    """A rule for each function, limited to the plan's bucket sizes (if the model is known) and groups."""
    # A bucket may be padded so that every rank has an equal share.
    sizes = _sizes(request)
    low, high = (min(sizes), max(sizes) + 16 * request.replicas) if sizes else (0, ANY_SIZE)
    cluster, alone = request.plan.cluster, request.pipeline is None
    nodes = len(cluster.hosts) if cluster is not None and alone else ANY
    return tuple(
        TunerRule(
            function, low, high, name, protocols.get(function, SIMPLE), channels, nodes, request.replicas
        )
        for function, name in chosen.items()
    )


def _sizes(request: SettingsRequest) -> list[int]:
    """The sizes of all buckets in bytes; empty without a model or buckets."""
    if not request.stages or not isinstance(
        request.data, DecoupledStrategy | DistributedDataParallelStrategy
    ):
        return []
    return [bucket.wire_bytes for schedule in request.schedules("") for bucket in schedule.buckets]
