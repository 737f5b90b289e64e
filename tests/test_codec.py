"""Records come back from JSON as they were, and what cannot be read is a RunDirectoryError with the way out."""

import dataclasses
import enum
import json
import types
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autofit import codec, records
from autofit.errors import RunDirectoryError
from autofit.records import Candidate, Failure, Measurement, PhaseRecord

settings.register_profile(  # a busy machine must not fail a property, and whole records are large
    "codec", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("codec")

RECORDS = [kind for kind in vars(records).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=8) | st.sampled_from(["1", "true", "null", "schema", '"', "\n", "é", "\0"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ATOMS = {int: INTEGERS, float: FLOATS, str: TEXTS, bool: st.booleans(), type(None): st.none(), Any: JSON_VALUES}


def values_of(kind: Any) -> st.SearchStrategy:
    """Values of an annotation as `records` uses them: atoms, unions, tuples, dicts, enums, nested records."""
    if kind in ATOMS:
        return ATOMS[kind]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    raise NotImplementedError(f"records uses {kind}, which has no strategy here")


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_record_comes_back_as_it_was(kind, data):
    record = data.draw(values_of(kind))
    back = codec.decode(codec.encode(record), kind, "journal.jsonl")
    assert back == record
    assert repr(back) == repr(record)  # `==` takes True for 1


@given(values_of(Candidate))
def test_a_candidate_keeps_its_key_on_disk(candidate):
    assert codec.decode(codec.encode(candidate), Candidate, "f").key == candidate.key


@given(values_of(Measurement))
def test_a_record_is_one_line_of_json_that_starts_with_its_schema(measurement):
    line = codec.encode(measurement)
    assert b"\n" not in line
    assert next(iter(json.loads(line).items())) == ("schema", codec.SCHEMA)


@given(st.dictionaries(TEXTS.filter(lambda key: key != "schema"), JSON_VALUES, max_size=4))
def test_a_plain_json_object_comes_back_without_its_schema(value):
    assert codec.parse(codec.encode(value), "f") == value


@given(values_of(PhaseRecord))
def test_text_and_bytes_are_read_alike(phase):
    line = codec.encode(phase)
    assert codec.decode(line.decode(), PhaseRecord, "f") == codec.decode(line, PhaseRecord, "f")


@given(values_of(PhaseRecord))
def test_what_a_json_value_holds_is_what_the_file_holds(phase):
    assert {"schema": codec.SCHEMA, **codec.to_json_value(phase)} == json.loads(codec.encode(phase))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_cannot_say_becomes_null_and_stays_readable_where_none_is_allowed(seconds):
    line = codec.encode({"loss": seconds})
    assert json.loads(line)["loss"] is None
    with pytest.raises(RunDirectoryError, match="damaged"):
        codec.decode(codec.encode(PhaseRecord("train", seconds)), PhaseRecord, "f")


def test_a_newer_schema_is_refused_with_both_versions_and_the_way_out():
    with pytest.raises(RunDirectoryError) as refusal:
        codec.decode(json.dumps({"schema": codec.SCHEMA + 6, "values": {}}), Candidate, "runs/a/journal.jsonl")
    message = str(refusal.value)
    assert "runs/a/journal.jsonl" in message
    assert f"schema {codec.SCHEMA + 6}" in message
    assert f"up to {codec.SCHEMA}" in message
    assert "upgrade autofit" in message


@given(values_of(Measurement), st.data())
def test_a_line_cut_anywhere_is_damaged(measurement, data):
    line = codec.encode(measurement)
    end = data.draw(st.integers(0, len(line) - 1))
    with pytest.raises(RunDirectoryError, match="journal.jsonl is damaged"):
        codec.decode(line[:end], Measurement, "journal.jsonl")


@given(values_of(Measurement), st.data())
def test_a_flipped_byte_is_still_a_measurement_or_a_run_directory_error(measurement, data):
    line = bytearray(codec.encode(measurement))
    line[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert isinstance(codec.decode(bytes(line), Measurement, "f"), Measurement)
    except RunDirectoryError as error:
        assert str(error).startswith("f ")


@given(st.binary(max_size=40))
def test_bytes_that_autofit_did_not_write_are_refused(data):
    with pytest.raises(RunDirectoryError):
        codec.decode(data, Candidate, "f")


@pytest.mark.parametrize(
    "data",
    [b'{"schema":1,"values":' + b"[" * 100_000, '{"schema":1,"values":{"\ud800":1}}'],
    ids=["nested", "surrogate"],
)
def test_json_that_breaks_the_decoder_itself_is_damaged_too(data):
    with pytest.raises(RunDirectoryError, match="damaged"):
        codec.decode(data, Candidate, "f")


@given(JSON_VALUES)
def test_json_without_a_schema_was_not_written_by_autofit(value):
    assume(not (isinstance(value, dict) and "schema" in value))
    with pytest.raises(RunDirectoryError, match="not written by autofit.*--out"):
        codec.parse(json.dumps(value), "f")


@pytest.mark.parametrize("schema", [None, "1", 1.5, 0, -1, [1], {}])
def test_a_schema_that_is_no_version_is_refused(schema):
    with pytest.raises(RunDirectoryError, match="no schema version"):
        codec.parse(json.dumps({"schema": schema, "values": {}}), "f")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Failure) if field.name != "traceback"])
def test_a_missing_field_without_default_is_damaged_and_named(name):
    value = codec.to_json_value(Failure("train", 3, "ValueError", "no"))
    del value[name]
    with pytest.raises(RunDirectoryError, match=f"damaged.*{name}"):
        codec.build(value, Failure, "f")


@pytest.mark.parametrize("wrong", ["many", "900", 9.5, [900], True])
def test_a_field_of_the_wrong_type_is_damaged_and_named(wrong):
    with pytest.raises(RunDirectoryError, match="damaged.*reserved_bytes"):
        codec.build({"name": "train", "seconds": 1.0, "reserved_bytes": wrong}, PhaseRecord, "f")


def test_an_older_record_is_migrated_step_by_step_from_its_own_version(monkeypatch):
    monkeypatch.setattr(codec, "SCHEMA", 3)
    monkeypatch.setattr(codec, "MIGRATIONS", {})
    monkeypatch.setitem(codec.MIGRATIONS, 2, lambda value: {"values": {**value["knobs"], "from_2": True}})
    monkeypatch.setitem(codec.MIGRATIONS, 1, lambda value: {"knobs": {**value["options"], "from_1": True}})

    def read(value):
        return codec.decode(json.dumps(value), Candidate, "f").values

    assert read({"schema": 1, "options": {"a": 1}}) == {"a": 1, "from_1": True, "from_2": True}
    assert read({"schema": 2, "knobs": {"a": 1}}) == {"a": 1, "from_2": True}
    assert read({"schema": 3, "values": {"a": 1}}) == {"a": 1}
    assert json.loads(codec.encode(Candidate({})))["schema"] == 3


def test_every_older_schema_has_a_migration():
    assert sorted(codec.MIGRATIONS) == list(range(1, codec.SCHEMA))
