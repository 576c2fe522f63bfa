"""The gRPC server of a coordinator, with one bidirectional stream per worker."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headway.errors import InternalError, UserError
from headway.rpc.interface import format_address
from headway.strategies.partial_all_reduce.coordinator import messages, transport
from headway.strategies.partial_all_reduce.coordinator.journal import Journal
from headway.strategies.partial_all_reduce.coordinator.ledger import Ledger, MakeGenerator
from headway.strategies.partial_all_reduce.coordinator.observer import Observer
from headway.strategies.partial_all_reduce.coordinator.options import (
    SPARE_CONNECTIONS,
    GeneratorChoice,
    ServiceOptions,
)
from headway.strategies.partial_all_reduce.coordinator.service import (
    RefusedError,
    Service,
    ServiceFailedError,
    Stream,
)

if TYPE_CHECKING:
    import grpc.aio


Context = Any
"""A ``grpc.aio.ServicerContext``: gRPC has no types."""
STOP_S = 1.0
LAST_MESSAGE_S = 1.0
"""Time in which a closing connection may finish its last message."""
_log = logging.getLogger("headway")


class Server:
    """A listening coordinator. ``make_generator`` creates the generator that ``description`` describes."""

    def __init__(
        self,
        make_generator: MakeGenerator,
        description: str,
        options: ServiceOptions,
        observer: Observer | None = None,
    ) -> None:
        transport.require_grpc()
        self._make_generator, self._description = make_generator, description
        self._options = options
        self._observer = observer or Observer()
        self._journal: Journal | None = None
        self._service: Service | None = None
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, listen: str) -> None:
        """Listen on HOST:PORT; port 0 picks a free port. Raises UserError if that fails."""
        host, port = transport.parse_address(listen, "the address to listen on")
        transport.check_secret(host, self._options.secret)
        try:
            self._service = Service(
                self._ledger(),
                self._journal,
                self._options.lease_s,
                self._options.max_workers,
                self._observer,
                self._description,
            )
            self._server = self._listening(host, port)
            with suppress(ServiceFailedError):  # ``failure`` says so
                self._service.begin()
            await self._server.start()
        except BaseException:
            await self.stop()
            raise

    async def failure(self) -> Exception:
        """Wait until the coordinator fails; returns the reason."""
        assert self._service is not None
        return await asyncio.shield(self._service.failed)

    async def stop(self) -> None:
        """Close every connection and the journal."""
        if self._service:
            self._service.end()
        if self._server:
            await self._server.stop(STOP_S)
        if self._journal:
            journal, self._journal = self._journal, None
            with suppress(OSError):
                journal.close()

    def _ledger(self) -> Ledger:
        job = secrets.token_hex(4)
        if self._options.journal is None:
            return Ledger(self._make_generator, job)
        self._journal = Journal(self._options.journal, self._description)
        return self._journal.open(self._make_generator, job)

    def _listening(self, host: str, port: int) -> grpc.aio.Server:
        import grpc.aio

        options = self._options
        connections = options.max_workers + SPARE_CONNECTIONS
        server = grpc.aio.server(
            options=transport.server_options(options.handshake_s, options.idle_s, connections),
            maximum_concurrent_rpcs=connections,
        )
        method = grpc.stream_stream_rpc_method_handler(self._connect)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(transport.SERVICE, {transport.METHOD: method}),)
        )
        target = format_address(host, port)
        try:
            if options.secret is None:
                bound = server.add_insecure_port(target)
            else:
                from headway.strategies.partial_all_reduce.coordinator.security import server_credentials

                bound = server.add_secure_port(target, server_credentials(options.secret))
        except RuntimeError:
            bound = 0
        if not bound:
            raise UserError(
                f"cannot listen on {target}", expected="a local address with a free port",
                fix="Choose another port, or 0 for any free port.",
            )  # fmt: skip
        self.address = format_address(host, bound)
        return server

    async def _connect(self, _requests: Any, context: Context) -> None:
        """Serve one worker until its connection ends."""
        import grpc

        assert self._service is not None
        stream, sending = Stream(), asyncio.Lock()
        tasks: list[asyncio.Task[None]] = []

        async def last_message_sent() -> None:
            # gRPC loses a status sent while a message is in flight, and the worker would wait forever.
            with suppress(TimeoutError):
                await asyncio.wait_for(sending.acquire(), LAST_MESSAGE_S)

        async def end(status: str, words: str) -> None:
            await last_message_sent()
            await context.abort(grpc.StatusCode[status], words)

        try:
            await self._greet(context, stream)
            tasks = [
                asyncio.create_task(self._read(context, stream)),
                asyncio.create_task(_write(context, stream, sending)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await last_message_sent()
        except RefusedError as refused:
            status, words = refused.refusal
            _log.info("connection from %s ends: %s", context.peer(), words)
            await end(status, words)
        except messages.MalformedError as failure:
            _log.warning("malformed message from %s: %s", context.peer(), failure)
            await end("INVALID_ARGUMENT", f"malformed message: {failure}")
        except ServiceFailedError:
            await end("UNAVAILABLE", "the coordinator has failed")
        finally:
            for task in tasks:
                task.cancel()
            with suppress(ServiceFailedError):
                self._service.lost(stream)

    async def _greet(self, context: Context, stream: Stream) -> None:
        import grpc.aio

        assert self._service is not None
        try:
            first = await asyncio.wait_for(context.read(), self._options.handshake_s)
        except TimeoutError:
            raise RefusedError("DEADLINE_EXCEEDED", "no hello message") from None
        if first is grpc.aio.EOF:
            raise RefusedError("INVALID_ARGUMENT", "no hello message")
        hello = messages.for_coordinator(first)
        if not isinstance(hello, messages.Hello):
            raise RefusedError("INVALID_ARGUMENT", "the first message must be hello")
        self._service.welcome(hello, stream)

    async def _read(self, context: Context, stream: Stream) -> None:
        import grpc.aio

        assert self._service is not None
        while (data := await context.read()) is not grpc.aio.EOF:
            self._service.heard(stream, messages.for_coordinator(data))


async def _write(context: Context, stream: Stream, sending: asyncio.Lock) -> None:
    while True:
        message = messages.encode(await stream.next())
        async with sending:
            await context.write(message)


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

    Raises UserError if it cannot listen or cannot use or write the journal, InternalError if the generator fails.
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
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_input_ends:
        await _watch_input(stop)
    server = Server(choice.make, str(choice), options, observer)
    await server.start(listen)
    ready(server.address)
    ends, fails = asyncio.create_task(stop.wait()), asyncio.create_task(server.failure())
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
            fix="Free disk space and restart the coordinator: workers reconnect by themselves.",
        )  # fmt: skip
    if failure is not None:
        raise InternalError(f"the coordinator failed: {failure!r}") from failure


async def _watch_input(stop: asyncio.Event) -> None:
    class Input(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            stop.set()

    await asyncio.get_running_loop().connect_read_pipe(Input, sys.stdin)
