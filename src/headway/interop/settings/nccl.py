"""Plans as choices of NCCL's and RCCL's algorithms: environment variables, and the table that their tuners read.

The variables choose by function, for every communicator of a process; the table by function, size and number of ranks.
"""

from __future__ import annotations

from headway.collectives.algorithms import NATIVE
from headway.errors import UserError
from headway.interop.settings.asked import Asked, unexpressed
from headway.interop.settings.tuner_table import ANY, ANY_SIZE, COLLECTIVES, TunerRule, table
from headway.strategies.base import DATA
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.registry import plugin_of
from headway.tool_settings import Settings

NCCL, RCCL = "NCCL", "RCCL"
FILE = "tuner.csv"
RING, SIMPLE = "ring", "simple"
PLUGIN = "libnccl-tuner-example.so"
PART = "carry out this plan's collectives"
OF_PROTOCOL = f"a rule has to name a protocol, and these name {SIMPLE} for all sizes"


def nccl(asked: Asked) -> Settings:
    """NCCL_ALGO and NCCL_PROTO; with a number of channels, the table of the tuner that NCCL has as an example.

    That tuner gives one channel to whatever no rule fits, and to rules that leave channels open, so the table names a
    number and has a rule for everything. Nothing is set for plans that leave algorithms to the library. Raises
    PlanError for plans without collectives, and UserError for rules to be appended that leave channels open.
    """
    chosen = _chosen(asked, NCCL)
    if not chosen:
        return _nothing_to_set(asked, NCCL)
    if asked.collectives.channels is not None:
        return _nccl_table(asked, chosen, asked.collectives.channels)
    environment = {"NCCL_ALGO": ";".join(f"{function}:{name}" for function, name in chosen.items())}
    if asked.collectives.as_replayed:
        environment["NCCL_PROTO"] = ";".join(f"{function}:{SIMPLE}" for function in chosen)
    return Settings(
        NCCL,
        _gist(chosen),
        "Export the variables on every host; NCCL 2.24 or newer reads them by function.",
        _left_out(asked, chosen),
        ("the variables hold for all sizes, and for every communicator of the process",),
        environment=environment,
        part=PART,
    )


def rccl(asked: Asked) -> Settings:
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


def _nothing_to_set(asked: Asked, library: str) -> Settings:
    """What is said of a plan that leaves all algorithms to the library, or has none that this one knows."""
    return Settings(
        library,
        "nothing has to be set, as the plan leaves the choice of algorithms to the library",
        f"Run the job without settings for {library}; those of the plan's buckets are for --for ddp and the like. "
        f"--as-replayed fixes {library} to rings, as a replay lays collectives out; the library may know better.",
        _left_out(asked, {}),
        part=PART,
    )


def _nccl_table(asked: Asked, chosen: dict[str, str], channels: int) -> Settings:
    if any(rule.channels == ANY for rule in asked.collectives.appended):
        raise UserError(
            "a rule to be appended leaves the number of channels open, which NCCL's tuner takes for one", got=ANY,
            expected="a number in the sixth field",
        )  # fmt: skip
    others = tuple(TunerRule(name, 0, ANY_SIZE, RING, SIMPLE, channels) for name in COLLECTIVES)
    rules = (*_rules(asked, chosen, channels), *asked.collectives.appended, *others)
    gist = f"{_gist(chosen)}, {channels} channels"
    return Settings(
        NCCL,
        gist,
        f"Build {PLUGIN} from plugins/tuner/example of NCCL's source, and export the variables on every host, where "
        "the files are. NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING shows which rule it applies.",
        _left_out(asked, chosen),
        (
            OF_PROTOCOL,
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


def _chosen(asked: Asked, library: str) -> dict[str, str]:
    """The algorithm of each function for which the plan chooses one. Raises PlanError where it calls none of them."""
    data = asked.data
    choices: dict[str, str | None]
    if isinstance(data, DecoupledStrategy):
        choices = {
            f: RING if name == RING and not data.by_size else None for f, name in _halves(data).items()
        }
    elif data is not None and (functions := plugin_of(data).library_calls):
        choices = dict.fromkeys(functions)
    else:
        asked.refuse(
            library,
            f"a strategy such as ddp or decoupled along {DATA}: others send messages, without an algorithm",
        )
    if asked.collectives.as_replayed:
        choices = dict.fromkeys(choices, RING)
    return {function: name for function, name in choices.items() if name is not None}


def _halves(data: DecoupledStrategy) -> dict[str, str]:
    """The algorithm of each half, by the function that carries it out."""
    return {"reducescatter": data.reduce_scatter, "allgather": data.all_gather}


def _left_out(asked: Asked, chosen: dict[str, str]) -> tuple[str, ...]:
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


def _rules(asked: Asked, chosen: dict[str, str], channels: int) -> tuple[TunerRule, ...]:
    """A rule for each function, for the sizes of the plan's buckets where the model is known, and for its groups."""
    low, high = _sizes_bytes(asked)
    cluster, alone = asked.plan.cluster, asked.pipeline is None
    nodes = len(cluster.hosts) if cluster is not None and alone else ANY
    return tuple(
        TunerRule(function, low, high, name, SIMPLE, channels, nodes, asked.replicas)
        for function, name in chosen.items()
    )


def _sizes_bytes(asked: Asked) -> tuple[int, int]:
    """The least and the largest bucket, as it may be padded so that every rank has an equal share."""
    if not asked.stages or not isinstance(asked.data, DecoupledStrategy | DistributedDataParallelStrategy):
        return 0, ANY_SIZE
    sizes = [bucket.wire_bytes for schedule in asked.schedules("") for bucket in schedule.buckets]
    return min(sizes), max(sizes) + 16 * asked.replicas
