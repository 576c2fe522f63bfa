"""The ``headway`` command: finds the subcommand, and reports errors as one line and an exit status."""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import sys

import click
from click.shell_completion import shell_complete

from headway.errors import HeadwayError, UserError, one_line
from headway.version import __version__

# Subcommands are imported when called, so that none loads the libraries of another.
COMMANDS = {
    "demo": "run the whole loop on this machine in a few minutes",
    "record": "run an unmodified training command and record it",
    "import": "read other tools' traces: PyTorch's profiler, Chakra, and what installed packages read",
    "export": "write a trace for other tools: Perfetto, Chakra, GOAL",
    "diagnose": "explain where the time went, and which ranks are to blame",
    "replay": "simulate the recorded steps, as they were or under what-ifs",
    "predict": "predict the step of a model on a cluster, without a trace",
    "optimize": "search for the best plan and write it to a file",
    "measure": "measure what a pass does to a recorded job",
    "run": "run an unmodified training command under a plan",
    "settings": "export a plan as settings for DDP, FSDP2, DeepSpeed, Megatron, NCCL or RCCL",
    "decisions": "show the decisions made while a job trained, and why",
    "coordinate": "run the coordinator of a partial all-reduce job",
    "probe": "measure latency and rate of a job's links",
    "lab": "run a command on an emulated cluster on this machine",
    "list": "list models, clusters, strategies, passes, codecs, readers, and plug-ins of other packages",
}
SUFFIXED = ("import", "list")  # reserved by Python: their modules and functions end in an underscore
COMPLETION = "_HEADWAY_COMPLETE"


PIPE_CLOSED = 141  # 128 + SIGPIPE, as in shells; 1 already means something for diagnose --baseline


NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    filter(
        None, [getattr(click.exceptions, "NoArgsIsHelpError", None)]
    )  # older versions of click print the help themselves
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_" if cmd_name in SUFFIXED else cmd_name
        command = getattr(importlib.import_module(f"headway.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, (*COMMANDS, "help"))
            ctx.fail(f"No such command {name!r}." + f" Did you mean {' or '.join(near)}?" * bool(near))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="For help on a command, run headway help COMMAND or headway COMMAND --help.",
)
@click.version_option(__version__, "-V", "--version", prog_name="headway")
def cli() -> None:
    """See, predict and choose the communication of distributed training."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 success, 2 bad usage or bad input, 1 a fault of Headway."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # foreign text may contain lone surrogates
    if instruction := os.environ.get(COMPLETION):
        sys.exit(shell_complete(cli, {}, "headway", COMPLETION, instruction))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    headway_arguments: list[str] = arguments
    command: tuple[str, ...] = ()
    if "--" in arguments:
        cut = arguments.index("--")
        headway_arguments, command = arguments[:cut], tuple(arguments[cut + 1 :])
    if headway_arguments[:1] == ["help"]:
        headway_arguments = [*headway_arguments[1:], "--help"]
    try:
        return _answer(headway_arguments, command)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as failure:
        context = getattr(failure, "ctx", None)
        of = "headway" if context is None else context.command_path
        hint = _hint(context, arguments)
        print(f"headway: {_sentence(failure.format_message())}{hint} See {of} --help.", file=sys.stderr)
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
    except (BrokenPipeError, SystemExit):  # rich raises SystemExit on a closed pipe
        return PIPE_CLOSED
    except OSError as failure:
        if failure.errno not in FULL:
            raise
        print(f"headway: cannot write the output: {failure.strerror}", file=sys.stderr)
        return 2


def _answer(arguments: list[str], command: tuple[str, ...]) -> int:
    try:
        with cli.make_context("headway", arguments) as context:
            context.meta["headway.command"] = command
            result = cli.invoke(context)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except NO_ARGUMENTS as bare:
        print("" if bare.ctx is None else bare.ctx.get_help(), flush=True)
        return 0


def _hint(context: click.Context | None, arguments: list[str]) -> str:
    """A hint for users who gave the job's command without ``--``."""
    if context is None or "--" in arguments or not context.command.params:
        return ""
    takes_command = "-- COMMAND" in " ".join(context.get_usage().split())
    return f" The command goes after --: {context.command_path} … -- torchrun train.py." * takes_command


def _sentence(text: str) -> str:
    """Click's message as one sentence; it may have several lines and no full stop."""
    text = one_line(text, 600)
    return text if text.endswith((".", "?", "!", ")")) else f"{text}."
