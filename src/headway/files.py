"""Reads and writes files: bounded reads, atomic writes, and YAML validated against a schema."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from headway.errors import UserError, did_you_mean
from headway.version import __version__

MAX_TEXT_BYTES = 64 * 2**20
MAX_YAML_BYTES = 8 * 2**20
MAX_YAML_VALUES = 2_000_000  # in a document, with aliases expanded
MAX_NUMBER_CHARACTERS = 100
REMOVALS = 20
LOCK_FILE = ".held"  # a file in a temporary folder, locked by the process that made it

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# C1 controls, and characters that reverse, break or hide text on a terminal.
_UNSAFE_TO_PRINT = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
_Model = TypeVar("_Model", bound=BaseModel)


def read_text(path: Path, error: type[UserError], what: str, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a text file of at most ``limit_bytes``; raises ``error`` if that fails."""
    try:
        with open_regular(path, error, what) as file:
            data = file.read(limit_bytes + 1)
            if len(data) > limit_bytes:
                got = f"{max(len(data), os.fstat(file.fileno()).st_size)} bytes"
                raise error(f"{what} {path} is too large", got=got, expected=f"at most {limit_bytes}")
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except FileNotFoundError:
        raise error(f"{what} not found", got=path, expected="a file that exists") from None
    except UnicodeDecodeError:
        raise error(f"{what} is not text", got=path, expected="UTF-8") from None
    except OSError as failure:
        raise error(f"{what} {path} cannot be read", got=failure.strerror) from None


def open_regular(path: Path, error: type[UserError], what: str) -> IO[bytes]:
    """Open a regular file for reading; raises ``error`` for a device or a pipe, OSError like ``open``."""
    file: IO[bytes] = open(path, "rb", opener=_opened_at_once)  # noqa: SIM115 - Path.open takes no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise error(f"{what} {path} is not a file", got="a device or a pipe", expected="a regular file")
    return file


def _opened_at_once(path: str, flags: int) -> int:
    """Open without blocking: a pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_text(path: Path, text: str, error: type[UserError] = UserError) -> None:
    """Write a text file atomically."""
    with file_written_whole(path, error) as file:
        file.write(text.encode())


def check_writable(path: Path, error: type[UserError] = UserError) -> None:
    """Raise ``error`` if a file cannot be written at ``path``; call it before long work."""
    if _is_device(path):
        return
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise error(
            f"{path} cannot be written",
            got=f"no permission to write to {folder}" if folder.is_dir() else f"no folder {folder}",
            fix="Create the folder, or choose another.",
        )


def _is_device(path: Path) -> bool:
    """Whether ``path`` is a pipe, a terminal, /dev/null or the like, which is written in place."""
    return path.exists() and not (path.is_file() or path.is_dir())


@contextmanager
def file_written_whole(path: Path, error: type[UserError] = UserError) -> Iterator[IO[bytes]]:
    """Yield a file that replaces ``path`` when the block succeeds, so that readers never see a partial file.

    Symbolic links are followed. Devices, such as a pipe or /dev/null, are written in place.
    """
    try:
        if _is_device(path):
            with path.open("wb") as device:
                yield device
            return
        path = Path(os.path.realpath(path))
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as failure:
        raise error(
            f"{path} cannot be written", got=failure.strerror, fix="Check the folder and its rights."
        ) from None


@contextmanager
def folder_written_whole(path: Path, error: type[UserError] = UserError) -> Iterator[Path]:
    """Yield a folder that is renamed to ``path`` when the block succeeds."""
    check_absent(path, error)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as failure:
        raise error(
            f"{path} cannot be written", got=failure.strerror, fix="Check the folder and its rights."
        ) from None
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.replace(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder if it exists, even while other processes write into it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.removed")
    with suppress(OSError):
        path.rename(aside)
    for _ in range(REMOVALS):  # a process that had it open may still add a file
        for folder in (aside, path):
            shutil.rmtree(folder, ignore_errors=True)
        if not aside.exists():
            return


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new private folder in ``parent`` (default: the system's temporary folder), removed at the end of the block.

    The process that makes it holds a lock on a file in it. Thus folders with the same ``prefix`` that were left by killed
    processes can be told from those in use, even across containers, and are removed. Raises OSError.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / f"{LOCK_FILE}.new").open("wb") as held:
            with suppress(OSError):  # without file locks, abandoned folders are not removed
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(held.name).replace(folder / LOCK_FILE)
            yield folder
    finally:
        remove_folder(folder)


def _remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove this user's folders that begin with ``prefix`` and are no longer locked."""
    with suppress(OSError):
        for entry in os.scandir(parent):
            if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
                continue
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                handle = os.open(Path(entry.path, LOCK_FILE), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(Path(entry.path))
                finally:
                    os.close(handle)


def check_absent(path: Path, error: type[UserError] = UserError) -> None:
    """Raise ``error`` if ``path`` exists: an earlier recording is worth keeping."""
    try:
        taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    except OSError as failure:
        raise error(
            f"{path} cannot be written", got=failure.strerror, fix="Check the folder and its rights."
        ) from None
    if taken:
        raise error(
            "the output already exists",
            got=path,
            expected="a new name",
            fix="Choose another name, or remove it.",
        )


def parse_yaml(text: str, model: type[_Model], error: type[UserError], what: str) -> _Model:
    """Validate YAML ``text`` as ``model``; the first complaint becomes one line of ``error``."""
    return validate(plain_yaml(text, error, what), model, error, what)


def plain_yaml(text: str, error: type[UserError], what: str) -> object:
    """Parse YAML ``text`` into plain data. Raises ``error`` in one line if it is invalid or too large."""
    if len(text) > MAX_YAML_BYTES:
        raise error(f"{what} is too large", got=f"{len(text)} bytes", expected=f"at most {MAX_YAML_BYTES}")
    try:
        return _plain(text)
    except _RefusedError as refused:
        raise error(f"{what} {refused}") from None
    # Invalid dates, numbers and truth values raise plain errors.
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise error(f"{what} is not valid YAML{where}", expected="a YAML mapping") from None


class _RefusedError(Exception):
    """YAML that is valid, but too large or surely a mistake."""


def _plain(text: str) -> Any:
    """Parse ``text``, after checking that its data fits in memory."""
    loader = _YamlLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _values_of(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values_of(node: Any, counts: dict[int, int]) -> int:
    """Count the values of a node, with aliases expanded. Raises _RefusedError for too many, or for a repeated key."""
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
        return 1
    values = counts.get(id(node))
    if values is None:
        counts[id(node)] = MAX_YAML_VALUES  # until it is known, for what contains itself
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            parts = [part for pair in node.value for part in pair]
        else:
            parts = node.value
        values = counts[id(node)] = 1 + sum(_values_of(part, counts) for part in parts)
    if values > MAX_YAML_VALUES:
        raise _RefusedError(f"stands for more than {MAX_YAML_VALUES} values: write fewer aliases (*name)")
    return values


def _check_scalar(node: yaml.ScalarNode) -> None:
    where = f"at line {node.start_mark.line + 1}"
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _RefusedError(f"has an invalid character {where}")
    if node.tag in _NUMBERS:
        if len(node.value) > MAX_NUMBER_CHARACTERS:
            raise _RefusedError(f"has a number of {len(node.value)} characters {where}")
        if ":" in node.value:  # YAML 1.1 has numbers in base 60, which take quadratic time to parse
            raise _RefusedError(
                f"has {node.value!r} {where}, which is a number in base 60: write it in quotes"
            )


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise _RefusedError(
                    f"has the key {key.value!r} twice, again at line {key.start_mark.line + 1}"
                )
            seen.add(key.value)


def validate(data: object, model: type[_Model], error: type[UserError], what: str) -> _Model:
    """Validate plain ``data`` as ``model``; the first complaint becomes one line of ``error``."""
    if not isinstance(data, dict):
        raise error(f"{what} is not a mapping", got=type(data).__name__, expected="keys and values")
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        raise _first_complaint(failure, error, what, model.model_fields) from None


def _first_complaint(
    failure: ValidationError, error: type[UserError], what: str, names: Iterable[str] = ()
) -> UserError:
    complaint = failure.errors(include_url=False)[0]
    where = ".".join(str(part) for part in complaint["loc"]) or "the document"
    if complaint["type"] == "extra_forbidden":
        alike = did_you_mean(where, names) if len(complaint["loc"]) == 1 else ""
        return error(f"{what}: unknown key {where}", fix=alike or "Remove it, or check its spelling.")
    if complaint["type"] == "missing":
        return error(f"{what}: {where} is missing", fix="Add it.")
    message = complaint["msg"].removeprefix("Value error, ")
    # Complaints about a whole mapping need no input.
    if complaint["type"] == "value_error" and isinstance(complaint["input"], Mapping):
        return error(f"{what}: {where}: {message}" if complaint["loc"] else f"{what}: {message}")
    return error(f"{what}: {where}: {message}", got=repr(complaint["input"]))


def dump_yaml(data: dict[str, Any]) -> str:
    """Write plain data as YAML in the order given."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)


def document(kind: str, **fields: Any) -> dict[str, Any]:
    """Head a ``--json`` document with Headway's version and the document's kind."""
    return {"headway": __version__, "kind": kind, **fields}


def dump_json(data: object) -> str:
    """Write strict JSON, without NaN and infinity, that is safe to print on a terminal."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=2) + "\n"
    return _UNSAFE_TO_PRINT.sub(lambda unsafe: f"\\u{ord(unsafe[0]):04x}", text)
