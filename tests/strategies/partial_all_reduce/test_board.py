"""Boards: values that members of a group leave each other, within bounds."""

from __future__ import annotations

import threading
import time

import pytest

from headway.strategies.partial_all_reduce import peers as boards
from headway.strategies.partial_all_reduce.peers import Board, RoomClosedError


def soon() -> float:
    return time.monotonic() + 30.0


def test_values_are_waited_for() -> None:
    board = Board()
    found: list[list[bytes]] = []
    waiting = threading.Thread(target=lambda: found.append(board.get("g", ["a", "b"], soon())))
    waiting.start()
    board.put("g", "b", b"2")
    board.put("g", "a", b"1")
    waiting.join(30.0)
    assert found == [[b"1", b"2"]]


def test_who_waits_in_vain_is_told_at_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        Board().get("g", ["a"], time.monotonic())


def test_a_closed_room_is_closed_for_those_that_wait_and_those_that_come_later() -> None:
    board = Board()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            board.get("g", ["a"], soon())
        except RoomClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    board.close("g")
    waiting.join(30.0)
    assert len(errors) == 1
    with pytest.raises(RoomClosedError):
        board.put("g", "a", b"")
    assert board.rooms == 0


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "MAX_ROOMS", 3)
    monkeypatch.setattr(boards, "MAX_KEYS", 2)
    board = Board()
    for number in range(5):
        board.put(f"g{number}", "a", b"")
    assert board.rooms == 3
    with pytest.raises(RoomClosedError):
        board.get("g0", ["a"], soon())
    with pytest.raises(ValueError, match="room is full"):
        board.put("g4", "b", b"0" * (boards.MAX_VALUE_BYTES + 1))
    board.put("g4", "b", b"")
    with pytest.raises(ValueError, match="room is full"):
        board.put("g4", "c", b"")
