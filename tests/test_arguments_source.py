"""Where a script's TrainingArguments come from, found out from real parsers in a real child."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.harness.take_hold import when_imported

# One child for all scripts, since it imports transformers and TRL. A log is made for each script, before it runs.
DRIVER = """
import dataclasses, json, os, runpy, sys
from autofit.harness.arguments_source import SourceLog
from autofit.harness.given_arguments import GivenArguments
from autofit.harness.take_hold import when_imported

logs, start = [], os.getcwd()
given = GivenArguments(lambda arguments: [log.constructed(arguments, given.keywords(arguments)) for log in logs[-1:]])
when_imported("transformers.training_args", lambda module: given.install(module.TrainingArguments))
assert "transformers" not in sys.modules
answers = {}
for name, command in json.load(open("scripts.json")).items():
    sys.argv = list(command)
    logs[:] = [SourceLog(command)]
    logs[0].install()
    arguments = runpy.run_path(command[0], run_name="__main__")["args"]
    answers[name] = dataclasses.asdict(logs[0].source_of(arguments, given.assigned(arguments)))
    os.chdir(start)
json.dump(answers, open("answers.json", "w"))
"""

HEAD = """
import json, os, sys
from dataclasses import dataclass
from transformers import HfArgumentParser, TrainingArguments
@dataclass
class Own:
    own: int = 0
"""
HEAD_LINES = HEAD.count("\n")

SCRIPTS = {
    "either": (  # as the examples of transformers do it
        """
parser = HfArgumentParser((Own, TrainingArguments))
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    own, args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
else:
    own, args = parser.parse_args_into_dataclasses()
""",
        {
            "flags": ["--own", "3", "--max_steps=5"],
            "json": ["args.json"],
            "nothing": [],
        },
    ),
    "from_yaml": (
        "own, args = HfArgumentParser((Own, TrainingArguments)).parse_yaml_file(sys.argv[1])\n",
        {"yaml": ["args.yaml"]},
    ),
    "rest": (
        """
import argparse
mine = argparse.ArgumentParser()
mine.add_argument("--mine")
_, rest = mine.parse_known_args()
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)
""",
        {"rest": ["--max_steps", "3", "--mine", "x", "--optim", "sgd"]},
    ),
    "fixed": (
        """
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
    args=["--output_dir", "x"])
""",
        {"fixed": ["--other", "y"]},
    ),
    "config_flag": (
        "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args_file_flag='--cfg')\n",
        {"config_flag": ["--cfg", "flags.txt", "--max_steps", "2"]},
    ),
    "parse_dict": (
        """
values = json.load(open(next(w.rpartition("=")[2] for w in sys.argv if "json" in w)))
values["max_steps"] = 7
own, args = HfArgumentParser((Own, TrainingArguments)).parse_dict(values)
""",
        {"dict": ["args.json"], "dict_option": ["--settings=args.json"], "two_files": ["args.json", "args.yaml"]},
    ),
    "hidden_dict": (
        """
def read():
    return HfArgumentParser((Own, TrainingArguments)).parse_dict(json.load(open("args.json")))
own, args = read()
""",
        {"hidden": [], "hidden_other": ["other.json"]},
    ),
    "starred": (
        """
values = json.load(open(sys.argv[1]))
own = values.pop("own") if len(sys.argv) > 2 else 0
args = TrainingArguments(**values)
""",
        {"starred": ["pure.json"], "picked": ["args.json", "pick"]},
    ),
    "coded": (
        """
import helper
args = helper.make(
    TrainingArguments)
args.optim = "sgd"
""",
        {"code": []},
    ),
    "assigned": (
        """
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.max_steps = 9
""",
        {"assigned": ["--optim", "sgd"]},
    ),
    "two": (
        """
other = TrainingArguments("x")
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args, other = (args, other) if sys.argv[1] == "--optim" else (other, args)
""",
        {"two_flags": ["--optim", "sgd"], "two_code": ["--max_steps", "3"]},
    ),
    "copying": (
        """
import copy
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args = copy.deepcopy(args)
""",
        {"copied": ["--optim", "sgd"]},
    ),
    "moved": (
        """
path = os.path.abspath(sys.argv[1])
os.makedirs("sub", exist_ok=True)
os.chdir("sub")
own, args = HfArgumentParser((Own, TrainingArguments)).parse_dict(json.load(open(path)))
""",
        {"moved": ["args.json"]},
    ),
    "with_trl": (
        """
from trl import SFTConfig, TrlParser
own, args = TrlParser((Own, SFTConfig)).parse_args_and_config()
""",
        {
            "trl_config": ["--config", "args.yaml", "--optim", "sgd"],
            "trl_flags": ["--optim", "sgd", "--bf16", "False"],
        },
    ),
    "converted": (
        """
from trl import SFTConfig
from trl.trainer import sft_trainer
given = TrainingArguments("x", max_steps=1)
# What SFTTrainer does with them, in its own file.
convert = compile("from trl import SFTConfig\\ndef convert(values): return SFTConfig(**values)", sft_trainer.__file__, "exec")
space = {"__name__": "trl.trainer.sft_trainer"}
exec(convert, space)
args = space["convert"]({"output_dir": "x", "bf16": False})
""",
        {"converted": []},
    ),
}


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    commands = {}
    for name, (body, calls) in SCRIPTS.items():
        (folder / f"{name}.py").write_text(HEAD + body)
        commands |= {call: [f"{name}.py", *words] for call, words in calls.items()}
    settings = {"own": 1, "output_dir": "out", "max_steps": 3}
    (folder / "args.json").write_text(json.dumps(settings))
    (folder / "args.yaml").write_text("own: 1\noutput_dir: out\nbf16: false\n")
    (folder / "pure.json").write_text(json.dumps({"output_dir": "out", "max_steps": 3}))
    (folder / "other.json").write_text('{"something": "else"}')
    (folder / "flags.txt").write_text("--optim sgd")
    (folder / "helper.py").write_text('def make(cls):\n    return cls(\n        output_dir="x")\n')
    (folder / "scripts.json").write_text(json.dumps(commands))
    # By -c, since the driver stands for autofit and is nobody's file.
    run = subprocess.run([sys.executable, "-c", DRIVER], cwd=folder, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return folder, json.loads((folder / "answers.json").read_text())


def line_of(script: str, text: str) -> int:
    return next(n for n, line in enumerate((HEAD + SCRIPTS[script][0]).splitlines(), start=1) if text in line)


def expected(**said):
    return {"kind": "flags", "file": None, "flags": False, "where": None, "assigned": [], **said}


@pytest.mark.parametrize("name", ["flags", "nothing", "rest", "config_flag", "trl_flags", "two_flags", "copied"])
def test_flags_of_the_command_are_flags(child, name):
    assert child[1][name] == expected(flags=True)


@pytest.mark.parametrize(
    ("name", "kind", "file", "more"),
    [
        ("json", "json", "args.json", {}),
        ("yaml", "yaml", "args.yaml", {}),
        ("trl_config", "yaml", "args.yaml", {"flags": True}),
        ("dict", "json", "args.json", {"assigned": ["max_steps"]}),
        ("dict_option", "json", "args.json", {"assigned": ["max_steps"]}),
        ("moved", "json", "args.json", {}),
        ("starred", "json", "pure.json", {}),
    ],
)
def test_a_file_is_named_by_whoever_read_it(child, name, kind, file, more):
    assert child[1][name] == expected(kind=kind, file=str(child[0] / file), **more)


@pytest.mark.parametrize(
    ("name", "script", "text"),
    [
        ("fixed", "fixed", "args, ="),
        ("two_files", "parse_dict", "own, args"),
        ("hidden", "hidden_dict", "return"),
        ("hidden_other", "hidden_dict", "return"),
        ("picked", "starred", "TrainingArguments(**values)"),
        ("two_code", "two", 'TrainingArguments("x")'),
        ("converted", "converted", 'TrainingArguments("x"'),
    ],
)
def test_what_no_word_of_the_command_decides_is_code_at_a_line(child, name, script, text):
    assert child[1][name] == expected(kind="code", where=f"{script}.py:{line_of(script, text)}")


def test_the_line_is_that_of_the_call_in_the_users_own_module(child):
    assert child[1]["code"] == expected(kind="code", where="helper.py:2", assigned=["optim"])


def test_what_is_assigned_after_parsing_is_said(child):
    assert child[1]["assigned"] == expected(flags=True, assigned=["max_steps"])


def test_a_script_that_is_installed_has_a_line_too(tmp_path):
    """Every frame lies in site-packages; the script's own is then the user's."""
    driver = """
import os, sys, sysconfig
from autofit.harness.arguments_source import SourceLog
log = SourceLog(("train.py",))
path = os.path.join(sysconfig.get_path("purelib"), "somebody", "train.py")
library = os.path.join(sysconfig.get_path("purelib"), "somebody", "lib.py")
script = {"__name__": "__main__", "log": log}
inner = {"__name__": "somebody.lib"}
exec(compile("def make(log): log.constructed(log, {})", library, "exec"), inner)
exec(compile("\\n\\ndef run(make): make(log)", path, "exec"), script)
script["run"](inner["make"])
print(log.source_of(log).where)
"""
    run = subprocess.run([sys.executable, "-c", driver], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert Path(run.stdout.strip()).parts[-2:] == ("somebody", "train.py:3"), run.stderr


def test_several_listen_to_one_module_and_its_import_still_fails_or_works(tmp_path, monkeypatch):
    (tmp_path / "listened_to.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    heard = []
    for number in range(3):
        when_imported("listened_to", lambda module, number=number: heard.append((number, module.value)))
    import listened_to

    when_imported("listened_to", lambda module: heard.append((3, module.value)))
    assert sorted(heard) == [(number, 1) for number in range(4)]
    assert listened_to.__spec__.name == "listened_to"
    sys.modules.pop("listened_to")
