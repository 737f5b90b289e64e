"""Records to JSON and back, with a schema version and migrations.

Every file and every journal line carries `schema`. An older one is migrated step by step, a newer one is refused with
the way out. JSON has no NaN or infinity: msgspec writes them as null, so records hold None where there is no number.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autofit.errors import RunDirectoryError

SCHEMA = 1
T = TypeVar("T")

# Schema version -> function from that version's JSON object to the next one's.
MIGRATIONS: dict[int, Any] = {}


def encode(record: Any) -> bytes:
    """One line of JSON, `schema` first. `record` is a dataclass of `records` or a JSON object.

    Bytes of a log or a path that are no text (lone surrogates) are written as `?`: a measurement is never lost to them.
    """
    value = {"schema": SCHEMA, **msgspec.to_builtins(record)}
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_printable(value))


def decode(data: bytes | str, kind: type[T], where: str | Path) -> T:
    """The record of type `kind` in one JSON object. `where` names the source in errors.

    Raises RunDirectoryError when it is damaged or written by a newer version.
    """
    return build(parse(data, where), kind, where)


def parse(data: bytes | str, where: str | Path) -> dict[str, Any]:
    """The JSON object migrated to the current schema, `schema` removed."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RunDirectoryError(f"{where} is damaged ({error}); mend or remove it, or give another --out") from error
    schema = value.pop("schema", None) if isinstance(value, dict) else None
    if type(schema) is not int or schema < 1:
        raise RunDirectoryError(f"{where} was not written by autofit (no schema version); give another --out")
    if schema > SCHEMA:
        raise RunDirectoryError(
            f"{where} has schema {schema} and this autofit reads up to {SCHEMA}; upgrade autofit or give another --out"
        )
    for version in range(schema, SCHEMA):
        value = MIGRATIONS[version](value)
    return value


def build(value: dict[str, Any], kind: type[T], where: str | Path) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RunDirectoryError(f"{where} is damaged ({error}); mend or remove it, or give another --out") from error


def to_json_value(record: Any) -> Any:
    """The record as dicts, lists, strings, numbers."""
    return msgspec.to_builtins(record)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(k): _printable(v) for k, v in value.items()}
    return [_printable(v) for v in value] if isinstance(value, (list, tuple)) else value
