"""What a training keeps and never gives back is found, with its size, and nothing is found where nothing is kept.

Children are real and forked from one warm server; the scripts leak on purpose.
"""

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading

import numpy
import pytest
from conftest import make_task

from autofit.harness.heap import heap_bytes
from autofit.harness.leaks import LeakWatch, Level, evaluation_growth, is_steady, step_growth
from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.launch import Ended, Launcher
from autofit.leak_words import leak_sentences
from autofit.prediction import ShadowRuns, make_target
from autofit.records import (
    Budget,
    Candidate,
    LeakCheck,
    Outcome,
    PhaseRecord,
    Reply,
    Schedule,
    ShadowDevice,
)
from autofit.schedule import planned
from autofit.study.judgement import judge, measurement_of
from autofit.study.preflight import baseline_of, describe

MiB = 2**20
PEAKS = Schedule(timed_steps=0)
TIMED = Schedule(timed_steps=2, timed_seconds=0.5)
ONE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4}

PRELUDE = """
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Rows(Dataset):
    def __init__(self, rows=2000, length=64):
        self.rows, self.length = rows, length
    def __len__(self):
        return self.rows
    def __getitem__(self, index):
        ids = (torch.arange(self.length) + index) % 100
        return {"input_ids": ids, "labels": ids.clone()}

def make_model():
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=2, **sizes))

def make_args(**changes):
    given = dict(max_steps=1000, eval_strategy="steps", eval_steps=100, per_device_train_batch_size=4)
    return TrainingArguments("out", **{**given, **changes})
"""


@pytest.fixture
def probe(launcher: Launcher, ask, script):
    """`probe(source, …)`: the reply of one probe of PRELUDE and the source."""

    def run(source: str, **fields) -> Reply:
        task = script(PRELUDE + textwrap.dedent(source))
        request = ask(task, **{"schedule": PEAKS, "arguments": ONE, **fields})
        reply = launcher.probe(request, how="fork", time_limit=120.0).reply
        assert reply.outcome is Outcome.FITS, reply.failure
        return reply

    return run


PERSISTENT = """
class Kept(Rows):  # C17: a list of 50 MB, whose elements workers touch
    def __init__(self):
        super().__init__()
        self.numbers = [float(i) for i in range(1_600_000)]
    def __getitem__(self, index):
        sum(self.numbers)
        return super().__getitem__(index)

class Old(Trainer):  # as transformers was before 4.42
    def get_eval_dataloader(self, eval_dataset=None):
        loader = DataLoader(self.eval_dataset, batch_size=4, num_workers=2, persistent_workers=True,
            collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

args = make_args(dataloader_num_workers=2, dataloader_persistent_workers=True)
kept = Kept()
kept.rows = 16
"""


def test_an_evaluation_that_keeps_its_loader_is_found_with_its_processes(probe):
    source = PERSISTENT + "Old(make_model(), args, train_dataset=Rows(), eval_dataset=kept).train()"
    check = probe(source).leaks
    assert check.processes_per_evaluation == 2
    assert check.files_per_evaluation >= 2
    assert check.host_bytes_per_evaluation > 64 * MiB
    assert check.evaluations == 10
    assert check.host_bytes == int(10 * check.host_bytes_per_evaluation)
    assert not check.per_step_bytes


def test_workers_that_persist_in_one_loader_are_none(probe):
    source = PERSISTENT + "Trainer(make_model(), args, train_dataset=Rows(), eval_dataset=kept).train()"
    for fields in ({}, {"schedule": TIMED, "timed_eval_rows": 16}):
        check = probe(source, **fields).leaks
        assert check is not None
        assert not check.found, check


GRAPH = """
class Leaky(Trainer):  # the loss of a second pass, which no backward pass frees
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.true = [], []
    def compute_loss(self, model, inputs, **kwargs):
        storages = {}
        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        if model.training:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                self.losses.append(model(**inputs).loss)
            parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
            self.true.append(sum(size for at, size in storages.items() if at not in parameters))
            open("true", "w").write(str(self.true[-1]))
        return super().compute_loss(model, inputs, **kwargs)
Leaky(make_model(), make_args(eval_strategy="no"), train_dataset=Rows()).train()
"""


@pytest.mark.parametrize("schedule", [PEAKS, TIMED], ids=["untimed", "timed"])
def test_a_loss_that_keeps_its_graph_is_found_with_its_size(probe, schedule, tmp_path):
    check = probe(GRAPH, schedule=schedule).leaks
    true = int((tmp_path / "work/true").read_text())
    assert check.host_bytes_per_step == pytest.approx(true, rel=0.1)
    assert check.device_bytes_per_step == check.host_bytes_per_step  # one memory
    assert check.device_bytes == int(1000 * check.device_bytes_per_step)
    assert check.holders == ("Leaky.losses",)
    assert not check.per_evaluation_bytes


KEEPERS = {
    "a callback that keeps outputs": (
        """
        class Keeper(TrainerCallback):
            def __init__(self):
                self.outputs = []
            def on_step_end(self, args, state, control, model=None, **kwargs):
                self.outputs.append(torch.zeros(1_000_000))
        Trainer(make_model(), make_args(eval_strategy="no"), train_dataset=Rows(), callbacks=[Keeper()]).train()
        """,
        4_000_000,
        ("Keeper.outputs",),
    ),
    "a variable of the script": (
        """
        seen = []
        def note(module, args, output):
            if module.training:
                seen.append(output.logits.detach())
        model = make_model()
        model.register_forward_hook(note)
        Trainer(model, make_args(eval_strategy="no"), train_dataset=Rows()).train()
        """,
        4 * 64 * 100 * 4,
        ("the script: seen",),
    ),
    "arrays, which are no tensors": (
        """
        class Keeper(TrainerCallback):
            outputs = []
            def on_step_end(self, *args, **kwargs):
                self.outputs.append(torch.ones(100_000).numpy().copy())
        Trainer(make_model(), make_args(eval_strategy="no"), train_dataset=Rows(), callbacks=[Keeper()]).train()
        """,
        400_000,
        (),
    ),
}


@pytest.mark.parametrize("case", KEEPERS)
def test_what_each_step_keeps_is_found_and_named(probe, case):
    source, true, holders = KEEPERS[case]
    check = probe(source).leaks
    assert check.host_bytes_per_step == pytest.approx(true, rel=0.1)
    assert check.holders == holders


def test_predictions_that_each_evaluation_keeps_are_told_for_the_whole_set(probe):
    source = """
    class Keeper(Trainer):
        kept = []
        def prediction_step(self, *args, **kwargs):
            found = super().prediction_step(*args, **kwargs)
            self.kept.append(found[1])
            return found
    trainer = Keeper(make_model(), make_args(), train_dataset=Rows(), eval_dataset=Rows(1000),
        compute_metrics=lambda prediction: {})
    trainer.train()
    """
    for fields in ({}, {"schedule": TIMED, "timed_eval_rows": 32}):
        check = probe(source, **fields).leaks
        assert check.host_bytes_per_evaluation == pytest.approx(1000 * 64 * 100 * 4, rel=0.1)
        assert check.evaluations == 10
        assert check.holders == ("Keeper.kept",)


# ---- nothing is found where nothing is kept ----

OFTEN = {"max_steps": 100_000, "eval_strategy": "steps", "eval_steps": 10}  # so that little would come to much
ORDINARY_TASKS = {
    "lm": {},
    "lm of long rows": {"seq_len": 128, "base_args": {"logging_steps": 1}},
    "lora": {"lora_rank": 4},
    "bf16": {"base_args": {"bf16": True, "use_cpu": True}},
    "checkpointing": {"base_args": {"gradient_checkpointing": True}},
    "workers": {"base_args": {"dataloader_num_workers": 2}},
    "persistent workers": {"base_args": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}},
    "classification": {"task": "text-classification"},
}


@pytest.mark.parametrize("case", ORDINARY_TASKS)
@pytest.mark.parametrize("accumulation", [1, pytest.param(4, marks=pytest.mark.long)])
def test_nothing_is_found_in_an_ordinary_training(launcher, ask, case, accumulation):
    changes = ORDINARY_TASKS[case]
    task = make_task(**{**changes, "base_args": {**OFTEN, **changes.get("base_args", {})}, "eval_rows": 5000})
    arguments = {**ONE, "gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    for seed in range(2):
        schedule = Schedule(timed_steps=10, timed_seconds=1.0, seed=seed)
        request = ask(task, schedule=schedule, arguments=arguments, timed_eval_rows=32)
        reply = launcher.probe(request, how="fork", time_limit=120.0).reply
        assert reply.outcome is Outcome.FITS, reply.failure
        assert reply.leaks is not None
        assert not reply.leaks.found, reply.leaks
        assert reply.leaks.steps == 100_000


# ---- arithmetic ----


def test_small_python_objects_and_other_threads_are_counted():
    before = heap_bytes()
    numbers = [float(i) for i in range(1_000_000)]
    assert heap_bytes() - before > 20 * MiB
    arrays = []

    def make(kept):
        kept += [numpy.ones(100_000) for _ in range(10)]

    thread = threading.Thread(target=make, args=(arrays,))
    thread.start()
    thread.join()
    assert heap_bytes() - before > 20 * MiB + 8_000_000
    del numbers
    arrays.clear()
    assert heap_bytes() - before < MiB


def levels(*host, **fields):
    return [Level(bytes_, bytes_, **fields) for bytes_ in host]


@pytest.mark.parametrize(
    ("host", "steady"),
    [
        ((0, 100, 200, 300), True),
        ((0, 100, 190, 320), True),  # they differ a little
        ((0, 100, 100, 100), False),  # made once
        ((0, 100, 0, 100), False),  # collected
        ((0, 100, 200, 200), False),  # full
        ((0,), False),
        ((300, 200, 100), False),
    ],
)
def test_only_what_grows_each_time_is_steady(host, steady):
    series = list(enumerate(levels(*host)))
    assert is_steady(step_growth(series)) is steady


class FakeCudaMeter:
    """64 kB more on the device at each reading, and a context that grows as kernels load, which is no leak."""

    name = "cuda"

    def __init__(self, each):
        self.each, self.context_bytes, self._live = each, 0, 0

    def held_bytes(self):
        self.context_bytes += 8 * MiB
        self._live += self.each
        return self._live + self.context_bytes


@pytest.mark.parametrize(("each", "suspected"), [(65536, True), (0, False)])
def test_on_cuda_what_torch_allocated_counts_and_the_context_does_not(each, suspected):
    watch = LeakWatch(FakeCudaMeter(each))
    watch.plan(10_000, None)
    for step in range(1, 5):
        watch.step_ended(step)
    assert watch.suspects_steps() is suspected
    steps = iter(range(5, 100))
    assert list(watch.confirm_steps("step", lambda: next(steps))) == ["step"] * 4
    assert watch.check.device_bytes_per_step == each
    assert watch.check.host_bytes_per_step < 16_000  # of the host nothing stays


def test_growth_of_several_steps_is_told_per_step():
    grown = step_growth([(10, Level(0, 0)), (14, Level(400, 800))])
    assert grown == [Level(100, 200)]


@pytest.mark.parametrize(
    ("many", "few", "whole"),
    [(160, 80, 10 * 1000), (160, 160, 160), (160, 120, 80 + 5 * 1000)],
    ids=["each row", "each evaluation", "both"],
)
def test_what_an_evaluation_keeps_is_told_for_the_whole_set(many, few, whole):
    host = [0, many, 2 * many, 7, 7 + few, 7 + 2 * few]  # the first of other rows says nothing
    assert evaluation_growth([16, 16, 16, 8, 8, 8], levels(*host), 1000).host_bytes == whole


def test_memory_of_processes_counts_only_where_there_are_more_of_them():
    before, more, as_many = (Level(0, 0, n, size) for n, size in ((2, 100), (4, 300), (2, 300)))
    assert more.since(before).tree_bytes == 200
    assert as_many.since(before).tree_bytes == 0


@pytest.mark.parametrize(
    ("user", "rows", "found"),
    [
        ({"max_steps": 100, "eval_strategy": "steps", "eval_steps": 30}, None, (100, 4)),
        ({"max_steps": 100, "eval_strategy": "steps", "eval_steps": 0.1, "eval_on_start": True}, None, (100, 11)),
        ({"num_train_epochs": 3.0, "eval_strategy": "epoch", "per_device_train_batch_size": 8}, 100, (39, 3)),
        ({"num_train_epochs": 1.5, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}, 10, (5, 0)),
        ({"max_steps": 26, "eval_strategy": "epoch", "per_device_train_batch_size": 8}, 100, (26, 2)),
        ({"num_train_epochs": 3.0, "eval_strategy": "steps", "eval_steps": 5}, None, (None, None)),
        ({"max_steps": -1, "eval_strategy": "no"}, None, (None, 0)),
    ],
)
def test_steps_and_evaluations_are_those_of_the_users_own_training(user, rows, found):
    assert planned(user, rows) == found


DEVICE, HOST = Budget(1000 * MiB, 4000 * MiB), Budget(10_000 * MiB, 1000 * MiB)


def judged(leaks, budget, machine, ask):
    reply = Reply(Outcome.FITS, phases=(PhaseRecord("train", 1.0, process_bytes=500 * MiB),), steps=3, leaks=leaks)
    ended = Ended(reply, seconds=1.0, host_bytes=800 * MiB, how="fork")
    return measurement_of(ended, ask(make_task()), Candidate({}), "train", budget, machine)


@pytest.mark.parametrize(
    ("leaks", "budget", "outcome", "phase"),
    [
        ({"device_bytes_per_step": 5.0 * MiB, "steps": 101}, DEVICE, Outcome.OVER_BUDGET, "train"),
        ({"device_bytes_per_step": 5.0 * MiB, "steps": 99}, DEVICE, Outcome.FITS, None),
        ({"device_bytes_per_step": 5.0 * MiB}, DEVICE, Outcome.FITS, None),  # nobody knows how long it trains
        ({"device_bytes_per_evaluation": 51.0 * MiB, "evaluations": 10}, DEVICE, Outcome.OVER_BUDGET, "evaluate"),
        ({"host_bytes_per_evaluation": 51.0 * MiB, "evaluations": 4}, HOST, Outcome.HOST_OOM, "evaluate"),
        ({"host_bytes_per_evaluation": 49.0 * MiB, "evaluations": 4}, HOST, Outcome.FITS, None),
        ({}, DEVICE, Outcome.FITS, None),
    ],
)
def test_what_is_kept_over_the_whole_training_is_judged(leaks, budget, outcome, phase, machine, ask):
    found = judged(LeakCheck(**leaks), budget, machine, ask)
    assert found.outcome is outcome
    if phase is not None:
        assert (found.failure.phase, found.failure.kind) == (phase, "leak_suspected")
    assert len(found.notes) == bool(leaks)
    assert judge(dataclasses.replace(found, outcome=Outcome.FITS, failure=None), budget).outcome is outcome


def test_a_leak_is_told_with_its_size_and_the_way_out():
    check = LeakCheck(
        device_bytes_per_step=1000.0, host_bytes_per_evaluation=2000.0, processes_per_evaluation=2,
        files_per_evaluation=6, steps=50, evaluations=3, holders=("Mine.losses",),
    )  # fmt: skip
    steps, evaluations = leak_sentences(check)
    for word in ("each optimizer step keeps 1000 bytes of device memory", "50000 bytes over 50 steps", "Mine.losses", "loss.item()"):  # fmt: skip
        assert word in steps
    for word in ("2 worker processes, 6 open files and 2000 bytes of host memory", "6000 bytes over 3", "persistent_workers=False"):  # fmt: skip
        assert word in evaluations
    assert leak_sentences(LeakCheck(steps=10)) == leak_sentences(None) == ()


# ---- shadow runs ----


def predict(launcher, script, tmp_path, source, **changes):
    launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS))
    task = script(PRELUDE + textwrap.dedent(source))
    description = describe(task, launcher._machine, launcher, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    shadows = ShadowRuns(task, description, make_target(), launcher, tmp_path / "shadows", {"torch": "as installed"})
    prediction = shadows.predict(baseline_of(description).but(changes))
    assert prediction.failure is None, prediction.failure
    return prediction


LIST = """
class Keeper(Trainer):
    kept = []
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training:
            self.kept.append(outputs.logits * 2)
        return (loss, outputs) if return_outputs else loss
Keeper(make_model(), make_args(eval_strategy="no"), train_dataset=Rows()).train()
"""


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 4}], ids=str)
def test_a_shadow_run_names_the_line_that_made_what_is_kept(launcher, script, tmp_path, changes):
    prediction = predict(launcher, script, tmp_path, LIST, per_device_train_batch_size=4, **changes)
    line = 1 + (PRELUDE + LIST).splitlines().index("            self.kept.append(outputs.logits * 2)")
    logits = 4 * 64 * 100 * 4 * changes.get("gradient_accumulation_steps", 1)
    leaks = prediction.leaks
    assert leaks.device_bytes_per_step == leaks.host_bytes_per_step == pytest.approx(logits, abs=100)  # and the loss
    assert (leaks.steps, leaks.evaluations) == (1000, 0)
    assert leaks.holders == (f"what train.py:{line} made",)
    assert any(f"train.py:{line}" in note for note in prediction.notes)


def test_a_shadow_run_names_the_modules_whose_graph_is_kept(launcher, script, tmp_path):
    prediction = predict(launcher, script, tmp_path, GRAPH, per_device_train_batch_size=4)
    line = 1 + (PRELUDE + GRAPH).splitlines().index("                self.losses.append(model(**inputs).loss)")
    assert all(
        name.startswith("what model.layers.") and name.endswith(f" at train.py:{line} made")
        for name in prediction.leaks.holders
    )


ORDINARY = """
Trainer(make_model(), make_args(), train_dataset=Rows(), eval_dataset=Rows(50)).train()
"""


def test_a_shadow_run_of_an_ordinary_training_finds_nothing(launcher, script, tmp_path):
    assert predict(launcher, script, tmp_path, ORDINARY).leaks is None


# ---- a whole search ----


@pytest.mark.long
def test_a_search_says_a_leak_once_and_what_it_does_not_fit(tmp_path, script):
    source = PRELUDE + textwrap.dedent(LIST)
    task = script(source.replace('make_args(eval_strategy="no")', 'make_args(eval_strategy="no", max_steps=1_000_000)'))
    command = [sys.executable, "-m", "autofit", "search", "--device", "cpu", "--budget", "1GB", "--max-probes", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), "--", "python", *task.script.command],
        cwd=task.script.directory, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    told = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert told.count("a leak is suspected") == 2  # when it was seen, and as the first of what would help
    assert "Keeper.kept" in told
    assert "nothing fits" in told
