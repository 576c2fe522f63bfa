"""The ``headway`` command: finds the subcommand, and turns errors into one line and an exit status."""

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
    "measure": "measure what a pass does to a recorded job",
    "run": "run an unmodified training command under a plan",
    "settings": "print a plan as settings of DDP, FSDP2, DeepSpeed, Megatron, NCCL or RCCL",
    "decisions": "say what was decided while a job trained, and why",
    "coordinate": "coordinate a job whose workers average in groups",
    "probe": "measure latency and rate of a job's links",
    "lab": "run a command on an emulated cluster on this machine",
    "list": "list models, clusters, strategies, passes, codecs, and plug-ins of other packages",
}
SUFFIXED = ("import", "list")  # names of Python's: their modules and functions end in an underscore
COMPLETION = "_HEADWAY_COMPLETE"


PIPE_CLOSED = (
    141  # as shells say of a program that SIGPIPE ended; 1 would be an answer of diagnose --baseline
)


NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    filter(
        None, [getattr(click.exceptions, "NoArgsIsHelpError", None)]
    )  # earlier versions print the help themselves
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
    epilog="headway help COMMAND explains a command, and so does headway COMMAND --help.",
)
@click.version_option(__version__, "-V", "--version", prog_name="headway")
def cli() -> None:
    """See, predict and choose the communication of distributed training."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 done, 2 bad usage or bad input, 1 our own fault."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # half characters in foreign text
    if instruction := os.environ.get(COMPLETION):
        sys.exit(shell_complete(cli, {}, "headway", COMPLETION, instruction))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    own: list[str] = arguments
    command: tuple[str, ...] = ()
    if "--" in arguments:
        cut = arguments.index("--")
        own, command = arguments[:cut], tuple(arguments[cut + 1 :])
    if own[:1] == ["help"]:
        own = [*own[1:], "--help"]
    try:
        return _answer(own, command)
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
    except (BrokenPipeError, SystemExit):  # the latter is rich's, when nobody reads on
        return PIPE_CLOSED
    except OSError as failure:
        if failure.errno not in FULL:
            raise
        print(f"headway: the output cannot be written: {failure.strerror}", file=sys.stderr)
        return 2


def _answer(own: list[str], command: tuple[str, ...]) -> int:
    try:
        with cli.make_context("headway", own) as context:
            context.meta["headway.command"] = command
            result = cli.invoke(context)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except NO_ARGUMENTS as bare:
        print("" if bare.ctx is None else bare.ctx.get_help(), flush=True)
        return 0


def _hint(context: click.Context | None, arguments: list[str]) -> str:
    """Where the job's command belongs, for who gave it without ``--``."""
    if context is None or "--" in arguments or not context.command.params:
        return ""
    takes_command = "-- COMMAND" in " ".join(context.get_usage().split())
    return f" The command stands behind --: {context.command_path} … -- torchrun train.py." * takes_command


def _sentence(text: str) -> str:
    """What click says, which may be a list of several lines without a full stop."""
    text = one_line(text, 600)
    return text if text.endswith((".", "?", "!", ")")) else f"{text}."
