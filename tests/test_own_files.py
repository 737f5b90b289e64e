"""A user's JSON or YAML gets new values and keeps every other byte."""

import json
import math
import re

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from autofit.errors import UsageError
from autofit.own_files import edit_json, edit_yaml

# ---- JSON ----

NAMES = ["optim", "bf16", "per_device_train_batch_size", "eval_accumulation_steps", "täg", "x y"]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False),
    st.text(max_size=6),
    st.sampled_from(["adamw_torch", "no", "1e-3", "", " a", "a: b", "- a", "#x", "{}", "null", "\u2028", "\x7f", "😀"]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
blanks = st.sampled_from(["", " ", "  ", "\n", "\r\n  ", "\t", "\n\n    "])
changes = st.dictionaries(st.sampled_from(NAMES), trees, min_size=1, max_size=4)


@st.composite
def json_parts(draw):
    """(keys, values as written, everything between): text is between[0] + key + between[1] + value + …"""
    keys = draw(st.lists(st.sampled_from(NAMES), max_size=6))
    between = [draw(st.sampled_from(["", "\ufeff"])) + draw(blanks) + "{" + draw(blanks)]
    texts = []
    for number, key in enumerate(keys):
        texts.append(json.dumps(key, ensure_ascii=draw(st.booleans())))
        between.append(draw(blanks) + ":" + draw(blanks))
        indent = draw(st.sampled_from([None, 2]))
        texts.append(json.dumps(draw(trees), ensure_ascii=draw(st.booleans()), indent=indent))
        between.append(draw(blanks) + ("," + draw(blanks) if number + 1 < len(keys) else ""))
    between[-1] += "}" + draw(blanks)
    return keys, texts, between


def join(texts, between):
    return between[0] + "".join(text + gap for text, gap in zip(texts, between[1:], strict=True))


@given(json_parts(), changes)
def test_json_says_the_new_values_and_all_others_as_before(parts, values):
    _, texts, between = parts
    text = join(texts, between)
    edited = edit_json(text, values)
    assert json.loads(edited.removeprefix("\ufeff")) == {**json.loads(text.removeprefix("\ufeff")), **values}
    assert edited.startswith("\ufeff") == text.startswith("\ufeff")


@example((["a", "b"], ['"a"', "1", '"b"', "2"], ["{", ": ", ",\n\n", ": ", "}"]), {"c": 3}, "\r\n")
@given(json_parts(), changes, st.sampled_from(["\n", "\r\n", "\r"]))
def test_lines_of_json_end_as_they_did(parts, values, newline):
    _, texts, between = parts
    text = join(texts, between).replace("\r\n", "\n").replace("\n", newline)
    assert set(re.findall(r"\r\n|\n|\r", edit_json(text, values))) <= {newline}


@given(json_parts(), st.integers(10**21, 10**22))
def test_only_the_bytes_of_a_json_value_change_and_of_two_equal_keys_the_last(parts, value):
    keys, texts, between = parts
    for name in set(keys):
        last = len(keys) - 1 - keys[::-1].index(name)
        expected = join([*texts[: 2 * last + 1], str(value), *texts[2 * last + 2 :]], between)
        assert edit_json(join(texts, between), {name: value}) == expected


@given(json_parts(), st.lists(st.sampled_from(["new_a", "new_b"]), min_size=1, unique=True))
def test_new_json_keys_are_one_insertion(parts, names):
    _, texts, between = parts
    text = join(texts, between)
    assert_one_insertion(text, edit_json(text, dict.fromkeys(names, 7)))


def assert_one_insertion(text, edited):
    added = len(edited) - len(text)
    assert added > 0
    assert any(edited[:at] + edited[at + added :] == text for at in range(len(text) + 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", '{"a": 1, "b": true}'),
        ("{\n}\n", '{\n  "a": 1,\n  "b": true\n}\n'),
        ('{"x":0}', '{"x":0,"a":1,"b":true}'),
        ('{"x": 0}', '{"x": 0, "a": 1, "b": true}'),
        ('{"x":0,"y":0}', '{"x":0,"y":0,"a":1,"b":true}'),
        ('{\n    "x" : 0\n}', '{\n    "x" : 0,\n    "a" : 1,\n    "b" : true\n}'),
        ('{\r\n\t"x": 0\r\n}\r\n', '{\r\n\t"x": 0,\r\n\t"a": 1,\r\n\t"b": true\r\n}\r\n'),
        ('{\n  "w": 1, "x": 1,\n\n  "y": 2\n}', '{\n  "w": 1, "x": 1,\n\n  "y": 2,\n  "a": 1,\n  "b": true\n}'),
        ('{ "x": 0\n, "y": 1\n}', '{ "x": 0\n, "y": 1\n, "a": 1\n, "b": true\n}'),
        ('\ufeff{"a": 2, "b": true}', '\ufeff{"a": 1, "b": true}'),
        ('{"\\u0061": {"a": 2}, "b": true}', '{"\\u0061": 1, "b": true}'),
        ('{"n": {"a": 2, "b": 3}, "a": 1, "b": false}', '{"n": {"a": 2, "b": 3}, "a": 1, "b": true}'),
        ('{"a": 1, "b": 1}', '{"a": 1, "b": true}'),  # 1 is not true
        ('{"x": NaN, "a": 1e0, "b": true}', '{"x": NaN, "a": 1, "b": true}'),
    ],
)
def test_json_is_added_to_as_it_is_written(text, expected):
    assert edit_json(text, {"a": 1, "b": True}) == expected


@pytest.mark.parametrize("text", ["", "[1]", "{'a': 1}", '{"a": 1,}', "null", "{} {}"])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(UsageError, match="JSON"):
        edit_json(text, {"a": 1})


def test_an_older_name_gives_way_to_the_newer_one_in_its_place():
    values = {"activation_checkpointing": False}
    text = '{"a": 1, "gradient_checkpointing" : true, "b": 2}'
    assert edit_json(text, values) == '{"a": 1, "activation_checkpointing" : false, "b": 2}'
    assert edit_json('{"gradient_checkpointing": false}', values) == '{"activation_checkpointing": false}'
    text = "a: 1\n'gradient_checkpointing' : true # dear\nb: 2\n"
    assert edit_yaml(text, values) == "a: 1\n'activation_checkpointing' : false # dear\nb: 2\n"
    both = "gradient_checkpointing: true\nactivation_checkpointing: true\n"  # the newer one wins in TrainingArguments
    assert edit_yaml(both, values) == "gradient_checkpointing: true\nactivation_checkpointing: false\n"


# ---- YAML ----

# Ways to write a value behind `key:` in a block mapping, and whether something may follow on its last line.
WRITTEN = [
    (" 8", True),
    (" true", True),
    ("", True),
    (" ~", True),
    (' "a # b: c"', True),
    (" 'it''s'", True),
    (" plain words here", True),
    (" several\n  lines of\n  one scalar", True),
    (" 'quoted\n\n  over lines'", True),
    ("\n  on_the_next_line", True),
    (" {a: 1, optim: x}", True),
    (" [1, two,\n  three]", True),
    ("\n  - a\n  - b: 1\n    c: 2", True),
    ("\n- a\n- b", True),
    (" # why\n  optim: nested\n  bf16: false", True),
    ("\n  deep:\n    deeper: |\n      text", False),
    (" |\n  text\n\n  more", False),
    (" >- # why\n  folded\n  text", False),
    (" |+\n  kept\n\n", False),
    (" !!str 5", True),
    (" &anchor 5", True),
    ("  8  ", True),
]
KEYS = ["optim", "bf16", "'quoted'", '"double"', "per_device_train_batch_size", "no", "3"]


@st.composite
def yaml_chunks(draw):
    """Chunks of a block mapping, one for each member, and their key as constructed; what comes before and after."""
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    indent = draw(st.sampled_from(["", "  "]))
    chunks = []
    for number, key in enumerate(draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True))):
        written, open_ended = draw(st.sampled_from(WRITTEN))
        written = written.replace("&anchor", f"&anchor{number}")
        comment = draw(st.sampled_from(["", "  # said", " # a: b"])) if open_ended else ""
        tail = draw(st.sampled_from(["", "\n", "\n# own line", "\n    # deeper"])) if open_ended else ""
        text = f"{key}:{written}{comment}{tail}"
        chunks.append((yaml.safe_load(f"{key}: 1"), "".join(f"{indent}{line}\n" for line in text.split("\n"))))
    head = draw(st.sampled_from(["", "# head\n", "---\n", "%YAML 1.1\n---\n# x\n", "\ufeff", "\n"]))
    foot = draw(st.sampled_from(["", "...\n", "# foot\n", "\n\n"]))
    texts = [chunk.replace("\n", newline) for _, chunk in chunks]
    whole = head.replace("\n", newline), texts, foot.replace("\n", newline)
    return [next(iter(key)) for key, _ in chunks], whole, draw(st.booleans())


yaml_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False),
    st.text(max_size=8).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text)),
    st.sampled_from(
        ["adamw_torch", "no", "1e-3", "", " a", "a: b", "- a", "# x", "null", "a\nb", "\u2028", "\x7f", "😀"]
    ),
    st.dictionaries(st.sampled_from(["use_reentrant", "a b"]), st.booleans() | st.none(), max_size=2),
    st.lists(st.integers(0, 3), max_size=2),
)


@given(yaml_chunks(), st.dictionaries(st.sampled_from(["optim", "bf16", "quoted", "new", "täg"]), yaml_values))
def test_yaml_says_the_new_values_and_all_others_as_before(whole, values):
    _, (head, texts, foot), cut = whole
    text = head + "".join(texts) + foot
    text = text.rstrip("\r\n") if cut else text
    assert_same(yaml.safe_load(edit_yaml(text, values)), {**yaml.safe_load(text), **values})


@given(yaml_chunks(), st.dictionaries(st.sampled_from(["optim", "bf16", "new"]), yaml_values))
def test_lines_of_yaml_end_as_they_did(whole, values):
    _, (head, texts, foot), _ = whole
    text = head + "".join(texts) + foot
    assert set(re.findall(r"\r\n|\n|\r", edit_yaml(text, values))) <= set(re.findall(r"\r\n|\n|\r", text))


@given(yaml_chunks())
def test_no_byte_of_another_yaml_member_changes(whole):
    keys, (head, texts, foot), _ = whole
    text = head + "".join(texts) + foot
    for number, key in enumerate(keys):
        if isinstance(key, str):
            edited = edit_yaml(text, {key: 123456})
            assert edited.startswith(head + "".join(texts[:number]))
            assert edited.endswith("".join(texts[number + 1 :]) + foot)
            for comment in ("# said", "# a: b", "# own line", "    # deeper", "# why"):
                assert edited.count(comment) == text.count(comment), comment


@given(yaml_chunks(), st.booleans())
def test_new_yaml_keys_are_one_insertion(whole, several):
    _, (head, texts, foot), cut = whole
    text = head + "".join(texts) + foot
    text = text.rstrip("\r\n") if cut else text
    assert_one_insertion(text, edit_yaml(text, {"new_a": 1, **({"new_b": None} if several else {})}))


def assert_same(a, b):
    assert repr(sorted(a.items(), key=str)) == repr(sorted(b.items(), key=str))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 2\n", "a: 1\nb: true\n"),
        ("a: 2", "a: 1\nb: true"),
        ("a: 2 # two\n# end\n", "a: 1 # two\nb: true\n# end\n"),
        ("---\na: 2\n...\n", "---\na: 1\nb: true\n...\n"),
        ("x: 1\r\na: 2\r\n", "x: 1\r\na: 1\r\nb: true\r\n"),
        ("{a: 2}\n", "{a: 1, b: true}\n"),
        ("{}", "{a: 1, b: true}"),
        ("{a: 2, x: [1,\n  2], }", "{a: 1, x: [1,\n  2], b: true }"),
        ("{\n  x: 1, # one, two\n  a: 2 # three\n}\n", "{\n  x: 1, # one, two\n  a: 1, b: true # three\n}\n"),
        ('{\n  "x": 1,\n  "a": 2\n}\n', '{\n  "x": 1,\n  "a": 1,\n  b: true\n}\n'),
        ("{a, b: }", "{a: 1, b: true }"),
        ("a:\nb:   # soon\n", "a: 1\nb: true   # soon\n"),
        ("a: [1,\n  2] # list\nb: no\n", "a: 1 # list\nb: true\n"),
        ("a: | # literal\n  x\n\nb: no\n", "a: 1 # literal\n\nb: true\n"),
        ("a:\n  # inside\n  - 1\n\nb: no\n", "a: 1\n\nb: true\n"),
        ("a: &n 8\nc: *n\nb: no\n", "a: 1\nc: &n 8\nb: true\n"),
        ("a: &n 8\nc: [*n, *n]\nb: *n\n", "a: 1\nc: [&n 8, *n]\nb: true\n"),
        ("c: &n 8\na: *n\nb: *n\n", "c: &n 8\na: 1\nb: true\n"),
        ("base: &b {a: 3}\n<<: *b\nb: true\n", "base: &b {a: 3}\n<<: *b\nb: true\na: 1\n"),
        ("? a\n: 2\n? c\n: 3\n", "? a\n: 1\n? c\n: 3\nb: true\n"),
        ("a: 1\na: 2\nb: true\n", "a: 1\na: 1\nb: true\n"),
        ("env:\n  a: 2\n  # of env\n# of all\n", "env:\n  a: 2\n  # of env\na: 1\nb: true\n# of all\n"),
        ("x: |\n  text", "a: 1\nb: true\nx: |\n  text"),  # a line break behind it would belong to the text
        ("x: |+\n  text\n\n", "x: |+\n  text\n\na: 1\nb: true\n"),
        ("\ufeffa: 2\n", "\ufeffa: 1\nb: true\n"),
    ],
)
def test_yaml_is_edited_as_it_is_written(text, expected):
    edited = edit_yaml(text, {"a": 1, "b": True})
    assert edited == expected
    assert yaml.safe_load(edited) == {**yaml.safe_load(text), "a": 1, "b": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("# only\n", "it is empty"),
        ("- a\n", "no YAML mapping"),
        ("a: 1\n---\nb: 2\n", "no YAML"),
        ("a: [1\n", "no YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "no YAML that can be read safely"),
        ("a: &k |\n  text\nb: *k\nc: *k\n", "write it out first"),
        ("a: &k [&i 1]\nc: *i\n", "by hand"),
    ],
)
def test_what_cannot_be_edited_alone_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        edit_yaml(text, {"a": 1, "b": 2})


def test_values_stay_themselves_in_yaml():
    values = {"a": "no", "b": "1e-3", "c": 1e-3, "d": math.inf, "e": "two\nlines: here", "f": {"k": "a, b"}, "g": "~"}
    for text in ("x: 1\n", "{x: 1}"):
        assert yaml.safe_load(edit_yaml(text, values)) == {"x": 1, **values}


@example("a: 1\n")
@given(st.text(alphabet="ab:{}[],#&*|>\"'- \n?!", max_size=14))
def test_any_text_is_edited_rightly_or_refused(text):
    for edit, load in ((edit_yaml, yaml.safe_load), (edit_json, json.loads)):
        try:
            edited = edit(text, {"a": 1})
        except UsageError:
            continue
        assert_same(load(edited), {**load(text), "a": 1})
