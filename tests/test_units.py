"""Bytes and seconds survive being printed and read again, and what two people read differently is refused."""

import re
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.errors import UsageError
from autofit.units import (
    format_bytes,
    format_seconds,
    looks_like_size,
    parse_bytes,
    parse_seconds,
    unit_of,
)

settings.register_profile("units", deadline=None)  # a busy machine must not fail a property
settings.load_profile("units")

DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
FACTORS = {**DECIMAL, **BINARY}
NUMBERS = st.decimals(min_value=Decimal("0.001"), max_value=10**6, places=3).map(lambda number: f"{number:f}")


def printed_step(text: str) -> float:
    """What one more in the last printed digit of `24.5 GiB` means, in bytes."""
    number, unit = text.split()
    return FACTORS[unit] / 10 ** len(number.partition(".")[2])


@given(st.integers(1, 2**60), st.sampled_from(sorted(FACTORS)))
def test_a_printed_size_reads_back_within_half_of_its_last_digit(amount, like):
    text = format_bytes(amount, like)
    assert abs(parse_bytes(text) - amount) <= printed_step(text) / 2 + 1  # 1: a part of a byte is cut off


@given(st.integers(1, 2**60), st.sampled_from(sorted(FACTORS)))
def test_a_size_is_printed_with_three_digits_or_more(amount, like):
    text = format_bytes(amount, like)
    assert text.endswith(" B") or len(re.sub(r"\D", "", text.split()[0])) >= 3


@given(st.integers(2**10, 2**60), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]))
def test_a_size_is_printed_in_the_family_of_the_unit_asked_for(amount, like):
    assert format_bytes(amount, like).split()[1] in (BINARY if like in BINARY else DECIMAL)


@given(st.integers(1, 2**60))
def test_the_sign_of_a_size_is_printed_and_nothing_else_changes(amount):
    assert format_bytes(-amount) == f"-{format_bytes(amount)}"


def test_an_unknown_size_or_time_is_a_dash_and_zero_is_not():
    assert format_bytes(None) == format_seconds(None) == "–"
    assert format_bytes(0) == "0 B"


@given(NUMBERS, st.sampled_from(sorted(set(FACTORS) - {"B"})), st.sampled_from(["", " ", "  "]))
def test_a_written_size_is_read_exactly(number, unit, gap):
    assert parse_bytes(f" {number}{gap}{unit} ") == int(Decimal(number) * FACTORS[unit])


@given(st.integers(1, 10**6), st.sampled_from("KMGT"))
def test_decimal_and_binary_units_differ(number, letter):
    decimal, binary = parse_bytes(f"{number}{letter}B"), parse_bytes(f"{number}{letter}iB")
    assert decimal * 1.02 < binary < decimal * 1.10


def test_24_gb_are_24_times_ten_to_the_nine_and_24_gib_are_more():
    assert parse_bytes("24GB") == 24_000_000_000
    assert parse_bytes("24GiB") == 25_769_803_776


@given(NUMBERS, st.sampled_from(sorted(FACTORS)))
def test_the_case_of_a_unit_does_not_matter(number, unit):
    text = f"{int(Decimal(number)) + 1}{unit}"
    assert parse_bytes(text.lower()) == parse_bytes(text.upper()) == parse_bytes(text)


@given(NUMBERS)
def test_a_bare_number_is_refused_with_both_readings(number):
    with pytest.raises(UsageError) as refusal:
        parse_bytes(number)
    assert f"{number}GB" in str(refusal.value)
    assert f"{number}GiB" in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["", "GB", "-3GB", "0GB", "0.0GiB", "1e3GB", "3 G B", "24GX", "24G", ".5GB", "nanGB", "infGB"]
)
def test_what_is_no_amount_of_memory_is_refused_with_the_text_itself(text):
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_bytes(text)


def test_an_amount_beyond_any_machine_is_a_number_or_a_usage_error_but_no_crash():
    with suppress(UsageError):
        assert parse_bytes("9" * 400 + "GB") > 10**400


@given(st.text(max_size=12))
def test_any_text_is_a_positive_amount_or_a_usage_error(text):
    try:
        assert parse_bytes(text) > 0
        assert looks_like_size(text)
    except UsageError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize("name", ["rtx-3090", "t4", "a100-80gb", "cpu", "h100 80GB"])
def test_the_name_of_a_card_does_not_look_like_a_size(name):
    assert not looks_like_size(name)


@given(NUMBERS, st.sampled_from(["", *sorted(FACTORS)]))
def test_a_number_looks_like_a_size_with_and_without_a_unit(number, unit):
    assert looks_like_size(number + unit)


@pytest.mark.parametrize(
    ("text", "unit"), [("24GB", "GB"), ("24 mib", "mib"), ("24", "GiB"), ("rtx-3090", "GiB"), ("24GX", "GiB")]
)
def test_the_unit_of_a_size_is_the_users_own_or_gib(text, unit):
    assert unit_of(text) == unit
    assert format_bytes(2**31, unit).split()[1] in ("GB", "GiB")


@given(st.floats(0.01, 59.4))
def test_a_printed_time_below_a_minute_reads_back_within_its_printed_digits(seconds):
    text = format_seconds(seconds)
    decimals = len(text.split()[0].partition(".")[2])
    assert parse_seconds(text) == pytest.approx(seconds, abs=0.5 * 10**-decimals + 1e-9)


@given(st.floats(60, 10**7))
def test_a_printed_longer_time_adds_up_to_the_time_within_its_last_unit(seconds):
    words = format_seconds(seconds).split()
    parts = [parse_seconds(f"{number} {unit}") for number, unit in zip(words[::2], words[1::2], strict=True)]
    assert abs(sum(parts) - seconds) <= (60 if words[-1] == "min" else 1)
    assert parts[1] < {"min": 60, "h": 3600}[words[1]]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("15 min", 900), ("1.5h", 5400), ("2 H", 7200)]
)
def test_a_written_time_is_read_in_its_unit(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1.5", "h", "-5s", "5 days", "1h30m", "1e3s"])
def test_what_is_no_time_is_refused_with_the_text_itself(text):
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_seconds(text)
