"""What torch.compile does to a job, measured: ``python -m headway.measuring.compiling TRACE [MODULE ...] -- COMMAND``.

TRACE is the recording of the job, COMMAND what was recorded. It runs four times, twice with the modules compiled.
Without names these are the numbered modules of the model. What is measured is written into TRACE, for ``headway
optimize``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.errors import UserError
from headway.measuring.pass_runs import measure, run_command_line
from headway.model import ModelSpec
from headway.passes.base import lies_in
from headway.passes.compile import Compile
from headway.trace.format import Trace


def main(arguments: Sequence[str]) -> int:
    """Measure the modules that are named, or the model's repeated ones. Returns the exit status."""
    return run_command_line(arguments, __doc__, lambda words: measure(words, _of))


def _of(trace: Trace, modules: tuple[str, ...]) -> Compile:
    return Compile(modules=modules or repeated_modules(trace.model))


def repeated_modules(model: ModelSpec) -> tuple[str, ...]:
    """The numbered modules of one parent, as the blocks of a transformer are: of all such parents the largest.

    Raises UserError where there are none.
    """
    paths = list(dict.fromkeys(parameter.module for parameter in model.parameters))
    siblings: dict[str, dict[str, None]] = {}
    for path in paths:
        names = path.split(".")
        for depth, name in enumerate(names):
            if name.isdecimal():
                siblings.setdefault(".".join(names[:depth]), {})[".".join(names[: depth + 1])] = None

    def size_bytes(of: dict[str, None]) -> int:
        return sum(
            parameter.size_bytes
            for parameter in model.parameters
            if any(lies_in(parameter.module, one) for one in of)
        )

    several = [of for of in siblings.values() if len(of) > 1]
    if not several:
        raise UserError(
            "the model has no numbered modules, and it was not said which are to be compiled",
            got=", ".join(paths[:8]), expected="TRACE MODULE ... -- COMMAND",
        )  # fmt: skip
    largest = max(several, key=size_bytes)
    return tuple(largest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
