"""What a training keeps and never gives back is found, with its size, and nothing is found where nothing is kept.

Children are real and forked from one warm server; the scripts leak on purpose.
"""

import textwrap

import pytest
from conftest import make_task

from autofit.launch import Launcher
from autofit.records import LeakCheck, Outcome, Reply, Schedule

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
    print(check)
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
