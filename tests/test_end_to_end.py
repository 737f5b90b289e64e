"""The command as a user runs it: real children, a real Trainer, a tiny model; and the same after being killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest
from transformers import BertConfig, HfArgumentParser, TrainingArguments

COMMON = ("--device", "cpu", "--budget", "400MB", "--max-probes", "8", "--eval-rows", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=500, num_labels=3
    )
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(folder)
    return folder


def start(model: Path, run: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "autofit", "search", "--model", str(model), "--seq-len", "16"]
    return subprocess.Popen(
        [*command, "--effective-batch", "8", "--out", str(run), *COMMON, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def journal(run: Path, kind: str = "measurement") -> list[dict]:
    path = run / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry["record"] for entry in map(json.loads, lines) if entry["kind"] == kind]


def wait_for(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def left_over(run: Path) -> list[int]:
    """Processes that mention the run directory or one of its probes."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if str(run) in " ".join(process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


@pytest.mark.long  # test_examples does as much in less; this one is of a model
def test_one_command_measures_confirms_and_emits(model, tmp_path):
    run = tmp_path / "run"
    process = start(model, run, "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    answer = json.loads(out)
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(str(run / "best/training_args.json"))
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 8
    best = answer["selection"]["best"]
    assert best["peak_bytes"] <= answer["budget"]["device_bytes"]
    confirmations = [m for m in journal(run) if m["purpose"] == "confirm"]
    measured = [m["candidate"] for m in journal(run)]
    predicted = journal(run, "prediction")
    assert predicted and all(p["candidate"] in measured and not p["failure"] for p in predicted)
    assert len(confirmations) >= 2
    assert {m["start"] for m in confirmations} == {"fresh"}
    assert all({"train", "evaluate", "train-again", "save"} <= {p["name"] for p in m["phases"]} for m in confirmations)
    assert len(journal(run)) <= 8
    assert not list(run.glob("probes/*/output"))
    again = start(model, run, "--json")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert json.loads(out)["selection"]["best"]["candidate"] == best["candidate"]
    assert len(journal(run)) == len(answer["measurements"])


def test_a_killed_search_leaves_nothing_behind_and_the_same_command_goes_on(model, tmp_path):
    run = tmp_path / "run"
    process = start(model, run)
    wait_for(lambda: len(journal(run)) == 2 and (run / "probes/0003/progress.jsonl").exists())
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), 15)
    before = journal(run)
    process = start(model, run)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert journal(run)[: len(before)] == before
    searched = [
        m for m in journal(run) if m["purpose"] in ("baseline", "train", "evaluate") and m["outcome"] != "contaminated"
    ]
    keys = [json.dumps([m["candidate"], m["purpose"]], sort_keys=True) for m in searched]
    assert len(keys) == len(set(keys))
    for phase in ("train", "evaluate"):
        trials = optuna.load_study(study_name=phase, storage=f"sqlite:///{run / 'study.db'}").get_trials()
        assert all(trial.state is optuna.trial.TrialState.COMPLETE for trial in trials)
    assert not left_over(run)


def test_ctrl_c_ends_at_once_with_the_best_so_far(model, tmp_path):
    run = tmp_path / "run"
    process = start(model, run)
    wait_for(lambda: len(journal(run)) >= 1 and (run / "probes/0002/progress.jsonl").exists())
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == 130
    assert "the same command resumes" in err
    assert "Traceback" not in err
    assert (run / "provisional/training_args.json").exists()
    assert not left_over(run)
