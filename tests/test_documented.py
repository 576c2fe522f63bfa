"""Every command that the documentation shows exists, with its options and their values."""

from __future__ import annotations

import re

import click
import pytest
from tests.documented import PAGES, ROOT, Documented, commands_of, headway_parts

from headway.cli.main import cli

COMMANDS = [command for page in PAGES for command in commands_of(page)]
OF_HEADWAY = [command for command in COMMANDS if headway_parts(command)]


def check(arguments: list[str]) -> None:
    """Parse ``arguments`` as the command line does, without running anything."""
    context = click.Context(cli, info_name="headway")
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        subcommand = command.get_command(context, arguments[0])
        assert subcommand is not None, f"there is no command {arguments[0]}"
        command, arguments = subcommand, arguments[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    values, rest, _ = command.make_parser(context).parse_args(list(arguments))
    assert not rest, f"{rest} are not taken"
    for parameter in command.params:
        value = values.get(parameter.name)
        if isinstance(parameter.type, click.Choice) and isinstance(value, str):
            parameter.type.convert(value, parameter, context)


@pytest.mark.parametrize("command", OF_HEADWAY, ids=str)
def test_documented_commands_parse(command: Documented) -> None:
    for arguments in headway_parts(command):
        check(arguments)


def test_the_readme_and_every_page_of_the_loop_show_commands() -> None:
    pages = {command.page for command in OF_HEADWAY}
    assert {"README.md", "docs/recording.md", "docs/diagnosis.md", "docs/replay.md", "docs/index.md"} <= pages
    assert len(OF_HEADWAY) > 80


def test_messages_that_troubleshooting_quotes_are_in_the_source() -> None:
    quoted = re.findall(r'^\| "([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 7
    source = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    assert not [message for message in quoted if message not in source]


@pytest.mark.parametrize(
    "arguments", [["diagnose", "trace", "--no-such"], ["settings", "p", "--for", "nothing"]]
)
def test_an_option_or_value_that_does_not_exist_is_noticed(arguments: list[str]) -> None:
    with pytest.raises(click.ClickException):
        check(arguments)
