"""What autocast does to a job, measured: ``python -m headway.measuring.precision TRACE [WORD ...] -- COMMAND``.

Words are the names of modules, or ``dtype=float16``, of the whole model; else it is bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.measuring.pass_runs import measure
from headway.passes.precision import Precision

IN_FLOAT16 = "dtype=float16"


def main(arguments: Sequence[str]) -> int:
    """Measure autocast in the modules that are named, or in the whole model. Returns the exit status."""
    return measure(arguments, lambda _trace, words: _pass_of(words))


def _pass_of(words: Sequence[str]) -> Precision:
    modules = tuple(word for word in words if word != IN_FLOAT16)
    return Precision(dtype="float16" if IN_FLOAT16 in words else "bfloat16", modules=modules)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
