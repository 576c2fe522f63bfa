"""Reads and writes the tuner tables of NCCL and RCCL: an algorithm, protocol and channels by collective and size.

A rule is a line ``collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks``; the first match applies.
NCCL and RCCL silently misread or skip what they do not understand, so everything read or written here is checked.
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
ANY_SIZE = 2**63 - 1  # 4294967295, as in NCCL's examples, would exclude larger tensors
MOST_SIZE = 2**64 - 1
MOST_CHARACTERS = 254  # per line; readers parse the rest of a longer line as another rule
MOST_BYTES = 2**20
FIELDS, MOST_FIELDS = 8, 10  # numPipeOps and regBuff may follow


@dataclass(frozen=True)
class TunerRule:
    """One line. -1 for ``channels``, ``nodes`` or ``ranks`` means any; bounds of sizes are inclusive."""

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
        """The rule as a line of the file, without optional fields at its end."""
        fields = [str(field) for field in astuple(self)]
        while len(fields) > FIELDS and fields[-1] == str(ANY):
            fields.pop()
        return ",".join(fields)


def table(rules: Iterable[TunerRule], comments: Iterable[str] = ()) -> str:
    """The text of a file: ``comments``, cut to the length of a line, and then ``rules``."""
    lines = [f"# {comment}"[:MOST_CHARACTERS] for comment in comments]
    return "\n".join([*lines, *(rule.line() for rule in rules)]) + "\n"


def read_table(path: Path) -> tuple[TunerRule, ...]:
    """The rules of a file. Raises UserError, with the line number, for anything that readers would misread."""
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
            f"{where} is not a rule of a tuner table", got=f"{len(fields)} fields in {len(line)} characters",
            expected=f"{FIELDS} to {MOST_FIELDS} fields in at most {MOST_CHARACTERS}",
        )  # fmt: skip
    for field, names in zip(
        (fields[0], fields[3], fields[4]), (COLLECTIVES, ALGORITHMS, PROTOCOLS), strict=True
    ):
        if field not in names:
            raise UserError(
                f"{where} contains an unknown name, which readers would take for another", got=field,
                expected=" or ".join(names),
            )  # fmt: skip
    numbers = [_number(field, where) for field in (*fields[1:3], *fields[5:])]
    if not 0 <= numbers[0] <= numbers[1]:
        raise UserError(
            f"{where} matches no size",
            got=f"{numbers[0]} to {numbers[1]} bytes",
            expected="0 <= minimum <= maximum",
        )
    low, high, *rest = numbers
    if min(rest) < ANY or max(numbers) > MOST_SIZE:
        raise UserError(
            f"{where} contains a number out of range", got=line,
            expected=f"-1 for any, or 0 to {MOST_SIZE}",
        )  # fmt: skip
    return TunerRule(fields[0], low, high, fields[3], fields[4], *rest)


def _number(field: str, where: str) -> int:
    if not field.removeprefix("-").isascii() or not field.removeprefix("-").isdigit() or len(field) > 20:
        raise UserError(
            f"{where} contains a field that is not a number", got=field, expected="digits, or -1 for any"
        )
    return int(field)
