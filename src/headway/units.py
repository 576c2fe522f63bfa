"""Parses rates, durations, sizes, factors and options as users write them; formats rates, sizes and counts.

Rates are bits a second with decimal prefixes, as usual for networks (``400mbit``, ``10 Gbit/s``).
Sizes are bytes, written with decimal prefixes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product

from headway.errors import UnitError, UserError

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")

_GBPS = {"bit": 1e-9, "kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
_RATE_UNITS = {f"{unit}{suffix}": scale for unit, scale in _GBPS.items() for suffix in ("", "/s", "ps")}
_RATE_UNITS |= {"bps": 1e-9, "kbps": 1e-6, "mbps": 1e-3, "gbps": 1.0, "tbps": 1e3}
_SECOND_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SIZE_UNITS = {"": 1.0}
for _power, _prefix in enumerate("kmgt", start=1):
    _SIZE_UNITS |= {f"{_prefix}{end}": 1000.0**_power for end in ("", "b")}
    _SIZE_UNITS |= {f"{_prefix}i{end}": 1024.0**_power for end in ("", "b")}
_SIZE_UNITS["b"] = 1.0

RATE_FORM = "a rate such as 400mbit or 10gbit"
DURATION_FORM = "a duration such as 200ms or 5s"
SIZE_FORM = "a size in bytes such as 800M or 16GiB"
FACTOR_FORM = "a factor such as 2x or 0.5x"


def _parse(text: object, units: dict[str, float], what: str, form: str, *, zero: bool = False) -> float:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) and len(text) <= 64 else None
    scale = units.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UnitError(f"{what} cannot be read", got=repr(text), expected=form)
    value = float(match.group(1)) * scale
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise UnitError(f"{what} is out of range", got=repr(text), expected=f"{form}, more than 0")
    return value


def parse_rate_gbps(text: object, what: str = "rate") -> float:
    """Read a link rate, in Gbit/s. Raises UnitError for 0, a bare number or an unknown unit."""
    return _parse(text, _RATE_UNITS, what, RATE_FORM)


def parse_duration_s(text: object, what: str = "duration", *, zero: bool = False) -> float:
    """Read a duration, in seconds. Raises UnitError for an unknown unit, and for 0 unless ``zero``."""
    return _parse(text, _SECOND_UNITS, what, DURATION_FORM, zero=zero)


def parse_size_bytes(text: object, what: str = "size") -> int:
    """Read a size, in bytes: ``k``, ``M``, ``G`` and ``T`` are powers of 1000, ``Ki`` and so on of 1024.

    Raises UnitError for 0 and for other forms.
    """
    return round(_parse(text, _SIZE_UNITS, what, SIZE_FORM))


def parse_factor(text: object, what: str = "factor") -> float:
    """Read a factor such as ``2x``. Raises UnitError for 0 and for other forms."""
    return _parse(text, {"x": 1.0, "": 1.0}, what, FACTOR_FORM)


def format_rate(gbps: float) -> str:
    """Write a rate in the unit people would use: ``400 Mbit/s``."""
    for scale, unit in ((1.0, "Gbit/s"), (1e-3, "Mbit/s"), (1e-6, "kbit/s")):
        if gbps >= scale:
            return f"{gbps / scale:.3g} {unit}" if gbps / scale < 1000 else f"{gbps / scale:.0f} {unit}"
    return f"{gbps * 1e9:.3g} bit/s"


def format_bytes(size_bytes: float) -> str:
    """Write a size with decimal prefixes: ``8.4 MB``."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number and what it counts: ``1 rank``, ``12,000 steps``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


_CLOSING = {"[": "]", "{": "}"}
LIST_FORM = "comma-separated options, lists in brackets: a=1,b=[2,3]"


def options_in(text: str, what: str, fault: Callable[..., UserError] = UserError) -> list[tuple[str, str]]:
    """The options of ``KEY=VALUE,KEY=VALUE``, in order; commas inside brackets or quotes belong to values.

    Raises ``fault`` for an option without a value, or an open bracket or quote.
    """
    options: list[tuple[str, str]] = []
    for part in filter(None, _split(text, ",", what, fault)):
        key, equals, value = part.partition("=")
        if not equals:
            fix = (
                f"Write several values as a list: {options[-1][0]}=[{options[-1][1]},{part}]."
                if options
                else ""
            )
            raise fault(f"{what}: an option has no value", got=repr(part), expected=LIST_FORM, fix=fix)
        options.append((key.strip(), value.strip()))
    return options


def alternatives(text: str, most: int, what: str) -> list[str]:
    """``NAME:KEY=VALUE|VALUE,...`` as one text per combination of values; ``text`` alone if it has no ``|``.

    Raises UserError for more than ``most``, and for an open bracket or quote.
    """
    name, colon, rest = text.partition(":")
    if "|" not in rest:
        return [text]
    choices = []
    for part in _split(rest, ",", what, UserError):
        key, equals, values = part.partition("=")
        choices.append([f"{key}{equals}{value}" for value in _split(values, "|", what, UserError)])
    count = math.prod(map(len, choices))
    if count > most:
        raise UserError(f"{what} has too many alternatives", got=count, expected=f"at most {most}")
    return [f"{name}{colon}{','.join(chosen)}" for chosen in product(*choices)]


def _split(text: str, separator: str, what: str, fault: Callable[..., UserError]) -> list[str]:
    """Split ``text`` at separators that are neither in brackets nor in quotes."""
    parts, closing, quote, start = [], "", "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            closing = _CLOSING[character] + closing
        elif closing and character == closing[0]:
            closing = closing[1:]
        elif character in "]}":
            raise fault(f"{what}: unmatched closing bracket", got=repr(text), expected=LIST_FORM)
        elif character == separator and not closing:
            parts.append(text[start:place])
            start = place + 1
    if quote or closing:
        missing = quote or closing[0]
        raise fault(f"{what}: {missing} is missing at the end", got=repr(text), expected=LIST_FORM)
    return [*parts, text[start:]]
