"""A command line gets other flags, and the real parser reads from it exactly what was meant."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import HfArgumentParser, TrainingArguments

from autofit.own_command import edit_command, has_flag
from autofit.trainer_args import ALIASES


@dataclasses.dataclass
class Own:
    """A script's own arguments, and fields whose defaults and types its subclass of TrainingArguments has changed."""

    name: str = "x"
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class TheirArguments(TrainingArguments):
    """As TRL's: on by default, and one that takes no bare flag."""

    gradient_checkpointing: bool = True
    bf16: bool | None = None


VALUES = {
    "per_device_train_batch_size": st.integers(1, 64),
    "gradient_accumulation_steps": st.integers(1, 64),
    "activation_checkpointing": st.booleans(),
    "bf16": st.booleans(),
    "fp16": st.booleans(),
    "tf32": st.sampled_from([False, True]),
    "optim": st.sampled_from(["adamw_torch", "sgd"]),
    "eval_accumulation_steps": st.sampled_from([None, 1, 8]),
    "use_cpu": st.booleans(),
    "gradient_checkpointing_kwargs": st.just({"use_reentrant": False}),
    "learning_rate": st.floats(1e-9, 1.0),
}


@st.composite
def flags(draw):
    """How a user may write one flag. `--optim sgd`, `--optim=sgd`, `--per-device-…`, `--bf16`, `--no_…`."""
    name = draw(st.sampled_from([*VALUES, "gradient_checkpointing", "name", "notes"]))
    if name == "notes":
        return ["--notes", *draw(st.lists(st.sampled_from(["a", "-1", "two words", "-x y"]), min_size=1, max_size=2))]
    if name == "gradient_checkpointing" and draw(st.booleans()):
        return [draw(st.sampled_from(["--no_gradient_checkpointing", "--no-gradient-checkpointing"]))]
    form = draw(st.sampled_from([f"--{name}", f"--{name.replace('_', '-')}"]))
    value = draw(VALUES.get(name, st.booleans() if name != "name" else st.sampled_from(["bf16", "a=b", "optim"])))
    if value is None:
        return []
    if name == "gradient_checkpointing_kwargs":
        value = '{"use_reentrant": true}'
    if isinstance(value, bool):
        written = draw(st.sampled_from(["True", "true", "1"] if value else ["False", "no"]))
        bare = value and name not in ("bf16", "tf32")  # these are `bool | None` here, which takes a value
        return (
            [form] if bare and draw(st.booleans()) else draw(st.sampled_from([[form, written], [f"{form}={written}"]]))
        )
    return draw(st.sampled_from([[form, str(value)], [f"{form}={value}"]]))


PARSER = HfArgumentParser((TheirArguments, Own))


def parse(command):
    """What the installed parser makes of the words, the classes' own checks left out: they depend on the machine."""
    return vars(PARSER.parse_args(list(command[1:])))


@given(st.lists(flags(), max_size=8), st.fixed_dictionaries({}, optional=VALUES))
def test_the_real_parser_reads_the_new_values_and_all_others_as_before(written, values):
    command = ("train.py", *(word for words in written for word in words))
    before, edited = parse(command), edit_command(command, values)
    after = parse(edited)
    default = parse(("train.py",))
    for name, value in values.items():
        said = '{"use_reentrant": false}' if isinstance(value, dict) else value
        assert after[name] == (default[name] if value is None else said)
        assert after[name] is None or type(after[name]) is type(said)
        assert value is not None or not has_flag(edited, name)
        for alias in ALIASES.get(name, ()):
            assert after.get(alias) == default.get(alias)
    changed = {*values, *(alias for name in values for alias in ALIASES.get(name, ()))}
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}
    assert edit_command(edited, values) == edited


@pytest.mark.parametrize(
    ("command", "values", "expected"),
    [
        ("train.py", {"bf16": True}, "train.py --bf16 True"),
        ("-m bf16 --x 1", {"bf16": True, "optim": "sgd"}, "-m bf16 --x 1 --bf16 True --optim sgd"),
        ("train.py --optim a file", {"optim": "sgd"}, "train.py --optim sgd file"),
        ("train.py --optim=a file", {"optim": "sgd"}, "train.py --optim=sgd file"),
        ("train.py --bf16 --x", {"bf16": False}, "train.py --bf16 False --x"),
        ("train.py --no_bf16 x", {"bf16": True}, "train.py --bf16 True x"),
        ("train.py --eval-accumulation-steps 4 x", {"eval_accumulation_steps": None}, "train.py x"),
        (
            "train.py --eval-accumulation-steps 4 x",
            {"eval_accumulation_steps": 2},
            "train.py --eval-accumulation-steps 2 x",
        ),
        (
            "train.py --gradient-checkpointing x=1",
            {"activation_checkpointing": False},
            "train.py --activation-checkpointing False",
        ),
        (
            "train.py --no_gradient_checkpointing x",
            {"activation_checkpointing": True},
            "train.py --activation_checkpointing True x",
        ),
        ("train.py --optim a --y --optim b --z", {"optim": "sgd"}, "train.py --y --optim sgd --z"),
        (
            "train.py --optim_args a --optim_target b",
            {"optim": "sgd"},
            "train.py --optim_args a --optim_target b --optim sgd",
        ),
        ("train.py --y -- --optim a", {"optim": "sgd"}, "train.py --y --optim sgd -- --optim a"),
        (
            "train.py --per_device_train 4",
            {"per_device_train_batch_size": 8},
            "train.py --per_device_train 4 --per_device_train_batch_size 8",
        ),
        ("train.py --no_cuda True --y", {"use_cpu": False}, "train.py --use_cpu False --y"),
        (
            "train.py --include_for_metrics inputs loss --y",
            {"include_for_metrics": ["inputs"]},
            "train.py --include_for_metrics inputs --y",
        ),
        ("train.py --include-for-metrics inputs loss --y", {"include_for_metrics": []}, "train.py --y"),
        ("train.py --y", {"include_for_metrics": ["inputs", "loss"]}, "train.py --y --include_for_metrics inputs loss"),
    ],
)
def test_flags_keep_their_place_and_their_way_of_writing(command, values, expected):
    assert " ".join(edit_command(tuple(command.split()), values)) == expected


def test_an_abbreviated_flag_loses_to_the_one_that_is_added():
    edited = edit_command(("train.py", "--gradient_acc", "4"), {"gradient_accumulation_steps": 8})
    assert parse(edited)["gradient_accumulation_steps"] == 8


def test_a_flag_with_blanks_behind_its_equals_sign_is_no_value_of_the_one_before():
    words = ("train.py", "--activation_checkpointing", '--gradient_checkpointing_kwargs={"use_reentrant": true}')
    edited = edit_command(words, {"activation_checkpointing": False})
    assert edited == ("train.py", "--activation_checkpointing", "False", words[2])
