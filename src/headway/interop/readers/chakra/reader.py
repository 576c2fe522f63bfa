"""MLCommons Chakra: one rank's graph of computation and communication, with or without times."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.errors import TraceError
from headway.interop.readers.chakra.communication import Communication, communication_of
from headway.interop.readers.chakra.document import ChakraDocument, Nodes, parse
from headway.interop.readers.chakra.frames import looks_like_chakra
from headway.interop.readers.chakra.host_calls import host_calls
from headway.interop.readers.chakra.rank import RankNodes
from headway.interop.readers.chakra.timing import timing_of
from headway.interop.readers.executed import ExecutedCommunication
from headway.interop.readers.foreign import Companion, Document, ForeignRank, Reading
from headway.interop.readers.ranks import rank_in_name
from headway.interop.readers.torch_json import whole
from headway.trace.format import MAX_WORLD_SIZE

_NAMED = re.compile(r"\.et(?:\.gz)?$")
_RANK = re.compile(r"\.(\d{1,6})\.et(?:\.gz)?$")  # Chakra's tools and ASTRA-sim name files so
_WORLD = ("", "0")  # how the group of all ranks is called
_DEFAULT_GROUP = "default_pg"  # how PyTorch describes it


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is a Chakra trace: by its name, or by the form of its first messages."""
    named = bool(_NAMED.search(name)) and head.lstrip()[:1] not in (b"{", b"[")
    return named or looks_like_chakra(head)


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read one rank's graph; where it states no times, nodes run as soon as what they depend on has ended.

    Raises TraceError where the file is damaged, or its nodes wait for themselves.
    """
    found = parse(document)
    called = host_calls(found.nodes)
    communication = communication_of(found.nodes, called, _members(found, called), _names(found, called))
    timing = timing_of(document, found.nodes, communication)
    rank = RankNodes.of(found.nodes, communication, timing)
    steps = rank.steps(found.attributes.get("headway_steps"))
    if not len(steps.number):
        raise TraceError(
            f"{document.name} holds nothing that takes time",
            got=f"{len(found.nodes)} nodes without a duration",
            expected="computation or communication with durations",
        )
    notes = [
        *found.notes,
        *timing.notes,
        *steps.notes,
        *communication.notes,
        *_timeless(found.nodes, communication),
    ]
    return Reading(
        ranks=[
            ForeignRank(
                source=document.name,
                framework="chakra",
                events=rank.events(steps),
                rank=_rank(found, document.name),
                world_size=_world_size(found, called),
                host=_text(found, "host"),
                backend=_text(found, "backend"),
                version=_text(found, "schema"),
                clock=_text(found, "clock") if timing.stated else "",
                groups={
                    _names(found, called).get(name, name): ranks for name, ranks in called.groups.items()
                },
                dropped_events=found.dropped + timing.dropped,
                notes=notes,
            )
        ]
    )


def _timeless(nodes: Nodes, communication: Communication) -> list[str]:
    without = int((nodes.duration_ns[communication.index] == 0).sum())
    count = len(communication.index)
    if not count:
        return ["No communication is recorded."]
    return (
        [f"{without} of {count} communication nodes state no duration and take no time."] if without else []
    )


def _rank(found: ChakraDocument, name: str) -> int | None:
    stated = whole(found.attributes.get("rank"), MAX_WORLD_SIZE - 1)
    if stated >= 0:
        return stated
    named = _RANK.search(name)
    return int(named[1]) if named else rank_in_name(name)


def _world_size(found: ChakraDocument, called: ExecutedCommunication) -> int | None:
    """How many ranks there are: as stated, or as PyTorch says of its default group."""
    stated = whole(found.attributes.get("world_size"), MAX_WORLD_SIZE)
    if stated > 0:
        return stated
    default = [name for name, words in called.descriptions.items() if words == _DEFAULT_GROUP]
    return len(called.groups.get(default[0], ())) or None if default else None


def _members(found: ChakraDocument, called: ExecutedCommunication) -> dict[str, int]:
    """How many ranks each group has, where that is known."""
    world_size = _world_size(found, called)
    everybody = dict.fromkeys(_WORLD, world_size) if world_size else {}
    return {**everybody, **{name: len(ranks) for name, ranks in called.groups.items()}}


def _names(found: ChakraDocument, called: ExecutedCommunication) -> dict[str, str]:
    """What Headway called the groups to which it gave numbers, as ASTRA-sim wants them."""
    return dict(called.descriptions) if "headway" in found.attributes else {}


def _text(found: ChakraDocument, name: str) -> str:
    value = found.attributes.get(name)
    return value[:200] if isinstance(value, str) else ""
