"""What a script's user is given: their own file and command with the tuned fields, read back by the real parsers."""

import ast
import dataclasses
import json
import shlex
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from landscapes import make_description
from transformers import HfArgumentParser, TrainingArguments
from trl.scripts.utils import TrlParser

from autofit.emission import changed_arguments, own_settings_of, write_files
from autofit.own_settings import said_elsewhere
from autofit.records import ArgumentsSource, Candidate, ScriptTask, Task
from autofit.trainer_args import candidate_values

FIELDS = tuple(f.name for f in dataclasses.fields(TrainingArguments) if f.init)
knobs = st.fixed_dictionaries(
    {
        "per_device_train_batch_size": st.sampled_from([1, 8, 32]),
        "gradient_accumulation_steps": st.sampled_from([1, 8]),
        "activation_checkpointing": st.booleans(),
        "precision": st.sampled_from(["fp32", "bf16"]),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "sgd"]),
        "per_device_eval_batch_size": st.sampled_from([1, 8]),
        "eval_accumulation_steps": st.sampled_from([None, 1, 8]),
    }
)
CHOSEN = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": False,
    "precision": "bf16",
    "optim": "adamw_torch_fused",
    "per_device_eval_batch_size": 8,
    "eval_accumulation_steps": None,
}


@dataclasses.dataclass
class Own:
    own: int = 0


def resolve(arguments):
    values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    return {**values, "optim": str(arguments.optim.value)}


def describe(arguments, source):
    """Of what a real parser has made of the user's own settings."""
    return make_description(fields=FIELDS, resolved=resolve(arguments), source=source)


def emit(folder, values, description, script, baseline=None):
    baseline = Candidate(baseline or candidate_values(description.resolved))
    task = Task(script=dataclasses.replace(script, directory=script.directory or str(folder.parent.parent)))
    write_files(folder, Candidate(values), baseline, description, "cpu", task=task)
    command = folder / "command.txt"
    return shlex.split(command.read_text(), comments=True) if command.exists() else None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("scripts") / "runs"
    path.mkdir()
    return path


def script(*command, **more):
    return ScriptTask(command, "", **more)


@given(
    knobs,
    st.lists(
        st.sampled_from(
            ["--bf16", "--optim sgd", "--per-device-train-batch-size=4", "--eval_accumulation_steps 2"]
            + ["--gradient_checkpointing", "--activation_checkpointing True", "--learning_rate 1e-4", "--own 3"]
        ),
        unique=True,
    ),
)
def test_the_command_with_other_flags_makes_the_winners_arguments(run, values, written):
    parser = HfArgumentParser((Own, TrainingArguments))
    words = [word for flag in ["--use_cpu", *written] for word in flag.split()]
    own, arguments = parser.parse_args_into_dataclasses(words)
    description = describe(arguments, ArgumentsSource("flags", flags=True))
    command = emit(run / "best", values, description, script("train.py", *words))
    assert command[:2] == ["python", "train.py"]
    own_again, tuned = parser.parse_args_into_dataclasses(command[2:])
    assert candidate_values(resolve(tuned)) == values
    assert (own_again, tuned.learning_rate) == (own, arguments.learning_rate)
    expected = changed_arguments(Candidate(values), description, "cpu")
    assert {w.partition("=")[0] for w in command if w.startswith("--")} <= {
        *(word.partition("=")[0] for word in words),
        *(f"--{name}" for name in expected),
    }


@given(knobs, st.dictionaries(st.sampled_from(["gradient_checkpointing", "bf16", "own"]), st.booleans()))
def test_their_json_with_other_values_makes_the_winners_arguments(run, values, written):
    file = run.parent / "args.json"
    text = json.dumps({"own": 4, "use_cpu": True, "optim": "sgd", "learning_rate": 1e-4, **written}, indent=3)
    file.write_text(text)
    parser = HfArgumentParser((Own, TrainingArguments))
    own, arguments = parser.parse_json_file(str(file))
    description = describe(arguments, ArgumentsSource("json", str(file)))
    command = emit(run / "best", values, description, script("train.py", "args.json"))
    if not changed_arguments(Candidate(values), description, "cpu"):
        assert command == ["python", "train.py", "args.json"]
        return
    assert command == ["python", "train.py", "runs/best/args.json"]
    own_again, tuned = parser.parse_json_file(str(run.parent / command[2]))
    assert candidate_values(resolve(tuned)) == values
    assert (own_again, tuned.learning_rate) == (own, arguments.learning_rate)
    assert file.read_text() == text
    assert stat.S_IMODE((run / "best/args.json").stat().st_mode) == 0o600


def test_a_flag_that_stands_beside_their_yaml_is_changed_and_the_rest_in_the_yaml(run):
    file = run.parent / "trl.yaml"
    file.write_text(
        "use_cpu: true\nenv: {A: b}\n\n# memory\ngradient_checkpointing: true  # slow\neval_accumulation_steps: 2\n"
    )
    flags = ["--config", "trl.yaml", "--optim=sgd", "--eval_accumulation_steps", "4", "--own", "2"]
    words = [str(file) if word == "trl.yaml" else word for word in flags]
    own, arguments = TrlParser((Own, TrainingArguments)).parse_args_and_config(words)
    description = describe(arguments, ArgumentsSource("yaml", str(file), flags=True))
    command = emit(run / "best", CHOSEN, description, script("train.py", *flags))
    assert command == [
        "python",
        "train.py",
        "--config",
        "runs/best/trl.yaml",
        "--optim=adamw_torch_fused",
        "--own",
        "2",
    ]
    assert (run / "best/trl.yaml").read_text() == (
        "use_cpu: true\nenv: {A: b}\n\n# memory\nactivation_checkpointing: false  # slow\neval_accumulation_steps: null\n"
        "per_device_train_batch_size: 16\nbf16: true\n"
    )
    words = [str(run.parent / word) if word.endswith(".yaml") else word for word in command[2:]]
    own_again, tuned = TrlParser((Own, TrainingArguments)).parse_args_and_config(words)
    assert candidate_values(resolve(tuned)) == CHOSEN
    assert own_again == own


def plain_description(source, **given_by_user):
    return describe(TrainingArguments("out", **{"use_cpu": True, "optim": "sgd", **given_by_user}), source)


def test_what_stands_in_code_is_applied_without_a_change_and_said_where(run):
    description = plain_description(ArgumentsSource("code", where="train.py:42", assigned=("optim",)))
    task = script("-m", "pkg.train", "a b", launcher=("A=1 2", "accelerate", "launch"))
    before = emit(run / "provisional", CHOSEN, description, script("train.py"))
    assert before is None, "apply takes no answer that was not confirmed"
    command = emit(run / "best", CHOSEN, description, task)
    assert command == ["autofit", "apply", "runs", "--"] + [
        "A=1 2",
        "accelerate",
        "launch",
        "-m",
        "pkg.train",
        "a b",
    ]
    coded = {**CHOSEN, "attention": "eager"}
    command = emit(run / "best-with-code", coded, description, script("train.py"), {**CHOSEN, "attention": "sdpa"})
    assert command == ["autofit", "apply", "--with-code", "runs", "--", "python", "train.py"]
    assert said_elsewhere(description.source, {"bf16": True, "optim": "sgd"}, {"bf16": False, "optim": "lion"}) == [
        "train.py:42 makes its TrainingArguments in code: set bf16=True (now False) there",
        "the script assigns optim by itself after its arguments were made: have it assign optim='sgd' (now 'lion')",
    ]


def test_the_steps_say_how_to_use_what_was_written(run):
    def steps(source, folder="best", values=CHOSEN, baseline=CHOSEN, words=("train.py", "args.json")):
        own_script = ScriptTask(words, str(run.parent))
        description = plain_description(source)
        own = own_settings_of(run / folder, Candidate(values), Candidate(baseline), description, "cpu", own_script)
        return own.steps

    (run.parent / "args.json").write_text('{"use_cpu": true, "optim": "sgd"}')
    file = str(run.parent / "args.json")
    from_json = ArgumentsSource("json", file)
    note = "runs/best/args.json is your args.json with the tuned fields, every other byte as it was"
    assert steps(from_json) == ("    python train.py runs/best/args.json", note)
    assert steps(from_json, words=("train.py",)) == (
        "    autofit apply runs -- python train.py",
        "or by hand:",
        "the script itself names args.json: put runs/best/args.json in its place",
        note,
    )
    assert steps(ArgumentsSource("flags", flags=True, assigned=("optim",)), words=("train.py", "--bf16=no")) == (
        "    autofit apply runs -- python train.py --bf16=no",
        "or by hand:",
        "the script assigns optim by itself after its arguments were made: "
        "have it assign optim='adamw_torch_fused' (now 'sgd')",
        "and then:",
        "    python train.py --bf16=True --per_device_train_batch_size 16 --optim adamw_torch_fused",
    )
    coded, plain = {**CHOSEN, "logits": "argmax"}, {**CHOSEN, "logits": "full"}
    add = "add to the script what runs/best-with-code/snippet.py says"
    assert steps(from_json, "best-with-code", coded, plain) == (
        add,
        "and then:",
        "    python train.py runs/best-with-code/args.json",
        note.replace("best", "best-with-code"),
        "or, with no code to write:",
        "    autofit apply --with-code runs -- python train.py args.json",
    )
    assert steps(from_json, "best-with-code", coded, plain, ("train.py",))[1:3] == (
        "or by hand:",
        "the script itself names args.json: put runs/best-with-code/args.json in its place",
    )
    assert add in steps(from_json, "best-with-code", coded, plain, ("train.py",))
    gone = steps(ArgumentsSource("json", file + ".json"))
    assert gone[0].strip().startswith("autofit apply runs")
    assert "args.json.json could not be edited (No such file or directory): set per_device_train" in gone[2]
    (run.parent / "list.yaml").write_text("- a\n")
    assert (
        "could not be edited (it holds no YAML mapping)"
        in steps(ArgumentsSource("yaml", str(run.parent / "list.yaml")))[2]
    )


def test_a_flag_that_must_go_and_is_not_there_is_said(run):
    description = plain_description(ArgumentsSource("flags", flags=True), eval_accumulation_steps=3)
    own_script = ScriptTask(("train.py",), str(run.parent))
    own = own_settings_of(run / "best", Candidate(CHOSEN), Candidate(CHOSEN), description, "cpu", own_script)
    assert own.command == "autofit apply runs -- python train.py\n"
    assert "eval_accumulation_steps must not be set at all" in own.steps[2]


def test_secrets_are_in_no_command_and_the_file_that_may_hold_them_is_its_owners(run):
    (run.parent / "mine.json").write_text('{"hub_token": "hf_Abcdefgh12345", "optim": "sgd"}\r\n', newline="")
    for source in (ArgumentsSource("flags", flags=True), ArgumentsSource("json", str(run.parent / "mine.json"))):
        task = script("train.py", "mine.json", "--hub_token", "hf_Abcdefgh12345", interpreter_options=("-u",))
        command = emit(run / "best", CHOSEN, plain_description(source), task)
        written = {path.name: path for path in (run / "best").iterdir()}
        assert command[:3] == ["python", "-u", "train.py"]
        assert "[redacted]" in command
        for name, path in written.items():
            private = name == "mine.json"
            assert stat.S_IMODE(path.stat().st_mode) == (0o600 if private else 0o644)
            assert ("hf_Abc" in path.read_text()) == private, name
    assert (
        written["mine.json"]
        .read_bytes()
        .startswith(b'{"hub_token": "hf_Abcdefgh12345", "optim": "adamw_torch_fused", ')
    )
    assert written["mine.json"].read_bytes().endswith(b"}\r\n")
    assert stat.S_IMODE((run / "best").stat().st_mode) == 0o755


def test_a_file_of_the_same_name_as_ours_does_not_take_its_place(run):
    file = run.parent / "training_args.json"
    file.write_text('{"output_dir": "x", "mine": 1}')
    source = ArgumentsSource("json", str(file))
    command = emit(run / "best", CHOSEN, plain_description(source), script("train.py", "--args=./training_args.json"))
    assert command[-1] == "--args=runs/best/own-training_args.json"
    assert "mine" not in json.loads((run / "best/training_args.json").read_text())
    assert json.loads((run / "best/own-training_args.json").read_text())["mine"] == 1


def test_nothing_is_added_that_the_user_has_already(run):
    description = plain_description(ArgumentsSource("flags", flags=True), bf16=True, per_device_train_batch_size=16)
    command = emit(run / "best", {**CHOSEN, "optim": "sgd"}, description, script("train.py"))
    assert command == ["python", "train.py"]
    finder = plain_description(ArgumentsSource("flags", flags=True), auto_find_batch_size=True)
    assert changed_arguments(Candidate(candidate_values(finder.resolved)), finder, "cpu") == {
        "auto_find_batch_size": False
    }


def test_a_shell_runs_the_command_with_its_variables_and_words(run):
    (run.parent / "show.py").write_text("import os, sys\nprint([os.environ['A'], *sys.argv[1:]])\n")
    task = script("show.py", "it's $HOME; *", "--bf16", launcher=("A=x y", sys.executable))
    emit(run / "best", CHOSEN, plain_description(ArgumentsSource("flags", flags=True), bf16=True), task)
    file = str(run / "best/command.txt")
    shown = subprocess.run(["sh", file], cwd=run.parent, capture_output=True, text=True, check=True)
    added = ["--per_device_train_batch_size", "16", "--optim", "adamw_torch_fused"]
    assert ast.literal_eval(shown.stdout) == ["x y", "it's $HOME; *", "--bf16", *added]


def test_where_the_source_is_not_known_nothing_is_said_of_it(run):
    own_script = ScriptTask(("train.py",), str(run.parent))
    own = own_settings_of(
        run / "best", Candidate(CHOSEN), Candidate(CHOSEN), plain_description(None), "cpu", own_script
    )
    assert own.steps == ("    autofit apply runs -- python train.py",)


def test_a_model_task_gets_no_command(run):
    description = plain_description(None)
    write_files(run / "best", Candidate(CHOSEN), Candidate(CHOSEN), description, "cpu")
    assert [path.name for path in (run / "best").iterdir()] == ["training_args.json"]


def test_the_command_of_what_needs_code_says_where_the_code_is(run):
    coded, plain = {**CHOSEN, "attention": "eager"}, {**CHOSEN, "attention": "sdpa"}
    description = plain_description(ArgumentsSource("flags", flags=True))
    command = emit(run / "best-with-code", coded, description, script("train.py"), plain)
    assert command[:2] == ["python", "train.py"]
    told = (run / "best-with-code/command.txt").read_text().splitlines()[0]
    assert told == "# add to the script what runs/best-with-code/snippet.py says"
    assert emit(run / "best", CHOSEN, description, script("train.py"))[:2] == ["python", "train.py"]
    assert not (run / "best/command.txt").read_text().startswith("#")


def test_what_a_metrics_function_receives_is_said_in_the_arguments_and_told_in_the_snippet(run):
    words = ("train.py", "--output_dir", "o", "--include_for_metrics", "inputs", "loss", "--bf16", "False")
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*words[1:], "--use_cpu"])
    description = describe(arguments, ArgumentsSource("flags", flags=True))
    own = {
        **candidate_values(description.resolved),
        "include_for_metrics": "inputs+loss",
        "eval_do_concat_batches": True,
    }
    for included, said in (("inputs", ["inputs"]), (None, [])):
        chosen = {**own, "include_for_metrics": included, "eval_do_concat_batches": False}
        folder = run / f"best-with-code-{len(said)}"
        command = emit(folder, chosen, description, script(*words), own)
        (parsed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*command[2:], "--use_cpu"])
        from_json = TrainingArguments(**{"output_dir": "o", **json.loads((folder / "training_args.json").read_text())})
        for found in (parsed, from_json):
            assert (found.include_for_metrics, found.eval_do_concat_batches) == (said, False)
        told = ast.get_docstring(ast.parse((folder / "snippet.py").read_text()))
        assert command[0] == "python"  # there is no line to add first
        assert f"include_for_metrics = {said!r}" in told and "eval_do_concat_batches = False" in told
    assert not {"include_for_metrics", "eval_do_concat_batches"} & set(
        changed_arguments(Candidate(own), description, "cpu")
    )
