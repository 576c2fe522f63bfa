"""``headway measure``: measure what a pass does to a recorded job."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli import output

COMMAND = "headway.command"


@click.command(options_metavar="[OPTIONS]")
@click.argument("pass_name", metavar="PASS")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[MODULE | OPTION=VALUE]... -- COMMAND")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def measure(
    ctx: click.Context, pass_name: str, trace_path: Path, words: tuple[str, ...], as_json: bool
) -> None:
    """Measure what PASS does to the job in TRACE, so that replay and optimize can predict it.

    \b
    headway measure precision trace -- torchrun --nproc-per-node 2 train.py
    headway measure compile trace blocks.0 blocks.1 -- torchrun train.py
    headway measure input trace workers=4 -- torchrun train.py
    headway measure optimizer trace

    COMMAND is the command that was recorded. It runs four times, twice with the pass, so give it few steps more than
    were recorded. The optimizer is measured without COMMAND: set OMP_NUM_THREADS as in training. Results are saved in
    TRACE.

    \b
    Options of the passes:
      precision  dtype=bfloat16 (default) or dtype=float16; default: whole model
      compile    default: the model's largest series of numbered modules
      input      workers=N (default 2), prefetch=N (default 2)
      optimizer  none
    Passes of other packages take their own options; headway list passes shows them.
    """
    from headway.measuring.passes import in_words, measure

    effects = measure(pass_name, trace_path, words, ctx.find_root().meta.get(COMMAND, ()))
    if as_json:
        found = {
            name: {"factor": effect.factor, "held_bytes": effect.held_bytes}
            for name, effect in effects.items()
        }
        output.print_document("measured-passes", {"trace": str(trace_path), "effects": found})
        return
    for line in in_words(effects):
        output.console().print(line)
