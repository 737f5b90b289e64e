"""Forks of a script at its Trainer run what they are asked to run, and measure what a fresh start does.

Real children of real scripts. A snapshot takes as long as a fresh interpreter, so several tests share one; see `standing`.
"""

import itertools
import json
from collections.abc import Iterator

import pytest
from standing import PEAKS, TRAINING, Standing

from autofit.harness.template import INNER, OUTER
from autofit.launch import Ended, Launcher
from autofit.records import Machine, Outcome, Schedule, ShadowDevice

MiB = 2**20
FAST = Schedule(timed_steps=2, timed_seconds=0.2, evaluate=False)


def ran(ended: Ended, how: str = "snapshot") -> Ended:
    assert ended.reply.outcome is Outcome.FITS, ended.reply.failure
    assert ended.how == how
    assert ended.reply.steps >= 3
    return ended


# ---- every knob of every candidate is seen ----

# A first Trainer is where the process stands; the arguments of all ways have been made by then, one is used behind it.
WAYS = (
    TRAINING
    + """
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments

SETTINGS = {"output_dir": "out", "per_device_train_batch_size": 8, "learning_rate": 0.0123, "per_device_eval_batch_size": 8}

def parse(*more, kind=TrainingArguments, **changes):
    flags = [word for name, value in {**SETTINGS, **changes}.items() for word in ("--" + name, str(value))]
    return HfArgumentParser(kind).parse_args_into_dataclasses([*flags, *more])[0]

def read_json():
    with open(os.path.join(HERE, "args.json"), "w") as file:
        json.dump(SETTINGS, file)
    return HfArgumentParser(TrainingArguments).parse_json_file(os.path.join(HERE, "args.json"))[0]

def assign():
    args = TrainingArguments("out", learning_rate=0.0123)
    args.per_device_train_batch_size = 8
    args.per_device_eval_batch_size = 8
    return args

MADE = {
    "keywords": TrainingArguments(**SETTINGS),
    "positional": TrainingArguments("out", 8, learning_rate=0.0123, per_device_eval_batch_size=8),
    "flags": parse(),
    "flags, checkpointing": parse("--activation_checkpointing"),
    "json": read_json(),
    "dict": HfArgumentParser(TrainingArguments).parse_dict(SETTINGS)[0],
    "alias": TrainingArguments(**SETTINGS, gradient_checkpointing=True),
    "assigned": assign(),
    "seq2seq": Seq2SeqTrainingArguments(**SETTINGS),
}

def make(args):
    kind = Seq2SeqTrainer if isinstance(args, Seq2SeqTrainingArguments) else Trainer
    return kind(make_model(), args, train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=accuracy, callbacks=[Seen()])

trainer = make(MADE["keywords"])
way = case("way")
if way is not None:
    trainer = make(MADE[way])
    assert trainer.args is MADE[way]
trainer.train()
"""
)
NAMES = (
    "keywords", "positional", "flags", "flags, checkpointing", "json", "dict", "alias", "assigned", "seq2seq",
)  # fmt: skip
SMALL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": True,
    "bf16": True,
    "optim": "adafactor",
    "per_device_eval_batch_size": 4,
    "eval_accumulation_steps": 1,
}
WHOLE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "activation_checkpointing": False,
    "bf16": False,
    "optim": "sgd",
    "per_device_eval_batch_size": 16,
    "eval_accumulation_steps": None,
}


def check_ran_with(ended: Ended, candidate: dict, seen: dict) -> None:
    """Hold what the child tells of its arguments, and what really ran, against the candidate."""
    echo = ended.reply.echo
    assert {name: echo["arguments"][name] for name in candidate} == candidate
    assert echo["micro_batches"] == seen["batches"] == [candidate["per_device_train_batch_size"]]
    assert echo["rows_per_step"] == 8
    assert seen["eval_batches"] == [candidate["per_device_eval_batch_size"]]
    assert seen["optimizer"] == echo["optimizer"] == {"adafactor": "Adafactor", "sgd": "SGD"}[candidate["optim"]]
    assert seen["autocast"] == (["torch.bfloat16"] if candidate["bf16"] else ["off"])
    assert seen["checkpointing"] is candidate["activation_checkpointing"]
    # A block's part runs once more for each backward pass, where activations are computed again.
    assert seen["blocks"] == (2 if candidate["activation_checkpointing"] else 1) * seen["forwards"]
    # Four kinds of outputs are moved at the end of an evaluation, and after each step where that is asked for. The same
    # rows are evaluated twice, to see what it keeps.
    assert seen["moves"] == 2 * (4 if candidate["eval_accumulation_steps"] is None else 4 * 4 + 4)


@pytest.fixture(scope="module")
def ways(machine: Machine, tmp_path_factory) -> Iterator[Standing]:
    with Standing(tmp_path_factory.mktemp("ways"), machine, WAYS) as standing:
        standing.describe()
        yield standing


@pytest.mark.parametrize("candidate", [SMALL, WHOLE], ids=["small", "whole"])
@pytest.mark.parametrize("way", NAMES)
def test_every_knob_reaches_a_fork_whatever_way_the_arguments_were_made(ways, way, candidate):
    ended = ran(ways.probe(candidate, case={"way": way}, schedule=PEAKS))
    check_ran_with(ended, candidate, ways.seen())
    assert ways.seen()["rate"] == 0.0123  # the user's own stay
    assert ways.noted("runs") == ["once"]


@pytest.mark.parametrize("way", ["flags", "alias"])
def test_a_start_from_the_beginning_runs_with_the_same_knobs(ways, way):
    before = len(ways.noted("runs"))
    check_ran_with(ran(ways.probe(SMALL, how="fork", case={"way": way}, schedule=PEAKS), "fork"), SMALL, ways.seen())
    assert len(ways.noted("runs")) == before + 1
    (ways.folder / "runs").write_text("once\n")


# ---- where a probe branches off, what was prepared before, and what the script does behind its Trainer ----

USER = (
    TRAINING
    + """
import random
import numpy as np
from transformers import HfArgumentParser

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
SCALE = args.weight_decay

def fail_in(place, step=None):
    if case("fail") == place and (step is None or step == len(TAKEN)):
        raise LookupError("broken on purpose in " + place)

TAKEN = []

def collate(rows):
    from transformers import default_data_collator
    if case("fail") == "collator" and len(rows) == 8:  # fewer are looked at before the training
        TAKEN.append(1)
        fail_in("collator", 3)
    return default_data_collator(rows)

def broken_save(*args, **kwargs):
    fail_in("save")

class Mine(Trainer):
    def __init__(self, *given, **named):
        note("inits")
        self.threshold = named["args"].learning_rate * 2
        fail_in("before the base")
        super().__init__(*given, **named)
        fail_in("after the base")
        if case("fail") == "optimizer":
            self.create_optimizer()
            self.optimizer.register_step_pre_hook(lambda *_: fail_in("optimizer"))
        if case("fail") == "save":
            self._save = broken_save

    def compute_loss(self, model, inputs, *given, **named):
        if model.training:
            if case("fail") == "loss":
                TAKEN.append(1)
                fail_in("loss", 3)
        else:
            fail_in("evaluation")
        loss = super().compute_loss(model, inputs, *given, **named)
        if model.training and case("fail") == "backward":
            loss.register_hook(lambda gradient: fail_in("backward"))
        return loss

def metrics(prediction):
    fail_in("metrics")
    return accuracy(prediction)

class Draw(TrainerCallback):
    def on_train_begin(self, *given, **named):
        if case("draw"):
            note("drawn", json.dumps([random.random(), float(np.random.rand()), float(torch.rand(1))]))

trainer = Mine(model=make_model(), args=args, train_dataset=Rows(), eval_dataset=Rows(), data_collator=collate,
               compute_metrics=metrics, callbacks=[Seen(), Draw()])
fail_in("before train")
use = case("use")
if use is not None:
    exec(use)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
note("trained")
"""
)
FLAGS = (
    "--output_dir", "real-output", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8",
    "--report_to", "tensorboard", "--push_to_hub", "True", "--hub_model_id", "nobody/nothing",
    "--resume_from_checkpoint", "no-such-checkpoint", "--save_strategy", "steps", "--save_steps", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def user(machine: Machine, tmp_path_factory) -> Iterator[Standing]:
    with Standing(tmp_path_factory.mktemp("user"), machine, USER, *FLAGS) as standing:
        standing.describe()
        yield standing


def test_what_a_script_and_its_trainer_have_read_is_known(user):
    snapshot = user.launcher.snapshot
    assert "weight_decay" in snapshot.read_by_script
    assert snapshot.has_inner and "learning_rate" in snapshot.read_by_trainer
    assert not {"per_device_train_batch_size", "bf16", "optim"} & (snapshot.read_by_script | snapshot.read_by_trainer)
    assert set(user.template) >= {OUTER, INNER}


@pytest.mark.parametrize(
    ("candidate", "place"),
    [
        (SMALL, INNER),
        ({"learning_rate": 0.5}, OUTER),
        ({"learning_rate": 0.5, "bf16": True}, OUTER),
        ({"weight_decay": 0.5}, None),
        ({"weight_decay": 0.0, "learning_rate": 5e-5}, INNER),  # the user's own values: nothing that was read changes
    ],
)
def test_a_probe_branches_off_where_nobody_has_read_what_it_changes(user, candidate, place):
    assert user.launcher.snapshot.place_for(user.request(candidate)) == place


def test_a_probe_from_the_inner_place_does_not_prepare_again_and_one_from_the_outer_place_does(user):
    (user.folder / "inits").unlink(missing_ok=True)
    runs = len(user.noted("runs"))
    check_ran_with(ran(user.probe(SMALL, schedule=PEAKS)), SMALL, user.seen())
    assert user.noted("inits") == []
    use = "note('threshold', trainer.threshold)"
    ran(user.probe({**WHOLE, "learning_rate": 0.25}, case={"use": use}))
    assert user.noted("inits") == ["once"]
    assert user.noted("threshold") == ["0.5"]
    assert user.seen()["rate"] == 0.25
    assert len(user.noted("runs")) == runs


def test_a_probe_that_changes_what_the_script_has_read_runs_the_script_again(user):
    runs = len(user.noted("runs"))
    ended = user.probe({"weight_decay": 0.5}, case={"use": "note('scale', SCALE)"})
    assert ran(ended, user.launcher.fallback)
    assert len(user.noted("runs")) == runs + 1
    assert user.noted("scale") == ["0.5"]
    ran(user.probe({"bf16": True}))
    assert len(user.noted("runs")) == runs + 1


@pytest.mark.parametrize(
    ("place", "phase", "step"),
    [
        ("after the base", "start", None),
        ("before train", "start", None),
        ("collator", "train", 1),  # batches are fetched one ahead
        ("loss", "train", 3),
        ("backward", "backward", 1),
        ("optimizer", "optimizer", 1),
        ("evaluation", "evaluate", None),
        ("metrics", "metrics", None),
        ("save", "save", None),
    ],
)
def test_a_failure_is_told_with_its_phase_its_step_and_the_scripts_own_lines(user, place, phase, step):
    schedule = Schedule(timed_steps=0, evaluate=place in ("evaluation", "metrics"), save=place == "save")
    ended = user.probe(case={"fail": place}, schedule=schedule)
    assert ended.how == "snapshot"
    failure = ended.reply.failure
    assert (ended.reply.outcome, failure.kind) == (Outcome.CRASHED, "LookupError")
    assert failure.message.endswith(f"broken on purpose in {place}")
    assert failure.phase == phase
    assert step is None or failure.step == step
    assert "train.py" in failure.traceback and "fail_in" in failure.traceback


def test_a_subclass_that_fails_before_the_base_is_told_from_the_outer_place(user):
    ended = user.probe({"learning_rate": 0.5}, case={"fail": "before the base"})
    assert (ended.how, ended.reply.failure.kind) == ("snapshot", "LookupError")
    assert "self.threshold" not in ended.reply.failure.message and "fail_in" in ended.reply.failure.traceback
    ran(user.probe())


@pytest.mark.parametrize(
    ("use", "noted"),
    [
        ("note('used', len(trainer.get_train_dataloader()))", "32"),
        ("note('used', trainer.args.per_device_train_batch_size)", "2"),
        ("note('used', args.per_device_train_batch_size)", "2"),
        ("note('used', len(trainer.predict(Rows()).predictions))", "64"),
        ("note('used', sorted(trainer.evaluate())[1])", "eval_accuracy"),
        ("trainer.model.requires_grad_(False)\ntrainer.model.lm_head.requires_grad_(True)\nnote('used', 'frozen')", "frozen"),
        (
            "class More(TrainerCallback):\n    def on_train_begin(self, *a, **k):\n        note('used', 'called')\n"
            "trainer.add_callback(More())",
            "called",
        ),
    ],
)  # fmt: skip
def test_a_script_may_use_its_trainer_before_it_trains(user, use, noted):
    (user.folder / "used").unlink(missing_ok=True)
    ended = ran(user.probe({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, case={"use": use}))
    assert user.noted("used") == [noted]
    assert ended.reply.echo["micro_batches"] == [2]


def test_an_evaluation_before_training_looks_at_few_rows(user):
    use = "SEEN['eval'] = 0\ntrainer.model.register_forward_pre_hook(lambda *_: SEEN.update(eval=SEEN['eval'] + 1))\n"
    use += "trainer.evaluate()\nnote('batches', SEEN['eval'])"
    ran(user.probe({"per_device_eval_batch_size": 1}, case={"use": use}))
    assert user.noted("batches") == ["4"]  # of 64


@pytest.mark.parametrize(
    ("use", "candidate"),
    [
        ("trainer.args.per_device_train_batch_size = 4", {"per_device_train_batch_size": 2}),
        ("trainer.model.gradient_checkpointing_enable()", {"activation_checkpointing": False}),
        ("trainer.args = TrainingArguments('out')", {"per_device_train_batch_size": 2}),
        ("trainer.create_optimizer()", {"optim": "sgd"}),
    ],
)
def test_a_candidate_that_the_script_undoes_behind_its_trainer_is_invalid(user, use, candidate):
    ended = user.probe(candidate, case={"use": use})
    if "create_optimizer" in use:  # made by Trainer itself, from the candidate: nothing is undone
        ran(ended)
        return
    assert (ended.reply.outcome, ended.reply.failure.kind) == (Outcome.INVALID, "not_applied")


def test_nothing_of_the_user_is_written_reported_uploaded_or_resumed(user):
    ran(user.probe(schedule=Schedule(timed_steps=0, evaluate=False, save=True)))
    seen = user.seen()
    assert seen["output_dir"].endswith("/output") and "real-output" not in seen["output_dir"]
    assert (seen["report_to"], seen["push"]) == ([], False)
    assert user.noted("trained") == []
    ours = {"train.py", "case.json", "__pycache__"}
    notes = {"runs", "inits", "used", "batches", "threshold", "scale", "drawn", "seen.json"}
    assert {path.name for path in user.folder.iterdir()} <= ours | notes


def test_random_numbers_in_training_are_those_of_a_start_from_the_beginning(user):
    (user.folder / "drawn").unlink(missing_ok=True)
    for how in ("snapshot", "fork", "snapshot"):
        ran(user.probe(how=how, case={"draw": True}), how)
    first, afresh, again = map(json.loads, user.noted("drawn"))
    assert first == again == afresh


def test_shadow_runs_from_the_snapshot_predict_as_those_of_a_start_from_the_beginning_and_disturb_nothing(user):
    before = ran(user.probe(schedule=PEAKS))
    shadows = [
        user.probe(how=how, shadow=ShadowDevice("cpu"), schedule=PEAKS) for how in ("snapshot", "fork", "snapshot")
    ]
    assert [ended.how for ended in shadows] == ["snapshot", "fork", "snapshot"]
    assert "shadow" in user.template
    peaks = [[(p.name, p.process_bytes, p.allocated_bytes) for p in ended.reply.phases] for ended in shadows]
    assert peaks[0] == peaks[1] == peaks[2] and len(peaks[0]) >= 2, [ended.reply.failure for ended in shadows]
    after = ran(user.probe(schedule=PEAKS))
    assert live_bytes(after) == live_bytes(before)


def live_bytes(ended: Ended) -> int:
    return next(p.allocated_bytes for p in ended.reply.phases if p.name == "train")


def peak_bytes(ended: Ended) -> int:
    return max(p.process_bytes for p in ended.reply.phases if p.name.startswith("train"))


# ---- memory ----

LARGE = """
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {"input_ids": (torch.arange(48) + index) % 100000, "labels": index % 2}

class Private(TrainerCallback):
    def on_train_begin(self, *given, model=None, **named):
        with open("/proc/self/smaps_rollup") as file:
            sizes = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in list(file)[1:]}
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        note("private", json.dumps([sizes["Private_Dirty"] * 1024, weights]))

model = BertForSequenceClassification(BertConfig(vocab_size=100000, hidden_size=256, intermediate_size=512,
    num_hidden_layers=2, num_attention_heads=4))
Trainer(model, TrainingArguments("out", per_device_train_batch_size=8), train_dataset=Rows(), callbacks=[Private()]).train()
"""
CANDIDATES = {
    "A": {"per_device_train_batch_size": 8},
    "B": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "activation_checkpointing": True},
    "C": {"per_device_train_batch_size": 8, "optim": "adafactor"},
}
ORDERS = ("ABC", "CBA", "BAC")


@pytest.fixture(scope="module")
def large(machine: Machine, tmp_path_factory) -> Iterator[Standing]:
    with Standing(tmp_path_factory.mktemp("large"), machine, LARGE) as standing:
        standing.describe()
        yield standing


@pytest.fixture(scope="module")
def measured(large) -> dict[str, list[Ended]]:
    """Candidate -> its probes, one of each order, all from one snapshot."""
    probes: dict[str, list[Ended]] = {name: [] for name in CANDIDATES}
    for name in itertools.chain(*ORDERS):
        probes[name].append(ran(large.probe(CANDIDATES[name])))
    return probes


def test_weights_are_shared_with_the_snapshot_and_not_copied(large, measured):
    private, weights = json.loads(large.noted("private")[0])
    assert weights > 100 * MiB
    assert private < 0.75 * weights


def test_a_candidate_measures_alike_whatever_was_measured_before_it(measured):
    for name, probes in measured.items():
        assert len({live_bytes(ended) for ended in probes}) == 1, name
        peaks = [peak_bytes(ended) for ended in probes]
        assert max(peaks) <= 1.03 * min(peaks), (name, peaks)
    assert len({live_bytes(probes[0]) for probes in measured.values()}) == 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name != "C" else name for name in CANDIDATES]
)
def test_a_fresh_interpreter_measures_as_a_fork_of_the_snapshot(large, measured, name):
    fresh = ran(large.probe(CANDIDATES[name], how="fresh"), "fresh")
    assert live_bytes(fresh) == live_bytes(measured[name][0])
    assert peak_bytes(fresh) == pytest.approx(peak_bytes(measured[name][0]), rel=0.05)


# ---- TRL ----

SFT = """
import torch, datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

original = datasets.Dataset.map

def counted(self, *args, **kwargs):
    note("maps")
    return original(self, *args, **kwargs)

datasets.Dataset.map = counted
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[PAD]", "[EOS]", "a", "b", "c", "[UNK]"])}, "[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2))
rows = datasets.Dataset.from_dict({"text": ["a b c " * (1 + n % 5) for n in range(64)]})
args = SFTConfig("out", per_device_train_batch_size=8, max_length=12, bf16=False, report_to="none")
trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
"""


@pytest.mark.long
def test_trl_tokenises_once_for_all_probes_and_again_where_a_candidate_changes_it(machine, tmp_path):
    with Standing(tmp_path, machine, SFT) as standing:
        standing.describe()
        maps = len(standing.noted("maps"))
        assert maps >= 1
        unread = {name: SMALL[name] for name in SMALL if "eval" not in name and name != "activation_checkpointing"}
        for changes in (unread, {**unread, "bf16": False}, {}):
            ended = ran(standing.probe(changes))
            echo = ended.reply.echo
            assert {name: echo["arguments"][name] for name in changes} == changes
            assert echo["micro_batches"] == [changes.get("per_device_train_batch_size", 8)]
            assert echo["optimizer"] == ("Adafactor" if changes else "AdamW")
        assert len(standing.noted("maps")) == maps
        # SFTTrainer itself reads the length, and whether activations are computed again, before it tokenises.
        for number, changes in enumerate([{"max_length": 4}, {"activation_checkpointing": False}], 2):
            assert standing.launcher.snapshot.place_for(standing.request(changes)) == OUTER
            assert ran(standing.probe(changes)).reply.echo["arguments"].items() >= changes.items()
            assert len(standing.noted("maps")) == number * maps
        assert standing.noted("runs") == ["once"]


# ---- thread pools ----

POOLS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

assert torch.get_num_threads() == 2
torch.ones(1500, 1500) @ torch.ones(1500, 1500)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {"input_ids": (torch.arange(64) + index) % 1000, "labels": index % 2}

def use_workers():
    import datasets
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2):
        pass
    datasets.Dataset.from_dict({"n": list(range(64))}).map(lambda row: {"m": row["n"] + 1}, num_proc=2)

if __name__ == "__main__":
    if not os.path.exists(os.path.join(HERE, "no-workers")):
        use_workers()
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, hidden_size=256, intermediate_size=1024,
        num_hidden_layers=2, num_attention_heads=4))
    model(**torch.utils.data.default_collate([Rows()[n] for n in range(8)])).loss.backward()
    model.zero_grad()
    if os.path.exists(os.path.join(HERE, "do-not-pause")):
        import autofit.harness.template
        autofit.harness.template.pause_threads = lambda: None
    Trainer(model, TrainingArguments("out", per_device_train_batch_size=8), train_dataset=Rows()).train()
"""


class TwoThreadLauncher(Launcher):
    def environment(self) -> dict[str, str]:
        return {**super().environment(), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}


@pytest.mark.long
def test_thirty_forks_of_a_process_that_has_used_its_threads_all_train(machine, tmp_path):
    with Standing(tmp_path, machine, POOLS, make=TwoThreadLauncher) as standing:
        standing.describe()
        for _ in range(30):
            ran(standing.probe())
        assert standing.noted("runs").count("once") >= 1


@pytest.mark.long  # it waits for its time limit
def test_without_the_pause_a_fork_hangs_and_is_ended_in_time(machine, tmp_path):
    """What the pause is for: where this does not fail any more, it is not needed, or the test above shows nothing."""
    with Standing(tmp_path, machine, POOLS, make=TwoThreadLauncher) as standing:
        for name in ("do-not-pause", "no-workers"):
            (standing.folder / name).write_text("")
        ended, why = standing.launcher.take_snapshot(standing.request(), time_limit=60)
        assert (ended, why) == (None, "")
        ended = standing.probe(time_limit=15)
        assert (ended.how, ended.reply.outcome) == ("snapshot", Outcome.TIMEOUT)


def test_with_the_pause_the_same_fork_trains(machine, tmp_path):
    with Standing(tmp_path, machine, POOLS, make=TwoThreadLauncher) as standing:
        (standing.folder / "no-workers").write_text("")
        standing.describe()
        for _ in range(3):
            ran(standing.probe(schedule=FAST))
