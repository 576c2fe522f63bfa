"""The ``headway`` command: finds the subcommand, and turns errors into one line and an exit status."""

from __future__ import annotations

import errno
import importlib
import io
import keyword
import sys

import click

from headway.errors import HeadwayError, UserError
from headway.version import __version__

# Subcommands are imported when called, so that none pays for another's libraries.
COMMANDS = {
    "demo": "run the whole loop on this machine in a few minutes",
    "record": "run an unmodified training command and record it",
    "import": "read other tools' traces: Kineto, Chakra, TensorFlow, JAX, MXNet, Horovod",
    "export": "write a trace for other tools: Perfetto, Chakra, GOAL",
    "diagnose": "say where the time went, and which ranks are to blame",
    "replay": "simulate the recorded steps, as they were or under what-ifs",
    "predict": "predict the step of a model on a cluster, without a trace",
    "optimize": "search for the best plan and write it to a file",
    "run": "run an unmodified training command under a plan",
    "settings": "print a plan as settings of DDP, FSDP2, DeepSpeed, Megatron, NCCL or RCCL",
    "decisions": "say what was decided while a job trained, and why",
    "coordinate": "coordinate a job whose workers average in groups",
    "probe": "measure latency and rate of a job's links",
    "lab": "run a command on an emulated cluster on this machine",
}


PIPE_CLOSED = (
    141  # as shells say of a program that SIGPIPE ended; 1 would be an answer of diagnose --baseline
)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(f"headway.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headway")
def cli() -> None:
    """See, predict and choose the communication of distributed training."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 done, 2 bad usage or bad input, 1 our own fault."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # half characters in foreign text
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    own: list[str] = arguments
    command: tuple[str, ...] = ()
    if "--" in arguments:
        cut = arguments.index("--")
        own, command = arguments[:cut], tuple(arguments[cut + 1 :])
    try:
        with cli.make_context("headway", own) as context:
            context.meta["headway.command"] = command
            result = cli.invoke(context)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as failure:
        print(f"headway: {failure.format_message()} See headway --help.", file=sys.stderr)
        return failure.exit_code
    except UserError as failure:
        print(f"headway: {failure}", file=sys.stderr)
        return 2
    except HeadwayError as failure:
        print(f"headway: {failure}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, click.Abort):
        print("headway: interrupted", file=sys.stderr)
        return 130
    except (BrokenPipeError, SystemExit):  # the latter is rich's, when nobody reads on
        return PIPE_CLOSED
    except OSError as failure:
        if failure.errno not in FULL:
            raise
        print(f"headway: the output cannot be written: {failure.strerror}", file=sys.stderr)
        return 2
