"""The example scripts run as examples/README.md says: alone, and unchanged under a real search on the CPU.

The README's table is where the commands are taken from, so that it cannot tell another story. What a search finds is
tested elsewhere; here it has to come to an answer, to hold the effective batch and to leave the script's files alone.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SMALLEST = ("custom_loss.py", "image_folder.py")
SEARCH_SECONDS = 180  # that a search may take on a quiet machine
FEWER_PROBES = ("--max-probes", "8")  # than the README's; of an option that is given twice the later one holds

# Runs a script with two optimizer steps instead of its own number, whatever way it is told that number.
TWO_STEPS = """
import runpy, sys
from transformers import TrainingArguments
resolve = TrainingArguments.__post_init__
def shorten(arguments):
    arguments.max_steps = 2
    resolve(arguments)
TrainingArguments.__post_init__ = shorten
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Row:
    """One row of the README's table."""

    script: str
    alone: list[str]
    search: list[str]


def read_table() -> dict[str, Row]:
    rows = {}
    for line in (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| \[(\w+\.py)\]\((\w+\.py)\) \|", line):
            assert found[1] == found[2]
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            alone, search = (shlex.split(cell.strip("`")) for cell in cells[3:5])
            rows[found[1]] = Row(found[1], alone, search)
    return rows


TABLE = read_table()


def absolute(arguments: list[str]) -> list[str]:
    return [str(EXAMPLES / part.removeprefix("examples/")) if "/" in part else part for part in arguments]


def split_search(row: Row) -> tuple[list[str], list[str]]:
    """Options of the search, and the script's command after `python`."""
    assert row.search[:2] == ["autofit", "search"]
    middle = row.search.index("--")
    assert row.search[middle + 1] == "python"
    return row.search[2:middle], absolute(row.search[middle + 2 :])


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """One thread, no network, and what a script keeps for its next run in a folder of this module's own.

    The folder's path is short: sockets lie below it.
    """
    with tempfile.TemporaryDirectory(prefix="ex") as folder:
        yield {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": f"{folder}/datasets",
            "TMPDIR": folder,
        }


def long_but_for_the_smallest() -> list:
    return [script if script in SMALLEST else pytest.param(script, marks=pytest.mark.long) for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_parses_and_says_how_to_run_it(script):
    tree = ast.parse((EXAMPLES / script).read_text(encoding="utf-8"))
    command = shlex.join(["python", f"examples/{script}"])
    assert command in (ast.get_docstring(tree) or "")
    assert not [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "autofit" in ast.unparse(node)
    ], "an example knows nothing of autofit"


def test_the_table_lists_every_script_and_names_files_that_exist():
    assert sorted(TABLE) == SCRIPTS
    for row in TABLE.values():
        assert row.alone[:2] == ["python", f"examples/{row.script}"]
        options, command = split_search(row)
        assert command[0] == str(EXAMPLES / row.script)
        assert "--budget" in options and options[:2] == ["--device", "cpu"]
        for part in [*absolute(row.alone), *command]:
            assert not part.startswith(str(EXAMPLES)) or Path(part).is_file()


def test_settings_of_the_json_example_are_not_all_arguments_of_the_trainer():
    """Else it would not show that a search leaves a script's own keys alone."""
    from transformers import TrainingArguments

    settings = json.loads((EXAMPLES / "causal_lm.json").read_text(encoding="utf-8"))
    known = set(TrainingArguments.__dataclass_fields__)
    assert known & set(settings) and set(settings) - known


@pytest.mark.parametrize("script", long_but_for_the_smallest())
def test_a_script_trains_and_evaluates_alone(script, environment, tmp_path):
    command = [sys.executable, "-c", TWO_STEPS, *absolute(TABLE[script].alone[1:])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"train_runtime", done.stdout)
    assert re.search(r"eval_loss", done.stdout)


@pytest.mark.timeout(600)  # on a machine that others use, a search repeats probes
@pytest.mark.parametrize("script", long_but_for_the_smallest())
def test_a_search_of_a_script_comes_to_an_answer_in_time(script, environment, tmp_path):
    options, command = split_search(TABLE[script])
    run = tmp_path / "run"
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "autofit",
            "search",
            *options,
            *FEWER_PROBES,
            "--out",
            str(run),
            "--json",
            "--",
            *command,
        ],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=560,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    measured = answer["measurements"]
    assert {m["outcome"] for m in measured} <= {"fits", "contaminated", "over_budget", "device_oom"}, done.stderr
    best = json.loads((run / "best" / "training_args.json").read_text(encoding="utf-8"))
    baseline = next(m for m in measured if m["purpose"] == "baseline")["candidate"]["values"]
    assert rows_per_step(best) == rows_per_step(baseline)
    assert os.listdir(tmp_path) == ["run"], "a probe wrote to the script's own output folder"
    disturbed = any(m["outcome"] == "contaminated" for m in measured)
    assert seconds < SEARCH_SECONDS or disturbed, f"{seconds:.0f} s on a machine that nobody else used"


def rows_per_step(arguments: dict) -> int:
    return arguments.get("per_device_train_batch_size", 8) * arguments.get("gradient_accumulation_steps", 1)
