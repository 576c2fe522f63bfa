"""A worker's connection to its coordinator, made again whenever it is lost."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headway.coordination import messages, transport
from headway.coordination.membership import Member

if TYPE_CHECKING:
    import grpc.aio

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
CONNECT_S = 5.0
BEATS_A_LEASE = 4
MAX_UNSENT = 1024
FINAL = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Statuses after which trying again is of no use."""
MOST_REFUSED = 5
"""Connections in a row, over some two seconds, that another secret ends: an earlier job's coordinator may yet go."""


class LinkLostError(Exception):
    """A connection has ended."""


class Link:
    """Keeps one worker connected, on one event loop. The functions that it calls must not block.

    ``welcomed`` is called with each welcome, ``heard`` with each later message, ``lost`` with the reason whenever a
    connection ends or could not be made, and with ``final`` where none will be made again.
    """

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        member: Member,
        *,
        welcomed: Callable[[messages.Welcome], None],
        heard: Callable[[messages.AnyToWorker], None],
        lost: Callable[[str, bool], None],
    ) -> None:
        transport.require_grpc()
        self._host, self._port = transport.parse_address(address)
        transport.check_secret(self._host, secret)
        self._credentials = transport.client_credentials(secret)
        self._member = member
        self._session = secrets.token_hex(16)
        self._incarnation = 0
        self._welcomed, self._heard, self._lost = welcomed, heard, lost
        self._unsent: asyncio.Queue[messages.AnyToCoordinator] | None = None
        self._metrics: dict[str, float] | None = None
        self._round_trip_s: float | None = None
        self._beats: tuple[int, float] = (0, 0.0)
        self._heard_at = 0.0
        self._refused = 0  # times in a row
        self._has_left = False

    def say(self, message: messages.AnyToCoordinator) -> None:
        """Send a message where there is a connection."""
        if self._unsent is not None:
            with suppress(asyncio.QueueFull):  # the connection is dead, and is found to be so by its silence
                self._unsent.put_nowait(message)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Send these numbers with the next beat."""
        self._metrics = {**(self._metrics or {}), **metrics}

    async def run(self) -> None:
        """Stay connected until cancelled, or another connection would be of no use."""
        try:
            async with transport.channel(self._host, self._port, self._credentials) as channel:
                await self._stay_connected(channel)
        except Exception as failure:  # a defect: whoever waits for an answer is told that none will come
            self._lost(f"{type(failure).__name__}: {failure}", True)
            raise
        finally:
            self._unsent = None

    async def _stay_connected(self, channel: grpc.aio.Channel) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            reason, final = await self._connected(channel)
            final = final or self._has_left  # another hello would make it a member again
            self._unsent = None
            self._lost(reason, final)
            if final:
                return
            if time.monotonic() - begun > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _connected(self, channel: grpc.aio.Channel) -> tuple[str, bool]:
        """Serve one connection to its end; returns why it ended, and whether that is final."""
        import grpc.aio

        call: Any = channel.stream_stream(f"/{transport.SERVICE}/{transport.METHOD}")()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(CONNECT_S):
                lease_s = await self._greet(call)
            tasks = [
                asyncio.create_task(work)
                for work in (self._read(call), self._write(call), self._beat(lease_s))
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.aio.AioRpcError as failure:
            self._refused = self._refused + 1 if _shows_another_secret(failure) else 0
            hopeless = not self._incarnation and self._refused >= MOST_REFUSED
            return _reason(failure), hopeless or failure.code().name in FINAL
        except asyncio.InvalidStateError as failure:  # written to after it has ended
            return str(failure), False
        except TimeoutError:
            return "no answer in time", False
        except (LinkLostError, messages.MalformedError) as failure:
            return str(failure), False
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
        raise AssertionError("unreachable")

    async def _greet(self, call: Any) -> float:
        """Say hello; returns the lease."""
        member = self._member
        said = messages.MemberModel(
            worker=member.worker, incarnation=self._incarnation, address=member.address, host=member.host
        )
        hello = messages.Hello(protocol=messages.PROTOCOL, session=self._session, member=said)
        await call.write(messages.encode(hello))
        welcome = await self._next(call)
        if not isinstance(welcome, messages.Welcome):
            raise LinkLostError("the coordinator did not welcome the worker")
        self._incarnation = welcome.incarnation
        self._unsent = asyncio.Queue(MAX_UNSENT)
        self._welcomed(welcome)
        return welcome.lease_s

    async def _next(self, call: Any) -> messages.AnyToWorker:
        import grpc.aio

        data = await call.read()
        if data is grpc.aio.EOF:
            code, details = await call.code(), await call.details()
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), details
            )
        self._heard_at = time.monotonic()
        return messages.for_worker(data)

    async def _read(self, call: Any) -> None:
        while True:
            message = await self._next(call)
            if isinstance(message, messages.Beaten):
                number, sent_at = self._beats
                if message.number == number:
                    self._round_trip_s = self._heard_at - sent_at
            else:
                self._heard(message)

    async def _write(self, call: Any) -> None:
        unsent = self._unsent
        assert unsent is not None
        while True:
            message = await unsent.get()
            await call.write(messages.encode(message))
            if isinstance(message, messages.Leave):
                self._has_left = True
                await call.done_writing()

    async def _beat(self, lease_s: float) -> None:
        """Say that the worker is alive; a coordinator that does not answer for a lease is given up."""
        while True:
            now = time.monotonic()
            if now - self._heard_at > lease_s:
                raise LinkLostError("the coordinator is silent")
            number = self._beats[0] + 1
            self._beats = (number, now)
            metrics, self._metrics = self._metrics, None
            self.say(messages.Beat(number=number, round_trip_s=self._round_trip_s, metrics=metrics))
            await asyncio.sleep(lease_s / BEATS_A_LEASE)


def _shows_another_secret(failure: grpc.aio.AioRpcError) -> bool:
    return "SSL_ERROR_SSL" in (failure.details() or "")


def _reason(failure: grpc.aio.AioRpcError) -> str:
    """Why a connection ended, without what gRPC says of itself."""
    if _shows_another_secret(failure):
        return "what answers there has another secret than this worker, or none"
    words = failure.details() or failure.code().name
    brief = re.sub(r"^failed to connect .*?ipv[46]:\S+ (Failed to connect to remote host: )?", "", words)
    if "handshake" in words.lower() or "Socket closed" in words:
        return f"{brief}; does it have the same secret?"
    return brief
