"""A coordinator as the whole work of a process, until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from headway.coordination.service.generator_choice import GeneratorChoice
from headway.coordination.service.observer import Observer
from headway.coordination.service.options import ServiceOptions
from headway.coordination.service.server import Server
from headway.errors import InternalError, UserError


def serve(
    listen: str,
    choice: GeneratorChoice,
    options: ServiceOptions,
    observer: Observer,
    ready: Callable[[str], None],
    *,
    until_input_ends: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, or the end of standard input; calls ``ready`` with the address first.

    Raises UserError where it cannot listen or the journal cannot be used or written, InternalError for a fault of a
    generator.
    """
    asyncio.run(_serve(listen, choice, options, observer, ready, until_input_ends=until_input_ends))


async def _serve(
    listen: str,
    choice: GeneratorChoice,
    options: ServiceOptions,
    observer: Observer,
    ready: Callable[[str], None],
    *,
    until_input_ends: bool,
) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    if until_input_ends:
        await _watch_input(told)
    server = Server(choice.make, str(choice), options, observer)
    await server.start(listen)
    ready(server.address)
    ends, fails = asyncio.create_task(told.wait()), asyncio.create_task(server.failure())
    try:
        await asyncio.wait((ends, fails), return_when=asyncio.FIRST_COMPLETED)
        failure = fails.result() if fails.done() else None
    finally:
        ends.cancel()
        fails.cancel()
        await server.stop()
    if isinstance(failure, OSError):
        raise UserError(
            f"the journal {options.journal} cannot be written", got=failure.strerror,
            fix="Make room, and start the coordinator again: workers come back by themselves.",
        )  # fmt: skip
    if failure is not None:
        raise InternalError(f"the coordinator cannot go on: {failure!r}") from failure


async def _watch_input(told: asyncio.Event) -> None:
    class Input(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            told.set()

    await asyncio.get_running_loop().connect_read_pipe(Input, sys.stdin)
