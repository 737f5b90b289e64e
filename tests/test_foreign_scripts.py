"""Scripts as others write them: what they do that the examples here do not, and how their own mistakes are told.

Each test stands for a fault that a script from elsewhere has shown. Scripts here are written for it, none is copied.
"""

import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK
from standing import Standing
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import autofit
from autofit.errors import UsageError, WorkloadError
from autofit.harness.accumulation_check import check_accumulation
from autofit.harness.main_module import own_traceback
from autofit.records import Candidate, Failure, Measurement, Outcome, Reply, Schedule, ScriptTask, Speed, Task
from autofit.study.decision import Decision
from autofit.study.judgement import difference_of
from autofit.study.preflight import explain_failure
from autofit.workloads.script_task import source_digest

LIMIT = 120.0
SETTINGS = Candidate({"per_device_train_batch_size": 8})
PRELUDE = """
import os, sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

ROWS = [{"input_ids": torch.arange(6) + i % 9, "labels": torch.tensor(i % 3)} for i in range(32)]

def make_trainer(**more):
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))
    arguments = TrainingArguments("out", use_cpu=True, report_to="none", **more.pop("arguments", {}))
    return Trainer(model, arguments, train_dataset=ROWS, **more)
"""


def told(machine, tmp_path, source, *arguments):
    """What the search says of a script that does not come to its training."""
    with Standing(tmp_path, machine, source, *arguments) as standing:
        with pytest.raises(WorkloadError) as error:
            standing.describe()
        return error.value


# ---- the script's own mistakes ----


def test_a_parser_that_refuses_the_command_line_is_shown_with_its_usage(machine, tmp_path):
    source = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()"
    error = told(machine, tmp_path, source, "--dat", "x", "--more")
    assert "exited with 2 before it trained" in str(error)
    assert "needs a script that trains" not in str(error)  # it may well be one
    assert error.log.startswith("usage: train.py")
    assert "unrecognized arguments: --more" in error.log
    folder = str(error).rpartition("its whole output is in ")[2]
    assert os.path.exists(os.path.join(folder, "stderr.log"))


def test_a_script_that_ends_well_without_a_trainer_is_told_what_is_needed(machine, tmp_path):
    error = told(machine, tmp_path, "import sys\nsys.exit()")
    assert "exited with 0" in str(error) and "None" not in str(error)
    assert "the train() of a transformers Trainer" in str(error)
    assert "process that it starts" not in str(error) and "one that it starts" not in str(error)


def test_a_script_that_worked_in_another_process_is_told_that_nobody_looks_there(machine, tmp_path):
    work = "import time\\nwhile time.process_time() < 2.3: pass"
    error = told(machine, tmp_path, f'import subprocess\nsubprocess.run([sys.executable, "-c", "{work}"], check=True)')
    assert "in its own process and not in one that it starts" in str(error)


def test_the_traceback_of_a_script_begins_with_the_script(machine, tmp_path):
    error = told(machine, tmp_path, "def read():\n    raise LookupError('no rows')\nread()")
    assert error.log.splitlines()[1].strip().startswith(f'File "{tmp_path / "work" / "train.py"}"')
    assert "worker.py" not in error.log and "main_module.py" not in error.log


def test_a_module_that_is_not_there_is_told_without_a_traceback(launcher, ask, tmp_path):
    request = ask(Task(script=ScriptTask(("-m", "no_such_module"), str(tmp_path))))
    ended = launcher.probe(request, how="fork", time_limit=LIMIT)
    error = explain_failure(request.task, ended.reply, Path(request.folder), kept=False)
    assert "No module named no_such_module" in str(error) and "runpy" not in error.log
    assert request.folder not in str(error)  # where it is not kept


def test_a_fault_of_autofit_keeps_its_whole_traceback():
    try:
        autofit.units.parse_bytes("no size")
    except autofit.errors.AutofitError as error:
        whole = own_traceback(error.with_traceback(error.__traceback__.tb_next))  # without this file's own frame
    assert "units.py" in whole


def test_a_script_that_trains_only_when_told_to_is_told_so(launcher, ask, script):
    ended = launcher.probe(ask(script(PRELUDE + "make_trainer()")), how="fork", time_limit=LIMIT)
    assert ended.reply.failure.kind == "no_training"
    assert "--do_train" in ended.reply.failure.message


def test_a_script_that_dies_while_its_accumulation_is_checked_did_not_fail_before_its_training(tmp_path):
    task = Task(script=ScriptTask(("train.py",), str(tmp_path)))
    for phase, where in (("accumulation", "in the first steps of its training"), ("load", "before training started")):
        reply = Reply(Outcome.CRASHED, failure=Failure(phase, None, "exit 7", "exit 7 without a reply"))
        assert f"the script failed {where} (exit 7" in str(explain_failure(task, reply, tmp_path))


# ---- an evaluation that fails, in a training that does not ----


def measured(outcome=Outcome.FITS, failure=None, purpose="baseline", evaluated=False):
    speed = Speed(8, (1.0, 1.0))
    return Measurement(
        *("0001", purpose, SETTINGS, outcome, 3.0),
        failure=failure,
        train_speed=speed if outcome is Outcome.FITS else None,
        eval_speed=speed if evaluated else None,
    )


@pytest.mark.parametrize(
    ("phase", "expected"), [("metrics", None), ("evaluate", None), ("backward", "crashed against fits")]
)
def test_a_fresh_start_that_makes_no_evaluation_does_not_speak_against_a_fork_whose_evaluation_failed(phase, expected):
    forked = measured(Outcome.CRASHED, Failure(phase, 3, "ValueError", "my metrics"))
    assert difference_of(forked, measured(purpose="canary")) == expected


def decide(tmp_path, own, *others):
    """What is said where nothing was confirmed."""
    search = SimpleNamespace(
        space=SimpleNamespace(baseline=SETTINGS, values={}),
        run_train=lambda in_code: None,
        race=lambda in_code: None,
        ranked=lambda in_code: [],
        history=lambda: [own, *others],
        baseline_measurement=lambda: own,
    )
    return Decision(search, tmp_path, None, None, 0.01, None).run()


@pytest.mark.parametrize(
    ("phase", "step", "where"),
    [
        ("load", None, "before the first step"),
        ("optimizer", 2, "in step 2"),
        ("metrics", 3, "in computing the metrics"),
    ],
)
def test_where_the_users_own_settings_fail_is_said_in_words(tmp_path, phase, step, where):
    with pytest.raises(WorkloadError, match=f"your own settings fail {where} "):
        decide(tmp_path, measured(Outcome.CRASHED, Failure(phase, step, "KeyError", "a column")))


# ---- commands ----


@pytest.mark.parametrize("marked", [(), ("pkg",), ("pkg", "pkg/train")])
def test_a_module_is_found_in_folders_with_and_without_an_init(tmp_path, monkeypatch, marked):
    (tmp_path / "pkg/train").mkdir(parents=True)
    for folder in marked:
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    digests = []
    for text in ("first", "second"):
        for name in ("run", "__main__"):
            (tmp_path / f"pkg/train/{name}.py").write_text(f"{text} {name}")
        digests += [source_digest(("-m", "pkg.train.run")), source_digest(("-m", "pkg.train"))]
    assert len(set(digests)) == 4  # a change of the very file is a change of the task
    assert "pkg" not in sys.modules
    assert source_digest(("-m", "pkg.nowhere.run")) == source_digest(("-m", "pkg.nowhere.run"))


# ---- processes of the script's own ----


def test_a_training_in_a_process_that_the_script_forks_is_measured(launcher, ask, script):
    source = """
def train():
    make_trainer().train()
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
"""
    ended = launcher.probe(ask(script(PRELUDE + source), schedule=QUICK), how="fork", time_limit=LIMIT)
    assert ended.reply.outcome is Outcome.FITS, ended.reply.failure
    assert ended.reply.steps > 3


def test_a_training_in_several_processes_is_refused_where_it_makes_its_trainer(launcher, ask, script):
    source = "torch.set_num_threads(1)\nos.environ['WORLD_SIZE'] = '2'\nTrainer(None)"
    request = ask(script(PRELUDE + source), schedule=Schedule(describe_only=True))
    ended = launcher.probe(request, how="fork", time_limit=LIMIT)
    error = explain_failure(request.task, ended.reply, Path(request.folder))
    assert isinstance(error, UsageError) and "trains in 2 processes" in str(error)


@pytest.mark.long
def test_ranks_that_a_launcher_in_the_script_starts_end_at_once_with_that_message(machine, tmp_path):
    source = PRELUDE + (
        "def train():\n    make_trainer().train()\n\nfrom accelerate import notebook_launcher\n"
        "notebook_launcher(train, (), num_processes=2)"
    )
    with Standing(tmp_path, machine, source) as standing, pytest.raises(UsageError, match="trains in 2 processes"):
        standing.describe()


# ---- data ----


class Weighted(Trainer):
    """Draws rows by the frequency of their labels, which it asks of its data set as a whole."""

    def get_train_dataloader(self):
        labels = torch.tensor(self.train_dataset.labels)
        weights = 1.0 / torch.bincount(labels)[labels].float()
        sampler = torch.utils.data.WeightedRandomSampler(weights, len(weights))
        return torch.utils.data.DataLoader(
            self.train_dataset,
            self.args.train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            drop_last=True,
        )


class Labelled(torch.utils.data.Dataset):
    def __init__(self, count):
        self.labels = [i % 3 for i in range(count)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": [index % 50] * (3 + index % 5), "labels": self.labels[index]}


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.skipif(not hasattr(Trainer, "loss_is_scaled_for_ga"), reason="before transformers 5.19")
def test_gradients_are_compared_also_where_the_scripts_loader_weighs_its_whole_data_set(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=8)
    dataset = Labelled(60)
    trainer = Weighted(model, arguments, pad, dataset)
    found = check_accumulation(trainer, functools.partial(Trainer.train, trainer))
    assert not found.failure
    assert found.difference == pytest.approx(1.0, abs=1e-3)  # this model's loss is a mean of each micro-batch
    assert trainer.train_dataset is dataset and trainer.args.per_device_train_batch_size == 8
