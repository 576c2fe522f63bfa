"""What workers of data loaders do to a job, measured: ``python -m headway.measuring.loading TRACE [COUNT] -- COMMAND``.

TRACE is the recording of the job, COMMAND what was recorded. It runs four times, twice with COUNT workers for each
loader, 2 by default. What is measured is written into TRACE, for ``headway optimize --allow randomness``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.errors import UserError
from headway.measuring.pass_runs import measure, run_command_line
from headway.passes.input_workers import InputWorkers
from headway.trace.format import Trace

USUAL_WORKERS = 2


def main(arguments: Sequence[str]) -> int:
    """Measure as many workers as are asked for, or two. Returns the exit status."""
    return run_command_line(arguments, __doc__, lambda words: measure(words, _of))


def _of(_trace: Trace, words: tuple[str, ...]) -> InputWorkers:
    try:
        (workers,) = map(int, words or (USUAL_WORKERS,))
        return InputWorkers(workers=workers)
    except ValueError:
        raise UserError(
            "that is no number of workers", got=" ".join(words), expected="one number from 1 to 256",
            fix="Name the trace, and then how many workers load for each rank.",
        ) from None  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
