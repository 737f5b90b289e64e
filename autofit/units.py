"""Bytes and seconds as people write and read them.

Not here: budgets that name a card (`catalog.gpus`), nor what a budget means on a device (`machine`).
"""

import re
from fractions import Fraction

from autofit.errors import UsageError

_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {**_DECIMAL, **_BINARY, "b": 1}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

_DURATION_UNITS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def looks_like_size(text: str) -> bool:
    """Whether `text` is a number with or without a unit, rather than a name such as `rtx-3090`."""
    return _SIZE.fullmatch(text) is not None


def parse_bytes(text: str) -> int:
    """`24GB` is 24·10⁹ bytes and `24GiB` is 24·2³⁰. A bare number is refused, since both readings are in use.

    Raises UsageError.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not an amount of memory; write it like 24GB, 24GiB or 800MB")
    number, unit = match.groups()
    if not unit:
        raise UsageError(f"{text!r} has no unit; write {number}GB (10⁹ bytes) or {number}GiB (2³⁰ bytes)")
    if unit.lower() not in _UNITS:
        raise UsageError(f"{text!r} has the unknown unit {unit!r}; use one of KB, MB, GB, TB, KiB, MiB, GiB, TiB")
    amount = int(Fraction(number) * _UNITS[unit.lower()])
    if amount <= 0:
        raise UsageError(f"{text!r} is no memory at all; give a positive amount such as 24GB")
    return amount


def parse_seconds(text: str) -> float:
    """`90s`, `15m` or `1.5h`. A bare number is refused. Raises UsageError."""
    match = _DURATION.fullmatch(text)
    if match is None or match.group(2).lower() not in _DURATION_UNITS:
        raise UsageError(f"{text!r} is not a time; write it like 90s, 15m or 1.5h")
    return float(match.group(1)) * _DURATION_UNITS[match.group(2).lower()]


def format_bytes(amount: int | None, like: str = "GiB") -> str:
    """`amount` bytes in the family of units of `like`: binary for any of KiB, MiB, GiB, decimal for KB, MB, GB.

    Three significant digits; `–` for None.
    """
    if amount is None:
        return "–"
    family = _BINARY if like.lower() in _BINARY else _DECIMAL
    names = {"kib": "KiB", "mib": "MiB", "gib": "GiB", "tib": "TiB", "kb": "KB", "mb": "MB", "gb": "GB", "tb": "TB"}
    sign, size = ("-", -amount) if amount < 0 else ("", amount)
    chosen, factor = "B", 1
    for name, value in family.items():
        if size >= value:
            chosen, factor = names[name], value
    if factor == 1:
        return f"{sign}{size} B"
    scaled = size / factor
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{sign}{scaled:.{digits}f} {chosen}"


def unit_of(text: str) -> str:
    """The unit that a size was written in, for printing in the user's own; `GiB` when it names none."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2) if match else ""
    return unit if unit.lower() in {**_DECIMAL, **_BINARY} else "GiB"


def format_seconds(seconds: float | None) -> str:
    """`0.42 s`, `37 s`, `4 min 10 s` or `2 h 5 min`; `–` for None."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
