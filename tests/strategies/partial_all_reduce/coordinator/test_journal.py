"""The journal: what is torn is dropped, what is damaged or another's is refused, what grows is compacted."""

from __future__ import annotations

import stat
import zlib
from pathlib import Path

import pytest

from headway.strategies.partial_all_reduce.coordinator import journal
from headway.strategies.partial_all_reduce.coordinator import ledger as events
from headway.strategies.partial_all_reduce.coordinator.journal import Journal, JournalError
from headway.strategies.partial_all_reduce.coordinator.ledger import Ledger
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

ALL = GeneratorChoice("all")


def write(path: Path, workers: int) -> Ledger:
    """The journal of a job whose workers have joined, and the ledger that it is of."""
    kept = Journal(path, str(ALL))
    ledger = kept.open(ALL.make, "job")
    happens: list[events.AnyEvent] = [events.Booted(now_ns=0, boot="00000000")]
    happens += [joined(worker) for worker in range(workers)]
    for event in happens:
        kept.append(event, ledger.apply(event))
    kept.close()
    return ledger


def joined(worker: int) -> events.Joined:
    return events.Joined(now_ns=worker, worker=worker, session="0" * 32, address="a:1", host="a")


def read(path: Path, choice: GeneratorChoice = ALL) -> Ledger:
    kept = Journal(path, str(choice))
    try:
        return kept.open(choice.make, "another job")
    finally:
        kept.close()


def test_another_coordinator_goes_on_with_all_that_was_known(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_twice(path, write(path, 3)).job == "job"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def read_twice(path: Path, before: Ledger) -> Ledger:
    for _ in range(2):
        ledger = read(path)
        assert ledger.snapshot() == before.snapshot()
    return ledger


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    before = write(path, 2)
    whole = path.read_bytes()
    write_with_one_more = whole + whole.splitlines(keepends=True)[-1][:cut]
    path.write_bytes(write_with_one_more)
    read_twice(path, before)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_damaged_line_is_refused(tmp_path: Path, line: int) -> None:
    path = tmp_path / "journal"
    write(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"', b"'", 1)
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=f"damaged at line {line + 1}"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"no journal\n", b"00000000 {}\n"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="damaged at line 1"):
        read(path)


def test_a_line_that_is_too_deep_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    text = b"[" * 200_000 + b"]" * 200_000
    path.write_bytes(path.read_bytes() + b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(JournalError, match="damaged at line"):
        read(path)


def test_the_journal_of_another_generator_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    with pytest.raises(JournalError, match="belongs to a different coordinator; got generator all"):
        read(path, GeneratorChoice("random", {"group_size": 2}))


def test_answers_of_another_version_of_the_generator_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    kept = Journal(path, str(ALL))
    ledger = kept.open(ALL.make, "job")
    ledger.apply(joined(0))
    kept.append(joined(0), [])
    said = ledger.apply(events.Asked(now_ns=1, worker=0, iteration=0))
    assert len(said) == 1
    kept.append(events.Asked(now_ns=1, worker=0, iteration=0), [])
    kept.close()
    with pytest.raises(JournalError, match="damaged at line 3, or another version"):
        read(path)


def test_one_coordinator_uses_it_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path, str(ALL))
    with pytest.raises(JournalError, match="in use"):
        Journal(path, str(ALL))
    first.close()
    Journal(path, str(ALL)).close()


def test_what_has_grown_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "COMPACT_BYTES", 4000)
    path = tmp_path / "journal"
    kept = Journal(path, str(ALL))
    ledger = kept.open(ALL.make, "job")
    for turn in range(1000):
        for event in (
            joined(turn % 7).model_copy(update={"now_ns": turn}),
            events.Left(now_ns=turn, worker=turn % 7, reason="left"),
        ):
            kept.append(event, ledger.apply(event))
        if kept.is_due:
            kept.compact(ledger)
    kept.close()
    assert path.stat().st_size < 10_000
    read_twice(path, ledger)
