"""Plans as choices of NCCL's and RCCL's algorithms: environment variables, and the table that their tuners read.

The variables choose by function, for every communicator of a process; the table by function, size and number of ranks.
What a plan leaves to NCCL is chosen here only where NCCL's model, with what the plan's cluster reaches, predicts that
NCCL takes a slower algorithm or protocol than it could.
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
from headway.strategies.data_parallel.local_sgd.policy import LocalSGDStrategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.tool_settings import Settings

NCCL, RCCL = "NCCL", "RCCL"
FILE = "tuner.csv"
RING: Algorithm = "ring"
SIMPLE: Protocol = "simple"
PLUGIN = "libnccl-tuner-example.so"
PART = "carry out this plan's collectives"
OF_PROTOCOL = f"a rule has to name a protocol, and these name {SIMPLE} for all sizes"
# What may be forced: other algorithms are not on every communicator, and LL128 corrupts data where links lack it.
_FORCED: tuple[tuple[Algorithm, Protocol], ...] = (
    ("ring", "ll"), ("ring", "simple"), ("tree", "ll"), ("tree", "simple"),
)  # fmt: skip
_KINDS: dict[str, Kind] = {
    "allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather",
}  # fmt: skip


class Faster(NamedTuple):
    """What is predicted to be ``gain`` times as fast as what NCCL takes, for all buckets of a plan together."""

    algorithm: Algorithm
    protocol: Protocol
    gain: float


def nccl(asked: SettingsRequest) -> Settings:
    """NCCL_ALGO and NCCL_PROTO; with a number of channels, the table of the tuner that NCCL has as an example.

    That tuner gives one channel to whatever no rule fits, and to rules that leave channels open, so the table names a
    number and has a rule for everything. Of plans that leave algorithms to the library, only what NCCL's model
    predicts to be faster is set. Raises PlanError for plans without collectives, and UserError for rules to be
    appended that leave channels open.
    """
    chosen, faster = _chosen(asked, NCCL), _faster(asked)
    protocols: dict[str, str] = {function: choice.protocol for function, choice in faster.items()}
    chosen |= {function: choice.algorithm for function, choice in faster.items()}
    if not chosen:
        return _nothing_to_set(asked, NCCL)
    predicted = tuple(
        f"{choice.algorithm} with {choice.protocol} is predicted to be {choice.gain:.2g} times as fast for the plan's "
        f"{function} as what NCCL takes by itself: measure both with nccl-tests before you keep it"
        for function, choice in faster.items()
    )
    if asked.collectives.channels is not None:
        return _nccl_table(asked, chosen, protocols, asked.collectives.channels, predicted)
    environment = {"NCCL_ALGO": ";".join(f"{function}:{name}" for function, name in chosen.items())}
    if _replayed_as_rings(asked):
        protocols = {function: protocols.get(function, SIMPLE) for function in chosen}
    if protocols:
        environment["NCCL_PROTO"] = ";".join(f"{function}:{name}" for function, name in protocols.items())
    return Settings(
        NCCL,
        _gist(chosen),
        "Export the variables on every host; NCCL 2.24 or newer reads them by function.",
        _left_out(asked, chosen),
        (*predicted, "the variables hold for all sizes, and for every communicator of the process"),
        environment=environment,
        part=PART,
    )


def rccl(asked: SettingsRequest) -> Settings:
    """The table that RCCL reads by itself, if the plan chooses an algorithm. Raises PlanError without collectives."""
    chosen = _chosen(asked, RCCL)
    if not chosen:
        return _nothing_to_set(asked, RCCL)
    appended = asked.collectives.appended
    channels = ANY if asked.collectives.channels is None else asked.collectives.channels
    rules = (*_rules(asked, chosen, channels), *appended)
    cautions = [OF_PROTOCOL]
    if not appended:
        cautions.append(
            "this table takes the place of the one for this GPU that RCCL brings; carry its rules over with --append"
        )
    return Settings(
        RCCL,
        _gist(chosen),
        "Export the variable on every host, where the file is; RCCL 2.28.3 or newer reads it, without any plugin.",
        _left_out(asked, chosen),
        tuple(cautions),
        {FILE: table(rules, _comments(RCCL, _gist(chosen)))},
        environment={"NCCL_TUNER_CONFIG_FILE": FILE},
        part=PART,
    )


def _nothing_to_set(asked: SettingsRequest, library: str) -> Settings:
    """What is said of a plan that leaves all algorithms to the library, or has none that this one knows."""
    cluster = asked.plan.cluster
    why, more = "the plan leaves the choice of algorithms to the library", ""
    if cluster is not None and cluster.nccl is not None:
        more = (
            " A replay of the plan's cluster takes what NCCL's model chooses, so --as-replayed fixes nothing."
        )
        if library == NCCL and _sizes(asked) and _is_whole(asked, cluster):
            why = (
                "none that can be forced is predicted to be faster than NCCL's own choice by more than the model's "
                f"error, {collectives_error(cluster):.0%}"
            )
        elif library == NCCL and not asked.stages:
            more += " Whether NCCL could choose better takes the sizes of buckets, which --trace TRACE tells."
    else:
        more = f" --as-replayed fixes {library} to rings, as in a replay; the library may know better."
    return Settings(
        library,
        f"nothing has to be set, as {why}",
        f"Run the job without settings for {library}; those of the plan's buckets are for --for ddp and the like."
        + more,
        _left_out(asked, {}),
        part=PART,
    )


def _faster(asked: SettingsRequest) -> dict[str, Faster]:
    """By function that the plan leaves to NCCL, what is faster on its cluster by more than the model's error."""
    cluster, sizes = asked.plan.cluster, _sizes(asked)
    if cluster is None or cluster.nccl is None or not sizes or not _is_whole(asked, cluster):
        return {}
    data = asked.data
    functions = ["allreduce"]
    if isinstance(data, DecoupledStrategy):
        functions = [function for function, name in _halves(data).items() if name == NATIVE]
    compared = {function: _fastest(cluster, _KINDS[function], sizes) for function in functions}
    least = 1 + collectives_error(cluster)
    return {function: choice for function, choice in compared.items() if choice.gain > least}


def _is_whole(asked: SettingsRequest, cluster: Cluster) -> bool:
    """Whether the plan's collectives are over all workers, as many on each host: what the model can compare."""
    alike = len({host.workers for host in cluster.hosts}) == 1
    return alike and asked.pipeline is None and 1 < asked.replicas == cluster.world_size


def _fastest(cluster: Cluster, kind: Kind, sizes_bytes: Sequence[int]) -> Faster:
    """What can be forced and is fastest for tensors of ``sizes_bytes`` over all workers, against NCCL's choices."""
    hosts, a_host = len(cluster.hosts), cluster.hosts[0].workers
    ranks, fabric = hosts * a_host, fabric_of(cluster, range(hosts), a_host)

    def plain_us(algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
        latency_us, gb_s = tuned(kind, algorithm, protocol, ranks, hosts, fabric)
        return latency_us + size_bytes / (1e3 * gb_s)

    def expected_us(algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
        return cast("float", time_us(kind, algorithm, protocol, size_bytes, ranks, hosts, fabric))

    taken: list[Choice] = [choose(kind, size_bytes, ranks, hosts, fabric) for size_bytes in sizes_bytes]
    best = Faster(RING, SIMPLE, 0.0)
    for algorithm, protocol in _FORCED:
        if tuned(kind, algorithm, protocol, ranks, hosts, fabric).gb_s <= 0:
            continue
        # NCCL corrects its times for some sizes, which is its opinion: what is set is faster with and without that.
        gain = min(
            sum(
                us(choice.algorithm, choice.protocol, size)
                for choice, size in zip(taken, sizes_bytes, strict=True)
            )
            / sum(us(algorithm, protocol, size) for size in sizes_bytes)
            for us in (plain_us, expected_us)
        )
        best = max(best, Faster(algorithm, protocol, gain), key=lambda choice: choice.gain)
    return best


def _nccl_table(
    asked: SettingsRequest,
    chosen: dict[str, str],
    protocols: Mapping[str, str],
    channels: int,
    predicted: tuple[str, ...],
) -> Settings:
    if any(rule.channels == ANY for rule in asked.collectives.appended):
        raise UserError(
            "a rule to be appended leaves the number of channels open, which NCCL's tuner takes for one", got=ANY,
            expected="a number in the sixth field",
        )  # fmt: skip
    others = tuple(TunerRule(name, 0, ANY_SIZE, RING, SIMPLE, channels) for name in COLLECTIVES)
    rules = (*_rules(asked, chosen, channels, protocols), *asked.collectives.appended, *others)
    gist = f"{_gist(chosen)}, {channels} channels"
    return Settings(
        NCCL,
        gist,
        f"Build {PLUGIN} from plugins/tuner/example of NCCL's source, and export the variables on every host, where "
        "the files are. NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING shows which rule it applies.",
        _left_out(asked, chosen),
        (
            *predicted,
            *(() if chosen.keys() == protocols.keys() else (OF_PROTOCOL,)),
            "what no rule fits would be sent through one channel, so the last five rules fix all other collectives to "
            f"rings with {channels}",
            "the example tuner overwrites some of NCCL's constants for Blackwell GPUs when it is loaded",
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


def _chosen(asked: SettingsRequest, library: str) -> dict[str, str]:
    """The algorithm of each function for which the plan chooses one. Raises PlanError where it calls none of them."""
    data = asked.data
    choices: dict[str, str | None]
    if isinstance(data, DecoupledStrategy):
        choices = {
            f: RING if name == RING and not data.by_size else None for f, name in _halves(data).items()
        }
    elif isinstance(data, DistributedDataParallelStrategy | LocalSGDStrategy):
        choices = {"allreduce": None}
    else:
        asked.refuse(
            library, f"ddp, decoupled or local-sgd along {DATA}: others send messages, without an algorithm"
        )
    if _replayed_as_rings(asked):
        choices = dict.fromkeys(choices, RING)
    return {function: name for function, name in choices.items() if name is not None}


def _replayed_as_rings(asked: SettingsRequest) -> bool:
    """Whether what the plan leaves to the library is to be fixed to rings: a replay with NCCL's model has no rings."""
    cluster = asked.plan.cluster
    return asked.collectives.as_replayed and (cluster is None or cluster.nccl is None)


def _halves(data: DecoupledStrategy) -> dict[str, str]:
    """The algorithm of each half, by the function that carries it out."""
    return {"reducescatter": data.reduce_scatter, "allgather": data.all_gather}


def _left_out(asked: SettingsRequest, chosen: dict[str, str]) -> tuple[str, ...]:
    """What of the plan is not among what was ``chosen``."""
    said = unexpressed(asked)
    if isinstance(data := asked.data, DecoupledStrategy):
        for function, name in _halves(data).items():
            if name not in (RING, NATIVE):
                instead = (
                    f"rings for {function}" if function in chosen else f"{function} is left to the library"
                )
                said.append(f"{name} collectives: {instead}")
        if data.by_size:
            said.append("other algorithms of smaller buckets: rings for all")
        if data.ring_order:
            said.append("the order of ranks in rings: the library has its own")
    return tuple(said)


def _rules(
    asked: SettingsRequest,
    chosen: dict[str, str],
    channels: int,
    protocols: Mapping[str, str] = MappingProxyType({}),
) -> tuple[TunerRule, ...]:
    """A rule for each function, for the sizes of the plan's buckets where the model is known, and for its groups."""
    # A bucket may be padded so that every rank has an equal share.
    sizes = _sizes(asked)
    low, high = (min(sizes), max(sizes) + 16 * asked.replicas) if sizes else (0, ANY_SIZE)
    cluster, alone = asked.plan.cluster, asked.pipeline is None
    nodes = len(cluster.hosts) if cluster is not None and alone else ANY
    return tuple(
        TunerRule(function, low, high, name, protocols.get(function, SIMPLE), channels, nodes, asked.replicas)
        for function, name in chosen.items()
    )


def _sizes(asked: SettingsRequest) -> list[int]:
    """The bytes of all buckets; none where the model is not known or what is sent is not in buckets."""
    if not asked.stages or not isinstance(asked.data, DecoupledStrategy | DistributedDataParallelStrategy):
        return []
    return [bucket.wire_bytes for schedule in asked.schedules("") for bucket in schedule.buckets]
