"""What the tuners of NCCL and RCCL do with a table, read in their sources and written down once more.

``plugins/tuner/example`` of NCCL 2.30.7, and ``src/plugin/tuner/csv_tuner.cc`` of RCCL, which differ in two ways: what
no rule fits has one channel in the former and the library's own in the latter; and a name that is not known is an
all-reduce, a ring or ``simple`` in the former, while the latter leaves the line out.
"""

from __future__ import annotations

from typing import NamedTuple

LINE = 255  # characters that fgets takes at a time
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")


class Choice(NamedTuple):
    """What a tuner answers; "" is what the library chooses by itself."""

    algorithm: str
    protocol: str
    channels: int


def answer(
    text: str, collective: str, size_bytes: int, nodes: int, ranks: int, *, rccl: bool = False
) -> Choice:
    """The tuner's answer for one collective."""
    for line in _lines(text):
        fields = [field.strip(" \t") for field in line.split(",") if field][:10]
        if line[:1] in ("#", "") or len(fields) < 8:
            continue
        names = (fields[0] in COLLECTIVES, fields[3] in ALGORITHMS, fields[4] in PROTOCOLS)
        if rccl and not all(names):
            continue
        own = fields[0] if names[0] else "allreduce"
        algorithm, protocol = fields[3] if names[1] else "ring", fields[4] if names[2] else "simple"
        low, high, channels, of_nodes, of_ranks = (int(fields[i]) for i in (1, 2, 5, 6, 7))
        fits = own == collective and low <= size_bytes <= high
        if fits and of_nodes in (-1, nodes) and of_ranks in (-1, ranks):
            return Choice(algorithm, protocol, channels if channels != -1 else 0 if rccl else 1)
    return Choice("", "", 0 if rccl else 1)


def _lines(text: str) -> list[str]:
    """Lines as they are read: what is longer than the buffer goes on as another line."""
    return [line[at : at + LINE] for line in text.splitlines() for at in range(0, max(1, len(line)), LINE)]
