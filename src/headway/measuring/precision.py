"""What autocast does to a job, measured: ``python -m headway.measuring.precision TRACE [WORD ...] -- COMMAND``.

TRACE is the recording of the job, COMMAND what was recorded. It runs four times, twice with autocast. Words are the
names of modules, by default the whole model, or ``dtype=float16``, of the whole model; else the type is bfloat16. What
is measured is written into TRACE, for ``headway optimize --allow precision``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.measuring.pass_runs import measure, run_command_line
from headway.passes.precision import Precision

IN_FLOAT16 = "dtype=float16"


def main(arguments: Sequence[str]) -> int:
    """Measure autocast in the modules that are named, or in the whole model. Returns the exit status."""
    return run_command_line(
        arguments, __doc__, lambda words: measure(words, lambda _trace, names: _pass_of(names))
    )


def _pass_of(words: Sequence[str]) -> Precision:
    modules = tuple(word for word in words if word != IN_FLOAT16)
    return Precision(dtype="float16" if IN_FLOAT16 in words else "bfloat16", modules=modules)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
