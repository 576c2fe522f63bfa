from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import UnitError, UserError
from headway.units import (
    alternatives,
    format_bytes,
    format_rate,
    options_in,
    parse_duration_s,
    parse_factor,
    parse_rate_gbps,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        ("400mbit", 0.4),
        ("10gbit", 10.0),
        ("10 Gbit/s", 10.0),
        ("1gbps", 1.0),
        ("56kbit", 56e-6),
        ("1.5Tbit", 1500.0),
    ],
)
def test_rates_are_read_as_people_write_them(text: str, gbps: float) -> None:
    assert parse_rate_gbps(text) == pytest.approx(gbps)


@pytest.mark.parametrize(
    "text", ["0mbit", "10 gigabit", "10", "", "-1gbit", "nan", "1e999gbit", 10, None, "x" * 100]
)
def test_what_is_no_rate_is_refused_on_one_line(text: object) -> None:
    with pytest.raises(UnitError) as caught:
        parse_rate_gbps(text)
    assert "\n" not in str(caught.value)
    assert "expected a rate" in str(caught.value)


def test_durations_may_be_zero_only_where_asked() -> None:
    assert parse_duration_s("200ms") == pytest.approx(0.2)
    assert parse_duration_s("0s", zero=True) == 0
    with pytest.raises(UnitError):
        parse_duration_s("0s")


def test_factors_take_an_optional_x() -> None:
    assert parse_factor("2x") == 2
    assert parse_factor("0.5") == 0.5
    with pytest.raises(UnitError):
        parse_factor("0x")


@given(st.floats(min_value=1e-8, max_value=1e4))
def test_a_written_rate_reads_back_within_its_digits(gbps: float) -> None:
    assert parse_rate_gbps(format_rate(gbps)) == pytest.approx(gbps, rel=0.01)


def test_sizes_are_written_with_decimal_prefixes() -> None:
    assert format_bytes(8_400_000) == "8.4 MB"
    assert format_bytes(12) == "12 B"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1500", 1500),
        ("800M", 800_000_000),
        ("1.5 GB", 1_500_000_000),
        ("16GiB", 16 * 2**30),
        ("64Ki", 65_536),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "much", "-3M", "0", "5 parsecs", "1Gbit", None, "9" * 100])
def test_other_sizes_are_refused(text: object) -> None:
    with pytest.raises(UnitError):
        parse_size_bytes(text, "--memory-limit")


def test_options_keep_lists_together() -> None:
    assert options_in("caps=[1,25],names=['a,b',{c: [d]}],x=1", "it") == [
        ("caps", "[1,25]"),
        ("names", "['a,b',{c: [d]}]"),
        ("x", "1"),
    ]
    assert options_in("", "it") == []
    assert options_in("x=1,", "it") == [("x", "1")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "has no value"),
        ("caps=1,25", r"Write several values as a list: caps=\[1,25\]"),
        ("caps=[1,25", "] is missing at the end"),
        ("caps=1,25]", "unmatched closing bracket"),
        ("caps=[1,25}", "unmatched closing bracket"),
        ("name='a", "' is missing"),
    ],
)
def test_malformed_options_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        options_in(text, "it")


def test_alternatives_are_every_combination() -> None:
    assert alternatives("ddp", 9, "it") == ["ddp"]
    assert alternatives("ddp:a=1|2,b=[3|4],c=x|y", 9, "it") == [
        "ddp:a=1,b=[3|4],c=x",
        "ddp:a=1,b=[3|4],c=y",
        "ddp:a=2,b=[3|4],c=x",
        "ddp:a=2,b=[3|4],c=y",
    ]
    with pytest.raises(UserError, match="too many alternatives"):
        alternatives("ddp:a=1|2,b=1|2", 3, "it")
