"""The table that tuners of NCCL and RCCL read: for collectives of some sizes, an algorithm, a protocol and channels.

A rule is a line ``collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks``, and the first one that fits
holds. The readers take what they do not understand for something else, or leave it out, and say nothing; so whatever is
written or passed on here is held against what they know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from headway import files
from headway.errors import UserError

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
ANY = -1
ANY_SIZE = 2**63 - 1  # 4294967295, as examples have it, leaves out what is larger
MOST_SIZE = 2**64 - 1
MOST_CHARACTERS = 254  # of a line; readers cut longer ones and go on with the rest as another rule
MOST_BYTES = 2**20
FIELDS, MOST_FIELDS = 8, 10  # numPipeOps and regBuff may follow


@dataclass(frozen=True)
class TunerRule:
    """One line. ``channels``, ``nodes`` and ``ranks`` of -1 are whatever there is; bounds of sizes are inclusive."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int = ANY
    nodes: int = ANY
    ranks: int = ANY
    pipe_operations: int = ANY
    registered: int = ANY

    def line(self) -> str:
        """The rule as it stands in a file, without the fields at its end that say nothing."""
        fields = [str(field) for field in astuple(self)]
        while len(fields) > FIELDS and fields[-1] == str(ANY):
            fields.pop()
        return ",".join(fields)


def table(rules: Iterable[TunerRule], comments: Iterable[str] = ()) -> str:
    """The text of a file of ``rules``, behind ``comments``, each cut to what a line may hold."""
    lines = [f"# {comment}"[:MOST_CHARACTERS] for comment in comments]
    return "\n".join([*lines, *(rule.line() for rule in rules)]) + "\n"


def read_table(path: Path) -> tuple[TunerRule, ...]:
    """The rules of a file. Raises UserError, with the line, for whatever a reader would take for something else."""
    text = files.read_text(path, UserError, "tuner table", MOST_BYTES)
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            rules.append(_rule(line, f"{path}, line {number}"))
    return tuple(rules)


def _rule(line: str, where: str) -> TunerRule:
    fields = [field.strip() for field in line.split(",")]
    if len(line) > MOST_CHARACTERS or not FIELDS <= len(fields) <= MOST_FIELDS:
        raise UserError(
            f"{where} is no rule of a tuner table", got=f"{len(fields)} fields in {len(line)} characters",
            expected=f"{FIELDS} to {MOST_FIELDS} fields in at most {MOST_CHARACTERS}",
        )  # fmt: skip
    for field, known in zip(
        (fields[0], fields[3], fields[4]), (COLLECTIVES, ALGORITHMS, PROTOCOLS), strict=True
    ):
        if field not in known:
            raise UserError(
                f"{where} has a name that readers do not know, and take for another", got=field,
                expected=" or ".join(known),
            )  # fmt: skip
    numbers = [_number(field, where) for field in (*fields[1:3], *fields[5:])]
    if not 0 <= numbers[0] <= numbers[1]:
        raise UserError(
            f"{where} fits no size",
            got=f"{numbers[0]} to {numbers[1]} bytes",
            expected="from 0 on, and not backwards",
        )
    low, high, *rest = numbers
    if min(rest) < ANY or max(numbers) > MOST_SIZE:
        raise UserError(
            f"{where} has a number that means nothing", got=line,
            expected=f"-1 for any, or 0 to {MOST_SIZE}",
        )  # fmt: skip
    return TunerRule(fields[0], low, high, fields[3], fields[4], *rest)


def _number(field: str, where: str) -> int:
    if not field.removeprefix("-").isascii() or not field.removeprefix("-").isdigit() or len(field) > 20:
        raise UserError(f"{where} has a field that is no number", got=field, expected="digits, or -1 for any")
    return int(field)
