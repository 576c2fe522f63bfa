"""What bfloat16 does to a job, measured: ``python -m headway.measuring.precision TRACE [MODULE ...] -- COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.measuring.pass_runs import measure
from headway.passes.precision import Precision


def main(arguments: Sequence[str]) -> int:
    """Measure autocast in the modules that are named, or in the whole model. Returns the exit status."""
    return measure(arguments, lambda _trace, modules: Precision(dtype="bfloat16", modules=modules))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
