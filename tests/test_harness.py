"""The hold on a real Trainer: candidates are applied whatever way a script gives its arguments, and what is no training
is found out. Every test forks a real child from one warm server; scripts write what they saw with their own callback.
"""

import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import make_task

from autofit.harness.device_meter import CudaMeter
from autofit.harness.evaluation import HOLE_BYTES
from autofit.harness.take_hold import when_imported
from autofit.launch import Ended, Launcher, MismatchError
from autofit.records import Outcome, PhaseRecord, Request, Schedule, Task

MiB = 2**20
LIMIT = 60.0
SHORT = Schedule(timed_steps=0, evaluate=False)  # memory of training only
PEAKS = Schedule(timed_steps=0)  # memory of training and evaluation
TIMED = Schedule(timed_steps=2, timed_seconds=0.2)

# What every script begins with. `Seen` writes what the Trainer really holds at the end of a step.
PRELUDE = """
import copy, dataclasses, json, os, pickle, sys
from dataclasses import dataclass
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (EarlyStoppingCallback, HfArgumentParser, LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer,
    Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments)

SHAPES = set()

def note_shape(module, args, kwargs):
    if module.training:
        SHAPES.add(kwargs["input_ids"].shape[0])

def make_model(**changes):
    sizes = dict(vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    model.register_forward_pre_hook(note_shape, with_kwargs=True)
    return model

def row(index, length=8):
    ids = (torch.arange(length) + index) % 100
    return {"input_ids": ids, "labels": ids.clone()}

class Rows(Dataset):
    def __init__(self, rows=64, length=8):
        self.rows, self.length = rows, length
    def __len__(self):
        return self.rows
    def __getitem__(self, index):
        return row(index, self.length)

class Stream(IterableDataset):
    def __iter__(self):
        index = 0
        while True:
            yield row(index)
            index += 1

class Seen(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        seen = dict(batch=args.per_device_train_batch_size, accumulation=args.gradient_accumulation_steps,
            optim=args.optim.value, rate=args.learning_rate, output_dir=args.output_dir, shapes=sorted(SHAPES),
            checkpointing=model.is_gradient_checkpointing, attention=model.config._attn_implementation,
            strategy=args.eval_strategy.value, metric=args.metric_for_best_model, report=args.report_to)
        with open("seen.json", "w") as file:
            json.dump(seen, file)

def accuracy(prediction):
    scores = prediction.predictions
    classes = scores.argmax(-1) if scores.ndim == 3 else scores
    return {"accuracy": float((classes[:, :-1] == prediction.label_ids[:, 1:]).mean())}

def make_trainer(args, kind=Trainer, **changes):
    given = dict(model=make_model(), args=args, train_dataset=Rows(), callbacks=[Seen()])
    return kind(**{**given, **changes})
"""
CANDIDATE = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "optim": "adafactor",
    "activation_checkpointing": True,
    "per_device_eval_batch_size": 4,
}
ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.fixture
def train(launcher: Launcher, ask, script):
    """`train(source, *arguments, …)`: run PRELUDE and the source in a fork and say how it ended, and what it noted."""

    def run(source: str, *arguments: str, how="fork", expected=None, prelude=PRELUDE, **fields) -> "Run":
        task = script(prelude + textwrap.dedent(source), *arguments)
        request = ask(task, **{"schedule": SHORT, "arguments": CANDIDATE, **fields})
        return Run(launcher.probe(request, how=how, time_limit=LIMIT, expected=expected), request)

    return run


@pytest.fixture
def measure(launcher: Launcher, ask):
    """`measure(task, …)`: the same for a built-in workload."""

    def run(task: Task, **fields) -> "Run":
        arguments = {**ONE, "per_device_eval_batch_size": 8, **fields.get("arguments", {})}
        if "files" in fields:
            arguments = fields.get("arguments", {})
        request = ask(task, **{"schedule": PEAKS, **fields, "arguments": arguments})
        return Run(launcher.probe(request, how="fork", time_limit=LIMIT), request)

    return run


class Run:
    """One ended probe, with what its script noted."""

    def __init__(self, ended: Ended, request: Request) -> None:
        self.ended, self.reply, self.failure, self.request = ended, ended.reply, ended.reply.failure, request
        self.outcome = ended.reply.outcome

    @property
    def folder(self) -> Path:
        return Path(self.request.task.script.directory)

    @property
    def seen(self) -> dict:
        return json.loads((self.folder / "seen.json").read_text())

    def phase(self, name: str) -> PhaseRecord:
        return next(phase for phase in self.reply.phases if phase.name == name)

    def __repr__(self) -> str:
        return f"{self.outcome.value}: {self.failure}"


# ---- every way to give arguments ----

RATE = 0.0123  # of the user's own, to be kept
WAYS = {
    "keywords": "args = TrainingArguments(output_dir='out', learning_rate=0.0123, per_device_train_batch_size=16)",
    "a positional output_dir": "args = TrainingArguments('out', learning_rate=0.0123, gradient_accumulation_steps=3)",
    "flags": "args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]",
    "a dictionary": "args = HfArgumentParser(TrainingArguments).parse_dict(dict(output_dir='out', learning_rate=0.0123))[0]",
    "assigned afterwards": "args = TrainingArguments('out', optim='sgd')\n"
    "args.learning_rate = 0.0123\nargs.per_device_train_batch_size = 16",
    "replaced": "args = dataclasses.replace(TrainingArguments('out', per_device_train_batch_size=16), learning_rate=0.0123)",
    "replaced with the old name": "args = dataclasses.replace(TrainingArguments('out', gradient_checkpointing=False), "
    "learning_rate=0.0123)",
    "deepcopied": "args = copy.deepcopy(TrainingArguments('out', learning_rate=0.0123, gradient_checkpointing=False))",
    "pickled": "args = pickle.loads(pickle.dumps(TrainingArguments('out', learning_rate=0.0123)))",
    "from its own dictionary": "args = TrainingArguments(**TrainingArguments('out', learning_rate=0.0123).to_dict())",
    "the old name off": "args = TrainingArguments('out', learning_rate=0.0123, gradient_checkpointing=False)",
    "the new name off": "args = TrainingArguments('out', learning_rate=0.0123, activation_checkpointing=False)",
    "a dataclass of it": "@dataclass\nclass Mine(TrainingArguments):\n    extra: int = 3\n"
    "args = Mine(output_dir='out', learning_rate=0.0123, extra=5)\ncheck = lambda: args.extra == 5",
    "a class with its own __init__": "class Mine(TrainingArguments):\n    def __init__(self, extra, *rest, **more):\n"
    "        super().__init__(*rest, **more)\n        self.extra = extra\n"
    "args = Mine(5, 'out', learning_rate=0.0123)\ncheck = lambda: args.extra == 5",
    "with an attribute of its own": "args = TrainingArguments('out', learning_rate=0.0123)\nargs.own = [1]\n"
    "check = lambda: args.own == [1]",
    "Seq2SeqTrainingArguments": "args = Seq2SeqTrainingArguments('out', learning_rate=0.0123, predict_with_generate=True)\n"
    "check = lambda: args.predict_with_generate",
}
FLAGS = ["--output_dir", "out", "--learning_rate", "0.0123", "--per_device_train_batch_size", "16", "--optim", "sgd"]


@pytest.mark.parametrize("way", WAYS)
def test_a_candidate_is_applied_to_arguments_given_as(train, way):
    source = f"check = lambda: True\n{WAYS[way]}\ntrainer = make_trainer(args)\nassert check()\nassert trainer.args is args\n"
    run = train(source + "trainer.train()", *(FLAGS if way == "flags" else ()))
    assert run.outcome is Outcome.FITS, run
    assert run.seen["rate"] == RATE
    _assert_applied(run)


def test_a_candidate_is_applied_where_no_arguments_are_given(train):
    run = train("make_trainer(None).train()")
    assert run.outcome is Outcome.FITS, run
    _assert_applied(run)


def _assert_applied(run: Run) -> None:
    seen = run.seen
    assert (seen["batch"], seen["accumulation"], seen["optim"]) == (2, 4, "adafactor")
    assert seen["checkpointing"] is True  # on the model itself
    assert seen["shapes"] == [2]
    assert seen["output_dir"].startswith(run.request.folder)
    assert run.reply.echo["arguments"] == CANDIDATE
    assert run.reply.echo["micro_batches"] == [2]
    assert run.reply.echo["rows_per_step"] == 8
    assert run.reply.echo["optimizer"] == "Adafactor"
    assert not {"out", "tmp_trainer", "trainer_output"} & {path.name for path in run.folder.iterdir()}


@pytest.mark.parametrize("given", ["gradient_checkpointing=True", "activation_checkpointing=True"])
def test_checkpointing_that_the_user_has_on_is_off_where_the_candidate_says_so(train, given):
    candidate = {**CANDIDATE, "activation_checkpointing": False}
    run = train(f"make_trainer(TrainingArguments('out', {given})).train()", arguments=candidate)
    assert run.outcome is Outcome.FITS, run
    assert run.seen["checkpointing"] is False


def test_the_users_own_arguments_stay_where_the_candidate_says_nothing(train):
    run = train(
        "make_trainer(TrainingArguments('out', gradient_checkpointing=True, optim='sgd', "
        "per_device_train_batch_size=3)).train()",
        arguments={},
    )
    seen = run.seen
    assert (seen["batch"], seen["accumulation"], seen["optim"], seen["checkpointing"]) == (3, 1, "sgd", True)


def test_two_trainers_with_arguments_of_their_own_both_get_the_candidate(train):
    run = train("""
    first = make_trainer(TrainingArguments('one', learning_rate=0.5))
    second = make_trainer(TrainingArguments('two', learning_rate=0.0123))
    assert first.args.per_device_train_batch_size == second.args.per_device_train_batch_size == 2
    second.train()
    """)
    assert run.outcome is Outcome.FITS, run
    _assert_applied(run)


# ---- what a script does to undo a candidate ----


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("trainer = make_trainer(args)\ntrainer.args.gradient_accumulation_steps = 7", "gradient_accumulation_steps=7"),
        ("trainer = make_trainer(args)\ntrainer.args = copy.deepcopy(args)", "other arguments"),
        (
            "model = make_model()\ntrainer = make_trainer(args, model=model, "
            "optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))",
            "its own optimizer, so that adafactor has no effect",
        ),
        (
            "trainer = make_trainer(args)\ntrainer.model.activation_checkpointing_enable()",
            "turns activation checkpointing on",
        ),
    ],
)
def test_a_candidate_that_the_script_undoes_is_invalid(train, source, told):
    candidate = {**CANDIDATE, "activation_checkpointing": False}
    run = train(f"args = TrainingArguments('out')\n{source}\ntrainer.train()", arguments=candidate)
    assert (run.outcome, run.failure.kind) == (Outcome.INVALID, "not_applied"), run
    assert told in run.failure.message


def test_a_script_with_its_own_optimizer_runs_where_the_candidate_leaves_that_alone(train):
    run = train(
        """
        model = make_model()
        trainer = make_trainer(TrainingArguments('out', optim='sgd'), model=model,
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))
        trainer.train()
        """,
        arguments={**CANDIDATE, "optim": "sgd"},
    )
    assert run.outcome is Outcome.FITS, run


def test_a_script_that_has_the_trainer_make_its_optimizer_early_gets_the_candidates(train):
    run = train("trainer = make_trainer(TrainingArguments('out'))\ntrainer.create_optimizer()\ntrainer.train()")
    assert run.outcome is Outcome.FITS, run
    _assert_applied(run)


def test_a_reported_setting_that_is_not_the_one_expected_is_a_bug_and_raised(train):
    with pytest.raises(MismatchError, match="optim='sgd' and reports 'adafactor'"):
        train("make_trainer(TrainingArguments('out')).train()", expected={"optim": "sgd"})


# ---- Trainers of all kinds ----

TRAINERS = {
    "its own compute_loss": """
    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss
    make_trainer(args, Mine).train()
    """,
    "an __init__ that reads its arguments": """
    class Mine(Trainer):
        def __init__(self, weight, *rest, args=None, **more):
            self.batch_before = args.per_device_train_batch_size
            super().__init__(*rest, args=args, **more)
    trainer = Mine(2.0, make_model(), args=args, train_dataset=Rows(), callbacks=[Seen()])
    assert trainer.batch_before == 2
    trainer.train()
    """,
    "all positional": """
    trainer = Trainer(make_model(), args, None, Rows())
    trainer.add_callback(Seen)
    trainer.train()
    """,
    "its own train()": """
    class Mine(Trainer):
        def train(self, *rest, **more):
            return super().train(*rest, **more)
    make_trainer(args, Mine).train(resume_from_checkpoint=True)
    """,
    "Seq2SeqTrainer": """
    args = Seq2SeqTrainingArguments('out', learning_rate=0.0123)
    make_trainer(args, Seq2SeqTrainer).train()
    """,
    "early stopping": """
    args = TrainingArguments('out', learning_rate=0.0123, eval_strategy='epoch', save_strategy='epoch',
        load_best_model_at_end=True)
    make_trainer(args, callbacks=[Seen(), EarlyStoppingCallback(1)], eval_dataset=Rows(16)).train()
    """,
    "a metric of another set": """
    args = TrainingArguments('out', learning_rate=0.0123, eval_strategy='steps', eval_steps=10,
        metric_for_best_model='eval_small_loss', load_best_model_at_end=True, save_steps=10)
    make_trainer(args, callbacks=[Seen(), EarlyStoppingCallback(1)],
        eval_dataset={'small': Rows(8), 'large': Rows(16)}).train()
    """,
    "a plateau scheduler": """
    args = TrainingArguments('out', learning_rate=0.0123, eval_strategy='steps', eval_steps=10,
        lr_scheduler_type='reduce_lr_on_plateau')
    make_trainer(args, eval_dataset=Rows(16)).train()
    """,
    "an endless stream": """
    args = TrainingArguments('out', learning_rate=0.0123, max_steps=3)
    make_trainer(args, train_dataset=Stream()).train()
    """,
    "a stream without max_steps": "make_trainer(args, train_dataset=Stream(), eval_dataset=None).train()",
    "model_init": "make_trainer(args, model=None, model_init=lambda: make_model()).train()",
    "loader workers": """
    args = TrainingArguments('out', learning_rate=0.0123, dataloader_num_workers=1, dataloader_persistent_workers=True)
    make_trainer(args, eval_dataset=Rows(16)).train()
    """,
    "a callback that stops training": """
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = True
    make_trainer(args, callbacks=[Seen(), Stop()], eval_dataset=Rows(16)).train()
    """,
    "a callback that saves and evaluates": """
    class Busy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_evaluate = True
    make_trainer(args, callbacks=[Seen(), Busy()], eval_dataset=Rows(16)).train()
    """,
    "a tracker that is not installed": """
    args = TrainingArguments('out', learning_rate=0.0123, report_to=['tensorboard', 'wandb'])
    make_trainer(args).train()
    """,
    "an evaluation before": """
    trainer = make_trainer(args, eval_dataset=Rows(16), compute_metrics=accuracy)
    assert trainer.evaluate()['eval_loss'] > 0
    trainer.train()
    """,
    "a flattening collator": """
    def flatten(rows):
        return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    make_trainer(args, data_collator=flatten).train()
    """,
    "a set of three rows": "make_trainer(args, train_dataset=Rows(3), eval_dataset=Rows(1)).train()",
}
TRAINERS["a thread of its own"] = """
    import threading
    threading.Thread(target=lambda: make_trainer(args).train()).start()
    """
ODD_SHAPES = {"a flattening collator": [1]}


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_candidate_is_measured_on_a_trainer_with(train, kind):
    source = "args = TrainingArguments('out', learning_rate=0.0123)\n" + textwrap.dedent(TRAINERS[kind])
    run = train(source, schedule=PEAKS)
    assert run.outcome is Outcome.FITS, run
    seen = run.seen
    assert (seen["rate"], seen["batch"], seen["accumulation"], seen["optim"]) == (RATE, 2, 4, "adafactor")
    assert seen["checkpointing"] is True
    assert seen["shapes"] == ODD_SHAPES.get(kind, [2])
    assert seen["report"] == []
    names = [phase.name for phase in run.reply.phases]
    assert names == (
        ["load", "train", "evaluate", "train-again"]
        if "eval_dataset=" in source.replace("eval_dataset=None", "")
        else ["load", "train"]
    )
    assert {path.name for path in run.folder.iterdir()} == {"train.py", "seen.json"}
    assert not list(Path(run.request.folder).rglob("checkpoint-*"))
    assert run.reply.steps >= 4


def test_the_largest_of_several_evaluation_sets_is_measured_and_said(train):
    run = train(
        "make_trainer(TrainingArguments('out'), eval_dataset={'a': Rows(5), 'b': Rows(32)}).train()", schedule=PEAKS
    )
    assert run.outcome is Outcome.FITS, run
    assert run.reply.growth.rows_total == 32
    assert "evaluation: b, the largest of 2 sets" in run.reply.notes


def test_without_an_evaluation_set_nothing_is_evaluated(train):
    run = train("make_trainer(TrainingArguments('out')).train()", schedule=TIMED)
    assert [phase.name for phase in run.reply.phases] == ["load", "train"]
    assert run.reply.growth is None
    assert run.reply.train_speed is not None


def test_a_checkpoint_is_measured_and_removed(train):
    run = train(
        "make_trainer(TrainingArguments('out')).train()", schedule=Schedule(timed_steps=0, evaluate=False, save=True)
    )
    assert [phase.name for phase in run.reply.phases] == ["load", "train", "save"]
    assert not list(Path(run.request.folder).rglob("checkpoint-*"))


def test_nothing_of_a_script_runs_after_its_train(train):
    run = train("""
    import atexit
    atexit.register(lambda: open("at_exit", "w"))
    trainer = make_trainer(TrainingArguments('out'))
    try:
        trainer.train()
    except BaseException:
        pass
    finally:
        open("finally", "w")
    open("after", "w")
    """)
    assert run.outcome is Outcome.FITS
    assert {path.name for path in run.folder.iterdir()} == {"train.py", "seen.json"}


@pytest.mark.parametrize("error", ["ValueError('wrong')", "KeyboardInterrupt('wrong')", "SystemExit('wrong')"])
def test_what_is_raised_in_training_is_the_reply_though_the_script_would_catch_it(train, error):
    run = train(f"""
    class Broken(Trainer):
        def compute_loss(self, *args, **kwargs):
            raise {error}
    try:
        make_trainer(TrainingArguments('out'), Broken).train()
    except BaseException:
        pass
    open("after", "w")
    """)
    assert (run.outcome, run.failure.kind) == (Outcome.CRASHED, error.partition("(")[0])
    assert (run.failure.phase, run.failure.step, run.failure.message) == ("train", 1, "wrong")
    assert "compute_loss" in run.failure.traceback
    assert not (run.folder / "after").exists()


def test_a_name_that_the_arguments_lack_is_a_crash_that_names_it(train):
    run = train("make_trainer(TrainingArguments('out')).train()", arguments={"no_such_field": 1})
    assert run.outcome is Outcome.CRASHED
    assert "no_such_field" in run.failure.message


def test_a_trainer_that_is_made_and_never_trained_is_told_from_none(train):
    run = train("make_trainer(TrainingArguments('out'))")
    assert (run.outcome, run.failure.kind) == (Outcome.CRASHED, "no_training")


def test_a_fresh_interpreter_gives_the_same_as_a_fork(train):
    """Its script may set the environment before it imports torch, and looks for modules before it imports them."""
    before = (
        "import importlib.util, os, sys\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert importlib.util.find_spec('transformers.trainer') is not None\n"
    )
    source = "make_trainer(TrainingArguments('out', learning_rate=0.0123)).train()"
    run = train(source, how="fresh", prelude=before + PRELUDE)
    assert run.outcome is Outcome.FITS, run
    assert run.seen["rate"] == RATE
    _assert_applied(run)


# ---- description ----


def test_a_description_tells_the_workload_as_the_user_made_it(train):
    run = train(
        """
        class Mine(Trainer):
            def training_step(self, *args):
                raise AssertionError
        make_trainer(TrainingArguments('out', learning_rate=0.0123, per_device_train_batch_size=16, hub_token='secret'), Mine,
            eval_dataset=Rows(20, length=11), compute_metrics=accuracy).train()
        """,
        schedule=Schedule(describe_only=True),
        arguments={},
    )
    assert run.outcome is Outcome.FITS, run
    description = run.reply.description
    assert description.arguments == {"output_dir": "out", "learning_rate": RATE, "per_device_train_batch_size": 16}
    assert description.resolved["per_device_train_batch_size"] == 16
    assert description.resolved["activation_checkpointing"] is False
    assert description.resolved["eval_strategy"] == "no"
    assert (description.train_rows, description.eval_rows, description.longest_row) == (64, 20, 8)
    assert description.parameters == sum(description.dtypes.values()) > 5000
    assert (description.has_metrics, description.has_logits_reduction) == (True, False)
    assert description.can_checkpoint
    assert set(description.attentions) == {"sdpa", "eager"}
    assert "secret" not in (Path(run.request.folder) / "reply.json").read_text()


def test_checkpointing_that_a_script_turns_on_itself_is_described_as_on(train):
    run = train(
        "trainer = make_trainer(TrainingArguments('out'))\ntrainer.model.activation_checkpointing_enable()\ntrainer.train()",
        schedule=Schedule(describe_only=True),
        arguments={},
    )
    assert run.reply.description.resolved["activation_checkpointing"] is True


def test_arguments_that_a_parser_fills_in_are_described_as_those_that_were_given(train):
    described = Schedule(describe_only=True)
    run = train(WAYS["flags"] + "\nmake_trainer(args).train()", *FLAGS, schedule=described, arguments={})
    assert run.reply.description.arguments == {
        "output_dir": "out",
        "learning_rate": RATE,
        "per_device_train_batch_size": 16,
        "optim": "sgd",
    }


def test_fields_that_a_subclass_adds_are_left_to_the_script(train):
    source = "args = Seq2SeqTrainingArguments('out', learning_rate=0.0123, predict_with_generate=True)"
    run = train(source + "\nmake_trainer(args).train()", schedule=Schedule(describe_only=True), arguments={})
    assert run.reply.description.arguments == {"output_dir": "out", "learning_rate": RATE}
    assert "predict_with_generate" in run.reply.description.fields  # the command may still say it


def test_no_argument_that_says_something_is_taken_for_a_default(train):
    """The class moves values from older names to newer ones, and an empty list is not the default of None."""
    run = train(
        "make_trainer(TrainingArguments('out', gradient_checkpointing=True, label_names=[])).train()",
        schedule=Schedule(describe_only=True),
        arguments={},
    )
    assert run.reply.description.arguments == {
        "output_dir": "out",
        "gradient_checkpointing": True,
        "label_names": [],
    }


def test_of_iterable_sets_a_description_tells_the_rows_that_probes_will_take(train):
    source = """
    args = TrainingArguments('out', max_steps=3)
    make_trainer(args, train_dataset=Stream(), eval_dataset={'a': Stream(), 'b': Stream()}).train()
    """
    description = train(source, schedule=Schedule(describe_only=True), arguments={}).reply.description
    run = train(source, schedule=PEAKS)
    assert (description.train_rows, description.longest_row) == (None, 8)
    assert description.eval_rows == run.reply.growth.rows_total > 64
    assert "evaluation: a, the largest of 2 sets" in description.notes
    assert [note for note in description.notes if note.startswith("rows: the first 500 of an iterable data set")]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("deepspeed", "{'zero_optimization': {'stage': 2}}"), ("fsdp", "['full_shard']"), ("parallelism_config", "print")],
)
def test_a_script_for_several_processes_is_refused(train, setting, value):
    run = train(
        f"args = TrainingArguments('out')\nargs.{setting} = {value}\nmake_trainer(args).train()",
        schedule=Schedule(describe_only=True),
        arguments={},
    )
    assert run.failure.kind == "UsageError", run
    assert f"{setting} is set" in run.failure.message


# ---- what is no training ----

LOSS = """
class Mine(Trainer):
    calls = 0
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        Mine.calls += model.training
        outputs = model(**inputs)
        loss = change(outputs.loss, Mine.calls)
        return (loss, outputs) if return_outputs else loss
make_trainer(TrainingArguments('out'), Mine).train()
"""


@pytest.mark.parametrize(
    ("value", "condition"),
    [("nan", "calls == 1"), ("nan", "calls == 2"), ("nan", "calls == 7"), ("nan", "calls >= 3"), ("inf", "calls == 7")],
)
def test_one_loss_that_is_no_number_makes_a_probe_invalid(train, value, condition):
    change = f"change = lambda loss, calls: loss + (float('{value}') if {condition} else 0.0)\n"
    run = train(change + LOSS, arguments=ONE, schedule=Schedule(timed_steps=8, timed_seconds=5, evaluate=False))
    assert (run.outcome, run.failure.kind) == (Outcome.INVALID, "nonfinite_loss"), run
    assert run.reply.echo["arguments"] == ONE


@pytest.mark.parametrize(
    ("change", "outcome", "kind", "told"),
    [
        ("loss * 0", Outcome.INVALID, "no_gradient", "no gradient reaches"),
        ("torch.ones((), requires_grad=True) * 2", Outcome.INVALID, "no_gradient", "no gradient reaches"),
        ("loss.detach()", Outcome.CRASHED, "RuntimeError", "does not require grad"),
        ("None", Outcome.CRASHED, "AttributeError", "NoneType"),
    ],
)
def test_a_loss_without_a_gradient_is_no_training(train, change, outcome, kind, told):
    run = train(f"change = lambda loss, calls: {change}\n{LOSS}", arguments=ONE)
    assert run.outcome is outcome, run
    assert run.failure.kind in (kind, "TypeError")
    assert told in run.failure.message


def test_gradients_that_the_script_has_turned_off_are_missed_in_training_only(train):
    run = train("torch.set_grad_enabled(False)\nmake_trainer(TrainingArguments('out')).train()")
    assert (run.outcome, run.failure.phase) == (Outcome.CRASHED, "backward"), run
    assert "does not require grad" in run.failure.message


def test_a_frozen_model_is_no_training(train):
    run = train("""
    model = make_model()
    for parameter in model.parameters():
        parameter.requires_grad = False
    make_trainer(TrainingArguments('out'), model=model).train()
    """)
    assert (run.outcome, run.failure.kind) in (
        (Outcome.INVALID, "no_gradient"),  # checkpointing makes the embedding's output require a gradient
        (Outcome.CRASHED, "RuntimeError"),
    ), run
    assert "gradient" in run.failure.message or "does not require grad" in run.failure.message


def test_parameters_that_become_no_numbers_make_a_probe_invalid(train):
    run = train(
        """
        class Spoil(TrainerCallback):
            def on_step_end(self, args, state, control, model=None, **kwargs):
                next(model.parameters()).data[7, 0] = float("nan")
        make_trainer(TrainingArguments('out'), callbacks=[Spoil()],
                     train_dataset=[row(20, 3) for _ in range(16)]).train()
        """
    )
    assert (run.outcome, run.failure.kind) == (Outcome.INVALID, "nonfinite_parameters"), run


LOADER = """
class Mine(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size={size}, collate_fn=self.data_collator))
make_trainer(TrainingArguments('out'), Mine, train_dataset=Rows({rows})).train()
"""


@pytest.mark.parametrize(("size", "rows"), [("1", 64), ("16", 64), ("self.args.train_batch_size", 1)])
def test_a_loader_with_another_batch_makes_a_probe_invalid(train, size, rows):
    run = train(LOADER.format(size=size, rows=rows))
    assert (run.outcome, run.failure.kind) == (Outcome.INVALID, "wrong_batch"), run
    assert "instead of 8" in run.failure.message


def test_a_loader_of_the_script_that_takes_the_batch_from_the_arguments_is_measured(train):
    run = train(LOADER.format(size="self.args.train_batch_size", rows=35), schedule=TIMED)
    assert run.outcome is Outcome.FITS, run
    assert "the script makes its own training loader" in " ".join(run.reply.notes)
    assert 2 in run.seen["shapes"]


OWN_EVALUATION = """
def count(prediction):
    with open("rows.json", "a") as file:
        print(len(prediction.predictions), file=file)
    return {{}}
class Mine(Trainer):
    def get_eval_dataloader(self, eval_dataset=None):
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        rows = {rows}
        return DataLoader(rows, batch_size=3, collate_fn=self.data_collator)
make_trainer(TrainingArguments('out'), Mine, eval_dataset={sets}, compute_metrics=count).train()
"""


@pytest.mark.parametrize(
    ("rows", "sets", "taken"),
    [
        ("Rows(12)", "Rows(60)", 12),
        ("eval_dataset or self.eval_dataset", "Rows(60)", 60),
        ("eval_dataset", "{'a': Rows(60), 'b': Rows(7)}", 60),
    ],
)
def test_an_evaluation_loader_of_the_script_takes_everything_and_nothing_is_claimed_of_it(train, rows, sets, taken):
    source = OWN_EVALUATION.format(rows=rows, sets=sets)
    run = train(source, schedule=TIMED, timed_eval_rows=24)
    assert run.outcome is Outcome.FITS, run
    assert "evaluation: the script makes its own loader" in " ".join(run.reply.notes)
    assert (run.folder / "rows.json").read_text().split() == [str(taken)] * 2  # again, to see what it keeps
    assert run.reply.growth is run.reply.eval_speed is None
    assert run.phase("evaluate").process_bytes > 0
    described = train(source, schedule=Schedule(describe_only=True), arguments={}).reply.description
    assert described.eval_rows is None  # so that no search varies its settings
    assert "evaluation: the script makes its own loader" in " ".join(described.notes)


def test_a_collator_that_drops_rows_makes_a_probe_invalid(train):
    run = train(
        """
    def drop(rows):
        return {name: torch.stack([row[name] for row in rows[:3]]) for name in rows[0]}
    make_trainer(TrainingArguments('out'), data_collator=drop).train()
    """,
        arguments=ONE,
    )
    assert (run.outcome, run.failure.kind) == (Outcome.INVALID, "wrong_batch"), run


# ---- memory that runs out ----

WIDE = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100_000}  # the embedding alone is 24 MiB


@pytest.fixture(scope="module")
def wide() -> Task:
    return make_task(config={**make_task().model.config, **WIDE}, seq_len=4)


def test_weights_above_the_budget_are_told_as_that(measure, wide):
    run = measure(wide, budget_bytes=10 * MiB)
    assert (run.outcome, run.failure.kind) == (Outcome.DEVICE_OOM, "weights_above_budget")
    assert "the budget is 10 MiB" in run.failure.message


HUNGRY = {
    "train": "change = lambda loss, calls: loss + torch.zeros(25 * 2**20).sum()\n",
    "backward": """
class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss * 1
    @staticmethod
    def backward(context, gradient):
        return gradient + torch.zeros(25 * 2**20).sum()
change = lambda loss, calls: Hungry.apply(loss)
""",
    "optimizer": """
change = lambda loss, calls: loss
def step(optimizer, *rest):
    return torch.zeros(25 * 2**20).sum()
torch.optim.SGD.step = step
""",
}


@pytest.mark.parametrize("phase", HUNGRY)
def test_the_cap_is_met_in_training_and_told(train, phase):
    arguments = {**ONE, "optim": "sgd"}
    run = train(HUNGRY[phase] + LOSS, arguments=arguments, budget_bytes=60 * MiB)
    assert run.outcome is Outcome.DEVICE_OOM, run
    assert (run.failure.phase, run.failure.step) == (phase, 1)
    assert run.reply.cap == "enforced"
    assert "can't allocate memory" in run.failure.message
    assert run.reply.echo["arguments"] == arguments
    assert train(HUNGRY[phase] + LOSS, arguments=arguments, budget_bytes=300 * MiB).outcome is Outcome.FITS


def test_the_cap_is_met_in_evaluation_only_and_told(measure):
    task = make_task(config={**make_task().model.config, "vocab_size": 5000}, seq_len=64, eval_rows=1000)
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "per_device_eval_batch_size": 100}
    run = measure(task, budget_bytes=90 * MiB, arguments=arguments)
    assert (run.outcome, run.failure.phase) == (Outcome.DEVICE_OOM, "evaluate"), run
    assert [phase.name for phase in run.reply.phases] == ["load", "train"]
    run = measure(task, budget_bytes=90 * MiB, arguments={**arguments, "per_device_eval_batch_size": 4})
    assert run.outcome is Outcome.FITS, run


METRICS = """
def metrics(prediction):
    {body}
make_trainer(TrainingArguments('out'), eval_dataset=Rows(16), compute_metrics=metrics).train()
"""


@pytest.mark.parametrize(
    ("body", "budget", "outcome", "kind"),
    [
        ("raise MemoryError", None, Outcome.HOST_OOM, "MemoryError"),
        ("return {'a': float(np.ones(2**28).sum())}", 200 * MiB, Outcome.HOST_OOM, "MemoryError"),
        ("raise ValueError('no such class')", None, Outcome.CRASHED, "ValueError"),
    ],
)
def test_a_failure_in_the_metrics_function_has_its_phase(train, body, budget, outcome, kind):
    run = train(METRICS.format(body=body), schedule=PEAKS, budget_bytes=budget)
    assert (run.outcome, run.failure.kind, run.failure.phase) == (outcome, kind, "metrics"), run


FAULT = """
import ctypes, resource
class Faulty(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        if CONDITION:
            ctypes.string_at(0)
        return super().compute_loss(model, inputs, **kwargs)
make_trainer(TrainingArguments('out'), Faulty).train()
"""


def test_a_fault_under_the_cap_is_settled_by_a_second_run_without_it(train):
    capped = "resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY"
    run = train(FAULT.replace("CONDITION", capped), budget_bytes=60 * MiB)
    assert run.outcome is Outcome.FITS, run
    assert run.reply.cap == "none"
    assert "it died by signal 11 under the cap" in run.reply.notes[-1]
    run = train(FAULT.replace("CONDITION", "True"), budget_bytes=60 * MiB)
    assert (run.outcome, run.failure.kind) == (Outcome.CRASHED, "signal 11 (SIGSEGV)")


@pytest.mark.parametrize("budget", [4, 8, 12])
def test_bf16_above_the_budget_is_never_a_crash(measure, budget):
    task = make_task(task="text-classification", seq_len=64)
    run = measure(task, budget_bytes=budget * MiB, arguments={"bf16": True})
    if run.outcome is Outcome.FITS:
        assert run.phase("train").process_bytes > budget * MiB  # for the parent to judge
    else:
        assert run.outcome is Outcome.DEVICE_OOM, run


def test_a_probe_that_runs_holds_no_more_than_its_cap_allows(measure, tiny_task):
    run = measure(tiny_task, budget_bytes=64 * MiB)
    assert run.outcome is Outcome.FITS, run
    assert run.reply.cap == "enforced"
    assert all(0 < phase.process_bytes < 64 * MiB for phase in run.reply.phases)


@pytest.mark.parametrize("rows", ["Heavy(64)", "HeavyStream()"])
def test_rows_that_are_read_to_be_sorted_are_no_memory_of_the_training(train, rows):
    run = train(f"""
    class Heavy(Rows):
        def __getitem__(self, index):
            waste = torch.ones(80 * 2**20, dtype=torch.uint8) if index > 32 else None
            return row(index)
    class HeavyStream(Stream):
        def __iter__(self):
            for index in range(500):
                yield {{**row(index), "waste": torch.ones(2**18, dtype=torch.uint8)}}
    make_trainer(TrainingArguments('out'), train_dataset={rows}).train()
    """)
    assert run.outcome is Outcome.FITS, run
    assert run.phase("train").process_bytes < 40 * MiB


def test_a_model_that_is_made_anew_for_training_counts_once(train):
    source = """
    import gc, weakref
    def big():
        return make_model(vocab_size=100_000, hidden_size=32, tie_word_embeddings=True)
    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            gc.collect()
            json.dump(first() is model or first() is None, open("one.json", "w"))
    trainer = make_trainer(TrainingArguments('out'), HOW, callbacks=[Look()])
    first = weakref.ref(trainer.model)
    trainer.train()
    """
    live = []
    for how in ("model=big()", "model=None, model_init=lambda: big()"):
        run = train(source.replace("HOW", how), arguments={**ONE, "optim": "sgd"})
        assert run.outcome is Outcome.FITS, run
        assert json.loads((run.folder / "one.json").read_text()) is True
        live.append(run.phase("train").allocated_bytes)
    assert live[1] == pytest.approx(live[0], rel=0.01)


def test_loading_is_a_phase_of_its_own_and_holds_the_weights(measure, tiny_task):
    run = measure(tiny_task)
    description = measure(tiny_task, schedule=Schedule(describe_only=True)).reply.description
    assert run.phase("load").process_bytes == pytest.approx(description.parameter_bytes, rel=0.1)  # and buffers
    assert 0 < run.phase("load").seconds < run.ended.seconds


class Card:
    """The counters of a made-up GPU: one allocator that caches, no context to be told."""

    def __init__(self) -> None:
        self.live = self.cached = self.live_peak = self.reserved_peak = 0

    def hold(self, more: int) -> None:
        self.live += more
        self.cached = max(self.cached, self.live)
        self.live_peak, self.reserved_peak = max(self.live_peak, self.live), max(self.reserved_peak, self.cached)

    def reset_peaks(self) -> None:
        self.live_peak, self.reserved_peak = self.live, self.cached

    def empty_cache(self) -> None:
        self.cached = self.live

    def allocated_bytes(self) -> int:
        return self.live

    def reserved_bytes(self) -> int:
        return self.cached

    def peak_allocated_bytes(self) -> int:
        return self.live_peak

    def peak_reserved_bytes(self) -> int:
        return self.reserved_peak

    def touch(self) -> None: ...

    def process_bytes(self) -> None: ...

    def used_bytes_without_context(self) -> None: ...

    def retries(self) -> int:
        return 0


def test_on_a_gpu_nothing_of_the_loading_counts_as_training():
    card = Card()
    meter = CudaMeter(card)
    meter.attach(None)
    card.hold(900 * MiB)  # weights in float32, before they are converted
    card.hold(-500 * MiB)
    load = meter.enter_training(torch.nn.Linear(1, 1), None)
    card.hold(100 * MiB)
    train = meter.peaks()
    assert (load.allocated_bytes, load.process_bytes) == (900 * MiB, 900 * MiB)
    assert (train.allocated_bytes, train.process_bytes) == (500 * MiB, 500 * MiB)


def test_steps_that_the_scaler_skips_do_not_count_as_steps_in_which_the_peak_may_settle(train):
    run = train("""
    from accelerate import Accelerator
    from autofit.harness.device_meter import CpuMeter, Peaks
    begun = []
    class Count(TrainerCallback):
        def on_step_begin(self, *rest, **more):
            begun.append(1)
    Accelerator.optimizer_step_was_skipped = property(lambda self: len(begun) <= 7)
    CpuMeter.peaks = lambda self: Peaks(None, None, 2 ** (20 + len(begun)), None)  # never two that agree
    make_trainer(TrainingArguments('out'), callbacks=[Count()]).train()
    """)
    assert run.outcome is Outcome.FITS, run
    assert run.reply.skipped_steps == 7
    assert run.reply.steps == 8 + 1  # and that in which live bytes are counted


# ---- what evaluation accumulates ----


def test_no_row_is_evaluated_twice_for_a_peak_that_the_whole_set_never_has(train):
    run = train("make_trainer(TrainingArguments('out'), eval_dataset=Rows(3)).train()", schedule=PEAKS)
    assert (run.reply.growth.rows_measured, run.reply.growth.rows_total) == (3, 3)


def test_bytes_per_row_are_those_of_logits_labels_and_loss(measure, tiny_task):
    growth = measure(tiny_task).reply.growth
    assert growth.outputs == {"logits": 500 * 16 * 4, "labels": 16 * 8, "losses": 4}
    assert growth.device_bytes_per_row == growth.host_bytes_per_row == 500 * 16 * 4 + 16 * 8 + 4
    assert (growth.rows_measured, growth.rows_total) == (32, 64)


def test_logits_that_are_reduced_accumulate_classes_only_and_leave_metrics_alone(measure, tiny_task):
    run = measure(tiny_task, logits="argmax")
    assert run.outcome is Outcome.FITS, run
    assert run.reply.growth.outputs == {"predictions": 16 * 4, "labels": 16 * 8, "losses": 4}
    assert run.reply.echo["logits"] == "argmax"


SOFTMAX = "scores = np.exp(prediction.predictions); return {'p': float((scores / scores.sum(-1, keepdims=True)).max())}"


@pytest.mark.parametrize(
    ("body", "sets"),
    [
        (SOFTMAX, "Rows(16)"),
        (SOFTMAX, "{'a': Rows(16), 'b': Rows(8)}"),
        (SOFTMAX, "Stream()"),
        ("return {'m': float(prediction.predictions.mean())}", "Rows(16)"),
        ("return {'n': prediction.predictions.ndim}", "{'a': Rows(16)}"),
    ],
    ids=["softmax", "softmax of one of several sets", "softmax of a stream", "mean", "shape"],
)
def test_metrics_that_need_full_logits_never_fit_with_reduced_ones(train, body, sets):
    source = METRICS.format(body=body).replace("Rows(16)", sets)
    run = train(source.replace("'out'", "'out', max_steps=3"), schedule=PEAKS, logits="argmax")
    assert run.outcome in (Outcome.INVALID, Outcome.CRASHED), run
    assert run.failure.kind == "metrics_changed" or run.outcome is Outcome.CRASHED


def test_metrics_that_are_no_number_on_a_few_rows_are_not_changed_ones(train):
    run = train(
        METRICS.format(body="return {'auc': float('nan'), **accuracy(prediction)}"), schedule=PEAKS, logits="argmax"
    )
    assert run.outcome is Outcome.FITS, run


BIG_EVALUATION = {"vocab_size": 8000}
ROWS = 80  # of 64 × 8000 scores: 164 MB in float32
WHOLE = """
import autofit.harness.evaluation_phases
autofit.harness.evaluation_phases.EVAL_STEPS = 10**6
"""


@pytest.mark.parametrize(
    ("dtype", "accumulation"), [("float32", None), ("bfloat16", None), ("float32", 2), ("bfloat16", 2)]
)
def test_the_projection_is_what_a_whole_evaluation_takes(train, dtype, accumulation):
    source = f"""
    model = make_model(vocab_size=8000).to(torch.{dtype})
    make_trainer(TrainingArguments('out'), model=model, train_dataset=Rows(64, length=64),
        eval_dataset=Rows({ROWS}, length=64), compute_metrics=accuracy).train()
    """
    arguments = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "per_device_eval_batch_size": 2,
        "eval_accumulation_steps": accumulation,
    }
    projected = train(source, schedule=PEAKS, arguments=arguments)
    whole = train(WHOLE + textwrap.dedent(source), schedule=PEAKS, arguments=arguments)
    assert projected.outcome is whole.outcome is Outcome.FITS, (projected, whole)
    assert (projected.reply.growth.rows_measured, whole.reply.growth.rows_measured) == (8, ROWS)
    taken = whole.phase("evaluate").process_bytes
    assert taken > 1.5 * ROWS * 64 * 8000 * (4 if dtype == "float32" else 2)
    # Whether malloc leaves a hole depends on what it has freed before, which the projection allows for.
    assert 0.95 * taken <= projected.reply.growth.projected_process_bytes <= 1.05 * taken + HOLE_BYTES


# ---- the same again, and settings of the model ----


def test_the_same_request_gives_the_same_bytes(measure, tiny_task):
    runs = [
        measure(tiny_task, arguments={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
        for _ in range(6)
    ]
    assert len({run.phase("train").allocated_bytes for run in runs}) == 1
    for name in ("train", "evaluate"):
        held = [run.phase(name).reserved_bytes for run in runs]
        assert max(held) - min(held) <= max(0.05 * min(held), 2 * MiB)


def test_the_warm_up_leaves_no_block_that_a_later_window_would_see_freed(train):
    """torch keeps the size of a block that is freed outside a window, and counts it for what comes to its address."""
    run = train("""
    from torch.profiler import ProfilerActivity, profile
    from autofit.harness.device_meter import _warm_up_cpu
    _warm_up_cpu()
    sizes = [16, 256, 1024, 16384] * 500
    held = [torch.empty(size, dtype=torch.uint8) for size in sizes]  # at the addresses that the warm-up has left
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as window:
        del held
    events = [event for event in window.profiler.kineto_results.events() if event.name() == "[memory]"]
    json.dump(sum(event.nbytes() for event in events), open("freed.json", "w"))
    """)
    assert json.loads((run.folder / "freed.json").read_text()) == 0


def test_live_bytes_tell_optimizers_apart_by_their_state(measure, wide):
    weights = 100_000 * 64 * 4
    live = {
        optimizer: measure(wide, arguments={"optim": optimizer}, schedule=SHORT).phase("train").allocated_bytes
        for optimizer in ("sgd", "adamw_torch")
    }
    assert live["sgd"] > 2 * weights  # and one gradient
    assert live["adamw_torch"] - live["sgd"] == pytest.approx(2 * weights, rel=0.02)


def test_live_bytes_are_counted_when_every_peak_has_been_read_and_the_cap_is_lifted(train):
    """What torch's profiler holds for one step of a model of many small tensors is a fifth of that model's memory."""
    run = train(
        """
        import resource
        from autofit.harness.device_meter import CpuMeter
        calls = []
        def listen(name):
            original = getattr(CpuMeter, name)
            def heard(self, *rest):
                calls.append((name, resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY))
                json.dump(calls, open("calls.json", "w"))
                return original(self, *rest)
            setattr(CpuMeter, name, heard)
        for name in ("peaks", "begin_phase", "live_window"):
            listen(name)
        make_trainer(TrainingArguments('out'), eval_dataset=Rows(8)).train()
        """,
        schedule=Schedule(timed_steps=2, timed_seconds=0.1, save=True),
        budget_bytes=200 * MiB,
    )
    assert run.outcome is Outcome.FITS, run
    calls = json.loads((run.folder / "calls.json").read_text())
    assert calls[-1] == ["live_window", True]
    assert not any(lifted for _, lifted in calls[:-1])
    assert [phase.allocated_bytes is not None for phase in run.reply.phases] == [False, True, False, False, False]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_that_is_asked_for_runs(train, attention):
    other = {"eager": "sdpa", "sdpa": "eager"}[attention]
    for changes in (f"model=make_model(attn_implementation='{other}')", "model=None, model_init=lambda: make_model()"):
        run = train(
            f"make_trainer(TrainingArguments('out'), {changes}).train()",
            model_kwargs={"attn_implementation": attention},
        )
        assert run.outcome is Outcome.FITS, run
        assert run.seen["attention"] == run.reply.echo["attention"] == attention


def test_an_attention_that_does_not_run_is_raised(launcher, ask, script):
    source = "make_trainer(TrainingArguments('out'), callbacks=[Change()]).train()"
    change = (
        "class Change(TrainerCallback):\n    def on_step_end(self, args, state, control, model=None, **kwargs):\n"
        "        model.set_attn_implementation('eager')\n"
    )
    request = ask(script(PRELUDE + change + source), schedule=SHORT, model_kwargs={"attn_implementation": "sdpa"})
    with pytest.raises(MismatchError, match="asked for sdpa attention and ran eager"):
        launcher.probe(request, how="fork", time_limit=LIMIT)


def test_adapters_train_alone_and_keep_their_optimizer_state_small(measure):
    task = make_task(lora_rank=4)
    described = measure(task, schedule=Schedule(describe_only=True)).reply.description
    assert 0 < described.trainable_parameters < described.parameters
    arguments = {"activation_checkpointing": True, "optim": "adamw_torch"}
    run = measure(task, arguments=arguments, model_kwargs={"attn_implementation": "eager"}, schedule=TIMED)
    assert run.outcome is Outcome.FITS, run
    assert run.reply.echo["attention"] == "eager"
    assert run.reply.train_speed.rows == 16


LENGTHS = """
LENGTHS_SEEN = []
class Ragged(Rows):
    def __getitem__(self, index):
        return row(index, 4 + index % 29)  # 4 to 32
def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    return {name: torch.stack([torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows])
            for name, fill in (("input_ids", 0), ("labels", -100))}
class Look(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        json.dump(LENGTHS_SEEN, open("lengths.json", "w"))
model = make_model()
def look(module, args, kwargs):
    if module.training:
        LENGTHS_SEEN.append(kwargs["input_ids"].shape[1])
model.register_forward_pre_hook(look, with_kwargs=True)
make_trainer(TrainingArguments('out', dataloader_num_workers=WORKERS), model=model, train_dataset=Ragged(500),
             data_collator=pad, callbacks=[Look(), Seen()]).train()
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_longest_rows_decide_memory_and_typical_ones_speed(train, workers):
    run = train(LENGTHS.replace("WORKERS", str(workers)), schedule=TIMED)
    assert run.outcome is Outcome.FITS, run
    lengths = json.loads((run.folder / "lengths.json").read_text())
    steps = [tuple(lengths[k : k + 4]) for k in range(0, len(lengths), 4)]  # of four micro-batches each
    assert steps[:3] == [(32, 32, 32, 32)] * 3
    assert steps[-1] == (32, 32, 32, 32)  # live bytes are counted on the longest again
    typical = [step for step in steps if step != (32, 32, 32, 32)]
    assert len(set(typical)) == 2  # the two blocks of a window
    windows = len(run.reply.train_speed.seconds)
    timed = typical[-2 * windows :]
    assert timed == [timed[0], timed[1]] * windows  # whole windows, one after the other
    assert run.seen["shapes"] == [2]


def test_emitted_files_are_what_the_child_runs_with(measure, tiny_task, tmp_path):
    files = tmp_path / "best"
    files.mkdir()
    arguments = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
    }
    (files / "training_args.json").write_text(json.dumps(arguments))
    (files / "model_kwargs.json").write_text('{"attn_implementation": "eager"}')
    (files / "snippet.py").write_text(
        "from transformers import Trainer\ndef preprocess_logits_for_metrics(logits, labels):\n    return logits.argmax(-1)\n"
    )
    run = measure(tiny_task, files=str(files))
    assert run.outcome is Outcome.FITS, run
    assert run.reply.echo["micro_batches"] == [4]
    assert run.reply.echo["rows_per_step"] == 8
    assert run.reply.echo["optimizer"] == "SGD"
    assert run.reply.echo["attention"] == "eager"
    assert run.reply.growth.outputs["predictions"] == 16 * 8


def test_files_that_say_something_else_than_the_candidate_are_a_bug_told_loudly(measure, tiny_task, tmp_path):
    (tmp_path / "training_args.json").write_text('{"per_device_train_batch_size": 4}')
    asked = {"files": str(tmp_path), "schedule": PEAKS}
    measure(tiny_task, arguments={"per_device_train_batch_size": 4}, **asked)
    with pytest.raises(MismatchError, match="per_device_train_batch_size=8 and reports 4"):
        measure(tiny_task, arguments={"per_device_train_batch_size": 8}, **asked)


def test_speed_is_told_over_windows_of_the_same_rows(measure, tiny_task):
    run = measure(tiny_task, schedule=TIMED, timed_eval_rows=24)
    speed = run.reply.train_speed
    assert speed.rows == 16 and len(speed.seconds) >= 2
    assert sum(speed.seconds) >= 0.2
    assert run.reply.eval_speed.rows == 24
    assert run.reply.first_step_seconds < run.ended.seconds
    assert run.reply.measured_seconds >= sum(speed.seconds)


# ---- modules that are yet to be imported ----


@pytest.fixture
def module_on_disk(tmp_path, monkeypatch) -> str:
    (tmp_path / "module_to_watch.py").write_text(
        "import sys\nif 'fail' in sys.argv:\n    raise ImportError\nvalue = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "module_to_watch"
    sys.modules.pop("module_to_watch", None)


def test_an_action_follows_the_import_of_its_module(module_on_disk):
    told: list[ModuleType] = []
    when_imported(module_on_disk, told.append)
    assert told == []
    module = __import__(module_on_disk)
    assert told == [module]
    when_imported(module_on_disk, told.append)
    assert told == [module, module]


def test_looking_for_a_module_or_failing_in_it_loses_no_action(module_on_disk, monkeypatch):
    import importlib.util

    told: list[ModuleType] = []
    when_imported(module_on_disk, told.append)
    assert importlib.util.find_spec(module_on_disk).loader is not None
    monkeypatch.setattr(sys, "argv", ["fail"])
    with pytest.raises(ImportError):
        __import__(module_on_disk)
    assert told == []
    monkeypatch.setattr(sys, "argv", [])
    assert told == [__import__(module_on_disk)]
