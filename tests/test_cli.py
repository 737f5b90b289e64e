"""The command line parses strictly, prints where it should, maps errors to exit codes, and starts at once."""

import dataclasses
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from report_cases import BASELINE, BUDGET, DESCRIPTION, LARGE, MACHINE, MB, usual

from autofit import __version__, api, errors
from autofit.api import LEAST_PROBES, Options, Plan, Result
from autofit.cli import commands
from autofit.cli.options import EPILOG, OPTIONS
from autofit.knobs import KNOBS
from autofit.records import ModelTask, Task
from autofit.report.outlook import PlannedStep

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "optuna", "pandas", "rich", "numpy", "pynvml", "transformers", "msgspec")
TASK = Task(model=ModelTask("gpt2", {}, "causal-lm", 32, "float32", 1000, seq_len=128))


class Fake:
    """Stands for `api.search` and `api.plan`: keeps what it was asked, tells the listener, gives a result or raises."""

    def __init__(self, error: BaseException | None = None):
        self.asked: list[dict] = []
        self._error = error

    def search(self, *, listener=None, **options):
        self._listen(listener, options)
        measurements, chosen = usual()
        return Result(Path("runs/x"), chosen, BUDGET, MACHINE, DESCRIPTION, measurements, {"total": 3.0})

    def plan(self, *, listener=None, **options):
        self._listen(listener, options)
        step = PlannedStep(LARGE, "train", "why", 400 * MB, 0.5)
        return Plan(Path("runs/x"), BUDGET, MACHINE, DESCRIPTION, BASELINE, [step], None)

    def _listen(self, listener, options):
        self.asked.append(options)
        if listener is not None:
            listener.prepared(TASK, MACHINE, BUDGET, "runs/x", 0)
        if self._error is not None:
            raise self._error


@pytest.fixture
def fake(monkeypatch):
    def install(error=None):
        stand_in = Fake(error)
        monkeypatch.setattr(api, "search", stand_in.search)
        monkeypatch.setattr(api, "plan", stand_in.plan)
        return stand_in

    return install


def run_fresh(*arguments, **settings):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, **settings
    )


# Help


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("search", "--help"), ("predict", "--help"), ("apply", "--help"), ("--version",)],
    ids=" ".join,
)
def test_help_is_there_at_once_and_loads_nothing_heavy(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = run_fresh("-m", "autofit", *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0 and run.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3
    listed = run_fresh("-X", "importtime", "-m", "autofit", *arguments).stderr
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in listed.splitlines() if "|" in line}
    assert "click" in loaded
    assert loaded & set(HEAVY) == set()


def test_the_version_is_told(capsys):
    assert commands.run(["--version"]) == 0
    assert capsys.readouterr().out == f"autofit {__version__}\n"


def test_without_arguments_there_is_help(capsys):
    assert commands.run([]) == 0
    assert "search" in capsys.readouterr().out


def test_every_option_of_a_search_is_on_the_command_line_with_its_default(fake):
    stand_in = fake()
    assert commands.run(["search", "--model", "gpt2"]) == 0
    assert stand_in.asked == [dataclasses.asdict(Options(model="gpt2"))]


def test_help_tells_the_default_of_every_option():
    for option in OPTIONS:
        assert option.is_flag or option.name == "model" or "Default: " in option.help, option.name
        if isinstance(option.default, (int, float)) and not option.is_flag:
            assert f"Default: {option.default:g}" in option.help


def test_help_tells_the_fewest_probes_as_a_search_refuses_fewer():
    (option,) = [option for option in OPTIONS if option.name == "max_probes"]
    assert f"from {LEAST_PROBES} on" in option.help


def test_help_names_every_knob():
    named = set(re.findall(r"\w+", EPILOG.split("Knobs")[1]))
    assert set(KNOBS) - {"gradient_accumulation_steps", "loss"} <= named  # these two follow from the batch


def test_the_examples_in_the_help_can_be_typed(fake):
    stand_in = fake()
    examples = [line.split()[1:] for line in EPILOG.splitlines() if line.startswith("  autofit ")]
    assert [commands.run(example) for example in examples] == [0] * len(examples)
    assert len(stand_in.asked) == len(examples) >= 5


# Parsing


def test_options_reach_the_search_as_they_were_typed(fake):
    stand_in = fake()
    line = (
        "search --model gpt2 --seq-len 128 --lora r=16 --budget 24GB --knob precision=bf16 --knob optim=sgd "
        "--allow training --max-probes 9 --min-gain 0.02 --headroom 0.1 --args a.json"
    )
    assert commands.run(line.split()) == 0
    (asked,) = stand_in.asked
    expected = {
        "model": "gpt2",
        "command": None,
        "seq_len": 128,
        "lora_rank": 16,
        "budget": "24GB",
        "knobs": ("precision=bf16", "optim=sgd"),
        "allow": ("training",),
        "max_probes": 9,
        "min_gain": 0.02,
        "headroom": 0.1,
        "args": "a.json",
        "dtype": None,
    }
    assert {name: asked[name] for name in expected} == expected
    assert set(asked) == {f.name for f in dataclasses.fields(Options)}


def test_everything_after_the_dashes_is_the_users_command(fake):
    stand_in = fake()
    command = ["python", "-u", "train.py", "--seed", "4", "--json", "--", "--quiet", "--help"]
    assert commands.run(["search", "--seed", "3", "--", *command]) == 0
    (asked,) = stand_in.asked
    assert asked["command"] == tuple(command)
    assert (asked["seed"], asked["model"]) == (3, None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("search --modle gpt2", "no such option.*--model"),
        ("search", "name a model .*or give your own command after --"),
        ("search --budget 24GB", "name a model"),
        ("search --model gpt2 -- python train.py", "exclude each other; leave one of them out"),
        ("search --model gpt2 --", "nothing stands after --.*-- python train.py"),
        ("search python train.py", "'python' is no option.*put -- before your own command"),
        ("search python train.py --budget 24GB", "'python' is no option.*put -- before"),
        ("search python train.py --learning_rate 3", "--learning_rate is no option of autofit; put -- before"),
        ("search --model gpt2 --lora r=0", "r=0.*write --lora r=16"),
        ("search --model gpt2 --lora x", "'x' is no rank"),
        ("search --model gpt2 --seq-len many", "'many' is not a valid integer"),
        ("search --model gpt2 --allow everything", "'everything' is not one of 'training', 'code'"),
        ("search --model", "--model' requires an argument"),
        ("serch --model gpt2", "no such command 'serch'"),
        ("--modle", "no such option"),
    ],
)
def test_a_line_that_cannot_be_parsed_is_one_error_line_with_the_way_out(fake, capsys, line, expected):
    stand_in = fake()
    assert commands.run(line.split()) == 2
    told = capsys.readouterr()
    assert (told.out, stand_in.asked) == ("", [])
    assert re.fullmatch(rf"error: [^\n]*{expected}[^\n]*\n", told.err)


# Output


def test_without_json_progress_and_result_are_on_stdout(fake, capsys):
    fake()
    assert commands.run(["search", "--model", "gpt2"]) == 0
    told = capsys.readouterr()
    assert "task       gpt2" in told.out and "2.1× the samples/s of your settings" in told.out
    assert told.err == ""


def test_json_is_one_object_on_stdout_while_progress_is_on_stderr(fake, capsys):
    fake()
    assert commands.run(["search", "--model", "gpt2", "--json"]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 1
    value = json.loads(told.out)
    assert value["folder"] == "runs/x" and value["timing"] == {"total": 3.0}
    assert value["selection"]["best"]["gain"] == 2.102
    assert [m["probe"] for m in value["measurements"]] == ["0001", "0002", "0003", "0004", "0005", "0006"]
    assert "task       gpt2" in told.err


def test_json_has_nothing_on_stdout_when_the_search_fails(fake, capsys):
    fake(errors.NothingFitsError("nothing fits"))
    assert commands.run(["search", "--model", "gpt2", "--json"]) == 4
    assert capsys.readouterr().out == ""


def test_quiet_leaves_the_result_alone(fake, capsys):
    fake()
    for line in ("--quiet", "-q --json"):
        assert commands.run(["search", "--model", "gpt2", *line.split()]) == 0
        told = capsys.readouterr()
        assert "task       gpt2" not in told.out + told.err
        assert "2.1" in told.out


def test_a_dry_run_plans_and_does_not_search(fake, capsys, monkeypatch):
    fake()
    monkeypatch.setattr(api, "search", None)
    assert commands.run(["search", "--model", "gpt2", "--dry-run"]) == 0
    assert "nothing was probed" in capsys.readouterr().out
    assert commands.run(["search", "--model", "gpt2", "--dry-run", "--json"]) == 0
    (candidate,) = json.loads(capsys.readouterr().out)["candidates"]
    assert (candidate["purpose"], candidate["why"], candidate["estimated_relative_seconds"]) == ("train", "why", 0.5)
    assert candidate["estimated_train_bytes"] == 400 * MB and candidate["values"]["per_device_train_batch_size"] == 32


# Errors


def every_error():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AutofitError)]
    return [(kind, kind.exit_code) for kind in kinds]


@pytest.mark.parametrize(("kind", "code"), every_error(), ids=lambda v: getattr(v, "__name__", v))
def test_an_error_is_told_on_stderr_and_is_the_exit_code(fake, capsys, kind, code):
    fake(kind("the fact; the way out"))
    assert commands.run(["search", "--model", "gpt2", "-q"]) == code > 0
    told = capsys.readouterr()
    prefix = "" if kind is errors.Interrupted else "error: "
    assert (told.out, told.err) == ("", f"{prefix}the fact; the way out\n")


def test_the_log_of_a_workload_follows_its_error_indented_and_without_escape_sequences(fake, capsys):
    fake(errors.WorkloadError("the script failed", "Traceback:\n  File x\n\x1b[31mValueError\x1b[0m: no"))
    assert commands.run(["search", "-q", "--", "python", "train.py"]) == 3
    expected = "error: the script failed\n    Traceback:\n      File x\n    [31mValueError [0m: no\n"
    assert capsys.readouterr().err == expected


def test_sizes_in_the_error_of_a_workload_are_told_in_the_users_unit(fake, capsys):
    fake(errors.WorkloadError("the model's weights alone take 400 MiB and the budget is 96000000 bytes"))
    for budget, expected in (
        ("96MB", "419 MB and the budget is 96.0 MB"),
        ("1GiB", "400 MiB and the budget is 91.6 MiB"),
    ):
        assert commands.run(["search", "-q", "--budget", budget, "--", "python", "train.py"]) == 3
        assert expected in capsys.readouterr().err


def test_a_message_of_several_lines_keeps_them(fake, capsys):
    fake(errors.NothingFitsError("nothing fits:\n  add --lora r=16\n  add --budget 1GB"))
    assert commands.run(["search", "--model", "gpt2", "-q"]) == 4
    assert capsys.readouterr().err == "error: nothing fits:\n  add --lora r=16\n  add --budget 1GB\n"


@pytest.mark.parametrize("error", [KeyError("a bug"), BrokenPipeError("of a child"), click.UsageError("from inside")])
def test_a_bug_keeps_its_traceback(fake, error):
    fake(error)
    with pytest.raises(type(error)):
        commands.run(["search", "--model", "gpt2", "-q"])


def test_ctrl_c_anywhere_is_130_and_says_that_it_resumes(fake, capsys):
    fake(KeyboardInterrupt())
    assert commands.run(["search", "--model", "gpt2", "-q"]) == 130
    assert capsys.readouterr().err == "stopped; the same command resumes\n"


def test_sigterm_is_ctrl_c_and_the_handler_is_given_back(fake, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(api, "search", lambda **_: os.kill(os.getpid(), signal.SIGTERM))
    assert commands.run(["search", "--model", "gpt2", "-q"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_has_gone_ends_the_command_without_a_traceback(fake, monkeypatch):
    fake()
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert commands.run(["search", "--model", "gpt2"]) == 141
        closed.write("what is written after that goes nowhere, instead of failing once more at the end")


def test_help_to_a_reader_that_has_gone_ends_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "autofit", "search", "--help"]
    run = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert run.returncode != 0 and run.stderr == ""


def test_output_that_the_stream_cannot_encode_is_no_failure(fake, monkeypatch):
    fake()
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert commands.run(["search", "--model", "gpt2"]) == 0
    assert b"2.1? the samples/s of your settings" in raw.getvalue()


def test_python_m_autofit_returns_the_exit_code():
    run = run_fresh("-m", "autofit", "search")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: nothing to search for")
