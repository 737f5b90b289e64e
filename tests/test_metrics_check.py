"""Which reductions leave the metrics of a workload alone, as seen on its own function with the real Trainer."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autofit import logits as module
from autofit.harness import recorded_evaluation
from autofit.harness.metrics_check import check_metrics, check_same_metrics, is_same
from autofit.harness.rules import InvalidProbe
from autofit.logits import argmax
from autofit.records import Schedule
from autofit.study import preflight

SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
MANY = 10**6  # rows of an evaluation set, so that every refusal is worth a line


@pytest.fixture(autouse=True)
def nothing_seen_before(monkeypatch):
    monkeypatch.setattr(module, "_DECIDED", {})


class Rows(Dataset):
    def __init__(self, count=40, kind="tokens"):
        self._count, self._kind = count, kind

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        ids = (torch.arange(8) * 7 + index) % 300
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        if self._kind == "class":
            row["labels"] = torch.tensor(0)  # a set that is sorted by its labels
        return row


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def bert(labels=3):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=labels))


@pytest.fixture
def make(tmp_path):
    """`make(metrics, …)`: a Trainer; other arguments are its own or fields of its arguments."""

    def trainer(metrics, model=None, kind=Trainer, rows=None, arguments=TrainingArguments, given=None, **fields):
        args = arguments(
            str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=16, **fields
        )
        rows = Rows() if rows is None else rows
        return kind(
            model or llama(), args, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics, **(given or {})
        )

    return trainer


def classes_of(prediction):
    """Of scores or of classes."""
    scores = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return scores.argmax(-1) if scores.ndim > prediction.label_ids.ndim else scores


def either(prediction):
    return {"accuracy": float((classes_of(prediction)[..., :-1] == prediction.label_ids[..., 1:]).mean())}


def scores_only(prediction):
    classes = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((classes[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def row_scores_only(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def row_either(prediction):
    return {"accuracy": float((classes_of(prediction) == prediction.label_ids).mean())}


def test_a_function_that_takes_classes_too_is_offered_them(make):
    found = check_metrics(make(either), MANY)
    assert found.reductions == ("full", "argmax")


def test_a_function_that_takes_the_highest_score_itself_is_told_what_it_could_save(make):
    found = check_metrics(make(scores_only), MANY)
    assert found.reductions == ("full",)
    refused, option = found.notes
    assert refused == (
        "logits reduction argmax is not offered: on reduced logits compute_metrics raises IndexError: too many indices for "
        "array: array is 1-dimensional, but 2 were indexed"
    )
    assert "takes nothing but the class with the highest score" in option and "autofit.logits.argmax" in option
    assert "32 B per row in place of 9.38 KiB, 8.94 GiB of 1000000 rows down to 30.5 MiB" in option


def test_a_function_over_rows_that_are_all_of_one_class_is_not_taken_in(make):
    """Where nothing is right before nor after, the metric is the same by chance."""
    for labels in (3, 200):
        trainer = make(row_scores_only, model=bert(labels), rows=Rows(kind="class"))
        found = check_metrics(trainer, MANY)
        assert "argmax" not in found.reductions and "top_k" not in found.reductions
        assert "takes nothing but the class with the highest score" in found.notes[-1]
        trainer = make(row_either, model=bert(labels), rows=Rows(kind="class"))
        assert "argmax" in check_metrics(trainer, MANY).reductions


def confident(prediction):
    """Accuracy from scores or classes, and a share that only a model that is sure of itself reaches."""
    scores = prediction.predictions
    sure = 0.0
    if scores.ndim == 3:
        exponential = np.exp(scores - scores.max(-1, keepdims=True))
        sure = float(((exponential / exponential.sum(-1, keepdims=True)).max(-1) > 0.8).mean())
    return {**either(prediction), "confident": sure}


def test_a_metric_that_an_untrained_model_leaves_at_zero_is_seen_to_need_scores(make):
    assert "argmax" not in check_metrics(make(confident), MANY).reductions


def test_the_area_under_a_curve_needs_scores_even_where_it_is_no_number_on_the_rows_themselves(make):
    def area(prediction):
        classes, labels = classes_of(prediction), prediction.label_ids
        if labels.min() == labels.max():
            return {"auc": float("nan")}
        scores = prediction.predictions if prediction.predictions.ndim == 1 else prediction.predictions[:, 1]
        above = scores[labels == 1][:, None] - scores[labels == 0]
        return {"auc": float((np.sign(above) / 2 + 0.5).mean()), "share": float(classes.mean())}

    found = check_metrics(make(area, model=bert(2), rows=Rows(kind="class")), MANY)
    assert "argmax" not in found.reductions
    assert not any("takes nothing but" in note for note in found.notes)


def test_those_that_take_fewest_bytes_come_first(make):
    found = check_metrics(make(lambda p: {"rows": len(p.label_ids)}), MANY)
    assert found.reductions == ("full", "argmax", "token_loss", "next_token_loss", "top_k")


def test_a_perplexity_of_losses_is_offered_the_losses_that_make_it(make):
    def perplexity(prediction):
        values, labels = prediction.predictions, prediction.label_ids
        if values.ndim == 3:
            whole = torch.nn.functional.cross_entropy(
                torch.from_numpy(values[:, :-1].reshape(-1, 300)), torch.from_numpy(labels[:, 1:].reshape(-1))
            )
            return {"perplexity": float(np.exp(whole))}
        return {"perplexity": float(np.exp(values[:, 1:][labels[:, 1:] != -100].mean()))}

    assert check_metrics(make(perplexity), MANY).reductions == ("full", "next_token_loss")


def test_small_outputs_are_not_worth_a_line(make):
    assert check_metrics(make(scores_only), 10).notes == ()


def writes(prediction):
    prediction.label_ids[prediction.label_ids == -100] = 0
    result = either(prediction)
    prediction.predictions[...] = 0
    prediction.label_ids[...] = 0
    return result


def prints(prediction):
    print("x" * 100_000)
    return either(prediction)


def other_kinds(prediction):
    classes = classes_of(prediction)
    return {
        **either(prediction),
        "per_class": np.bincount(classes.reshape(-1).astype(int), minlength=300),
        "first": [int(c) for c in classes[0]],
        "name": "argmax",
        "nothing": None,
        "deep": {"value": np.float32(classes.sum())},
    }


def inputs_too(prediction):
    assert prediction.inputs.shape == prediction.label_ids.shape and prediction.losses is not None
    return either(prediction)


def draws(prediction):
    chosen = np.random.permutation(len(prediction.label_ids))[:5]
    return {"accuracy": float((classes_of(prediction)[chosen, :-1] == prediction.label_ids[chosen, 1:]).mean())}


def counts(prediction, seen=[]):  # noqa: B006
    seen.append(1)
    return {"calls": len(seen), **either(prediction)}


@pytest.mark.parametrize("function", [writes, prints, other_kinds, inputs_too, draws, counts], ids=lambda f: f.__name__)
def test_functions_with_habits_are_compared_all_the_same(make, function):
    found = check_metrics(make(function, include_for_metrics=["inputs", "loss"]), MANY)
    assert found.reductions[:2] == ("full", "argmax")


def fails(prediction):
    raise ValueError("no references were given\nsecond line")


def leaves(prediction):
    raise SystemExit(3)


def no_mapping(prediction):
    return 0.5


@pytest.mark.parametrize(
    ("function", "told"),
    [(fails, "ValueError: no references were given"), (leaves, "SystemExit: 3"), (no_mapping, "'float' object")],
)
def test_a_function_that_fails_is_offered_nothing_and_told(make, function, told):
    found = check_metrics(make(function), MANY)
    assert found.reductions == ("full",)
    assert len(found.notes) == 1 and told in found.notes[0] and "second line" not in found.notes[0]


def test_an_evaluation_that_runs_out_of_memory_is_told_and_ends_nothing(make):
    class Large(Trainer):
        def prediction_step(self, *args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    found = check_metrics(make(either, kind=Large), MANY)
    assert found.reductions == ("full",)
    assert "evaluating a few rows ran out of memory" in found.notes[0]


def test_metrics_that_differ_each_time_show_nothing(make):
    chance = random.SystemRandom()
    found = check_metrics(make(lambda p: {"value": chance.random()}), MANY)
    assert found.reductions == ("full",)
    assert "none of its metrics is a number twice" in found.notes[0]


def test_batches_of_their_own_or_losses_alone_accumulate_nothing(make):
    def stateful(prediction, compute_result):
        raise AssertionError("it is not called")

    assert check_metrics(make(stateful, batch_eval_metrics=True), MANY).reductions == ("full",)
    assert check_metrics(make(either, prediction_loss_only=True), MANY).reductions == ("full",)


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def test_generated_tokens_are_reduced_already(make):
    trainer = make(
        either, model=t5(), kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, predict_with_generate=True
    )
    found = check_metrics(trainer, MANY)
    assert found.reductions == ("full",)
    assert found.notes == ("logits reductions do not apply: predictions are generated tokens already",)


def test_a_function_that_takes_the_first_of_a_tuple_or_what_there_is_is_offered_the_scores_alone(make):
    def probabilities(prediction):
        scores = prediction.predictions
        scores = scores[0] if isinstance(scores, tuple) else scores
        exponents = np.exp(scores)
        return {"likely": float((exponents / exponents.sum(-1, keepdims=True)).max(-1).mean())}

    found = check_metrics(make(probabilities, model=t5()), MANY)
    assert found.reductions == ("full", "first")
    assert "argmax" in check_metrics(make(either, model=t5()), MANY).reductions


def test_maps_of_classes_are_offered_where_they_are_taken_and_told_of_where_the_scores_are_enlarged_first(make):
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    more = {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = SegformerConfig(**sizes, **more, decoder_hidden_size=16, num_labels=5)
    images = [{"pixel_values": torch.rand(3, 32, 32), "labels": torch.randint(0, 5, (32, 32))} for _ in range(20)]

    def enlarged(scores, labels):
        size = labels.shape[-2:]
        wide = torch.nn.functional.interpolate(
            torch.from_numpy(scores), size=size, mode="bilinear", align_corners=False
        )
        return wide.argmax(dim=1).numpy()

    def scores_only(prediction):
        classes = enlarged(prediction.predictions, prediction.label_ids)
        return {"accuracy": float((classes == prediction.label_ids).mean())}

    def either(prediction):
        classes = prediction.predictions
        classes = enlarged(classes, prediction.label_ids) if classes.ndim == 4 else classes
        return {"accuracy": float((classes == prediction.label_ids).mean())}

    found = check_metrics(make(either, model=SegformerForSemanticSegmentation(config), rows=images), MANY)
    assert found.reductions == ("full",)  # at an eighth of the size, five classes take less than a map of all pixels
    config.num_labels = 80
    found = check_metrics(make(either, model=SegformerForSemanticSegmentation(config), rows=images), MANY)
    assert found.reductions == ("full", "dense_argmax")
    found = check_metrics(make(scores_only, model=SegformerForSemanticSegmentation(config), rows=images), MANY)
    assert found.reductions == ("full",)
    assert "autofit.logits.dense_argmax" in found.notes[-1]


def test_outputs_of_an_unknown_structure_are_told_as_such(make):
    class TwoHeads(Trainer):
        def prediction_step(self, *args, **kwargs):
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            return loss, (logits, logits[..., :-1].clone()), labels

    found = check_metrics(make(lambda p: {"mean": float(p.predictions[0].mean())}, kind=TwoHeads), MANY)
    assert found.reductions == ("full",)
    assert found.notes[0].startswith("logits reductions are not offered: cannot_reduce: several outputs could be")


def test_what_a_subclass_makes_of_the_outputs_before_its_metrics_counts(make):
    class PostProcessing(Trainer):
        """As question answering does it in the examples of transformers."""

        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            function, self.compute_metrics = self.compute_metrics, None
            loader = self.get_eval_dataloader(eval_dataset)
            try:
                output = self.evaluation_loop(loader, "Evaluation", prediction_loss_only=False)
            finally:
                self.compute_metrics = function
            best = np.sort(output.predictions, axis=-1)[..., -1]  # of scores
            return {f"{metric_key_prefix}_{k}": v for k, v in function(best).items()}

    found = check_metrics(make(lambda best: {"mean": float(best.mean())}, kind=PostProcessing), MANY)
    assert "argmax" not in found.reductions


def test_nothing_is_left_behind(make):
    heard = []

    class Listens(TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            heard.append("evaluate")

        def on_log(self, *args, **kwargs):
            heard.append("log")

        def on_prediction_step(self, *args, **kwargs):
            heard.append("step")

    trainer = make(either, given={"callbacks": [Listens()]}, bf16=True, bf16_full_eval=True, dataloader_num_workers=2)
    passes = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: passes.append(1))
    before = {
        name: dict(vars(part))
        for name, part in (("trainer", trainer), ("args", trainer.args), ("handler", trainer.callback_handler))
    }
    forward, dtypes = trainer.model.forward, {p.dtype for p in trainer.model.parameters()}
    lists = [len(getattr(trainer.accelerator, name)) for name in recorded_evaluation.LISTS]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    check_metrics(trainer, MANY)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert heard == []
    assert len(passes) == 3  # one row to see how large outputs are, and two batches
    for name, part in (("trainer", trainer), ("args", trainer.args), ("handler", trainer.callback_handler)):
        cached = {"_signature_columns": None} if name == "trainer" else {}
        assert {**vars(part), **cached} == {**before[name], **cached}
    assert trainer.model.forward == forward and {p.dtype for p in trainer.model.parameters()} == dtypes
    assert [len(getattr(trainer.accelerator, name)) for name in recorded_evaluation.LISTS] == lists
    assert trainer.state.log_history == []
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1


def test_large_outputs_are_looked_at_in_two_rows(make, monkeypatch):
    monkeypatch.setattr(recorded_evaluation, "MOST_BYTES", 8 * 300 * 4)
    shapes = []
    trainer = make(lambda p: shapes.append(p.predictions.shape[0]) or either(p))
    assert check_metrics(trainer, MANY).reductions == ("full", "argmax")
    assert set(shapes) == {2}


def test_outputs_that_the_host_cannot_hold_are_not_looked_at(make, monkeypatch):
    monkeypatch.setattr(recorded_evaluation, "available_host_bytes", lambda: 100_000)
    found = check_metrics(make(either), MANY)
    assert found.reductions == ("full",) and "do not fit into host memory" in found.notes[0]


def test_one_row_is_enough(make):
    assert check_metrics(make(either, rows=Rows(1)), MANY).reductions == ("full", "argmax")


def test_a_probe_refuses_a_reduction_that_changes_metrics_and_takes_one_that_does_not(make):
    check_same_metrics(make(either), argmax)
    with pytest.raises(InvalidProbe) as caught:
        check_same_metrics(make(lambda p: {"mean": float(p.predictions.mean())}), argmax)
    assert caught.value.kind == "metrics_changed" and "mean is" in str(caught.value)
    with pytest.raises(InvalidProbe) as caught:
        check_same_metrics(make(either, model=bert(1), rows=Rows(kind="class")), argmax)
    assert caught.value.kind == "cannot_reduce"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (0.5, 0.50001, True),
        (0.5, 0.51, False),
        (float("nan"), float("nan"), True),
        (1, 1.0, True),
        ([1.0, 2.0], [1.0, 2.00001], True),
        ([1.0], [1.0, 2.0], False),
        (np.ones(3), np.ones(3), True),
        (np.ones(3), np.zeros(3), False),
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, False),
        ("a", "a", True),
        (None, 0.0, False),
    ],
)
def test_values_of_metrics_are_the_same_up_to_the_order_of_summation(a, b, same):
    assert is_same(a, b) is same


# ---- in a real child ----

SCRIPT = """
import os, sys, time
import numpy as np, torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        ids = (torch.arange(8) * 7 + index) % 300
        return {"input_ids": ids, "labels": ids.clone()}

def compute_metrics(prediction):
    BODY

def main():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2))
    args = TrainingArguments("out", use_cpu=True, max_steps=2, per_device_train_batch_size=4)
    Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=compute_metrics).train()

main()
"""
HIGHEST = (
    "return {'accuracy': float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}"
)
EITHER = """scores = prediction.predictions
    classes = scores.argmax(-1) if scores.ndim == 3 else scores
    return {'accuracy': float((classes[:, :-1] == prediction.label_ids[:, 1:]).mean())}"""
DESCRIBE = Schedule(describe_only=True, check_accumulation=True)


@pytest.mark.parametrize(
    ("body", "reductions", "told"),
    [
        (EITHER, ("full", "argmax"), ""),
        (HIGHEST, ("full",), "takes nothing but the class with the highest score"),
        ("os._exit(7)", ("full",), "or ended the process"),
        (
            "time.sleep(600)",
            ("full",),
            "did not come to an end in 3 s",
        ),
    ],
    ids=["either", "highest", "ends the process", "hangs"],
)
def test_a_script_is_described_with_what_its_metrics_accept_whatever_they_do(
    launcher, ask, script, body, reductions, told
):
    source = SCRIPT.replace("BODY", body)
    if "sleep" in body:
        source = "import autofit.harness.trainer_hooks as hooks\nhooks.METRICS_SECONDS = 3.0\n" + source
    ended = launcher.probe(ask(script(source), schedule=DESCRIBE), how="fork", time_limit=120.0)
    described = ended.reply.description
    assert described is not None, ended.reply.failure
    assert described.reductions == reductions
    assert any(told in note for note in described.notes), described.notes
    assert described.accumulation.holds


# ---- what the metrics function receives: only with --allow code ----


def lists_too(prediction):
    """Takes what the Trainer has concatenated and lists of batches alike."""
    batches = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
    labels = prediction.label_ids if isinstance(prediction.label_ids, list) else [prediction.label_ids]
    right = [classes.argmax(-1)[:, :-1] == own[:, 1:] for classes, own in zip(batches, labels, strict=True)]
    return {"accuracy": float(np.concatenate(right).mean())}


def mean_of_batches(prediction):
    """The same where every batch has as many rows."""
    batches = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
    labels = prediction.label_ids if isinstance(prediction.label_ids, list) else [prediction.label_ids]
    right = [(classes.argmax(-1)[:, :-1] == own[:, 1:]).mean() for classes, own in zip(batches, labels, strict=True)]
    return {"accuracy": float(np.mean(right))}


class Stateful:
    def __init__(self, forgets=True):
        self._right, self._forgets = [], forgets

    def __call__(self, prediction, compute_result=True):
        scores, labels = (torch.as_tensor(part) for part in (prediction.predictions, prediction.label_ids))
        right = (scores.argmax(-1)[:, :-1] == labels[:, 1:]).float()
        self._right = [*self._right, *right.flatten().tolist()] if self._forgets else right.flatten().tolist()
        if not compute_result:
            return None
        result = {"accuracy": float(np.mean(self._right))}
        self._right = []
        return result


def takes_anything(prediction, **_):
    return scores_only(prediction)


FORMS = {"batch_eval_metrics": (False,), "prediction_loss_only": (False,), "eval_do_concat_batches": (True,)}


@pytest.mark.parametrize(
    ("function", "offered", "told"),
    [
        (lists_too, {"eval_do_concat_batches": (True, False)}, "batch_eval_metrics=True is not offered: compute_metrics takes no compute_result"),
        (mean_of_batches, {}, "eval_do_concat_batches=False is not offered: accuracy is "),
        (scores_only, {}, "eval_do_concat_batches=False is not offered: with it compute_metrics raises "),
        (scores_only, {}, "prediction_loss_only is never offered: evaluation would give no accuracy"),
        (lambda p: scores_only(p), {}, "batch_eval_metrics=True is not offered: compute_metrics takes no compute_result"),
        (takes_anything, {}, "batch_eval_metrics=True is not offered: compute_metrics takes no compute_result"),
        (Stateful(), {"batch_eval_metrics": (False, True)}, "eval_do_concat_batches=False is not offered"),
        (Stateful(forgets=False), {}, "batch_eval_metrics=True is not offered: accuracy is "),
        (
            lambda p: {},
            {"prediction_loss_only": (False, True), "eval_do_concat_batches": (True, False)},
            "batch_eval_metrics=True is not offered: compute_metrics takes no compute_result",
        ),
    ],
    ids=["lists", "mean of batches", "arrays", "loss only", "C12", "anything", "stateful", "last batch", "no metrics"],
)  # fmt: skip
def test_metrics_that_stay_the_same_may_be_given_something_else(make, function, offered, told):
    found = check_metrics(make(function), MANY, forms=True)
    assert found.forms == {**FORMS, **offered}
    assert any(note.startswith(told) for note in found.notes), found.notes


@pytest.mark.parametrize("function", [lists_too, Stateful(), lambda p: {}], ids=["lists", "stateful", "no metrics"])
def test_nothing_else_is_given_unless_it_is_asked_for(make, function):
    found = check_metrics(make(function), MANY)
    assert found.forms == {} and not any("batch" in note or "loss_only" in note for note in found.notes)


def with_inputs(prediction):
    return {**scores_only(prediction), "first": float(prediction.inputs[:, 0].mean())}


@pytest.mark.parametrize(
    ("function", "offered"),
    [
        (scores_only, ("inputs+loss", None, "loss", "inputs")),
        (with_inputs, ("inputs+loss", "inputs")),
        (lambda p: {**with_inputs(p), "loss": float(p.losses.mean())}, ("inputs+loss",)),
    ],
    ids=["neither", "inputs", "both"],
)
def test_what_the_function_does_not_look_at_need_not_be_included(make, function, offered):
    found = check_metrics(make(function, include_for_metrics=["inputs", "loss"]), MANY, forms=True)
    assert found.forms["include_for_metrics"] == offered


def test_a_script_that_reduces_logits_itself_may_still_give_lists(make):
    def lists_of_classes(prediction):
        parts = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
        labels = prediction.label_ids if isinstance(prediction.label_ids, list) else [prediction.label_ids]
        right = [classes[:, :-1] == own[:, 1:] for classes, own in zip(parts, labels, strict=True)]
        return {"accuracy": float(np.concatenate(right).mean())}

    trainer = make(lists_of_classes, given={"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)})
    found = check_metrics(trainer, MANY, forms=True)
    assert found.forms["eval_do_concat_batches"] == (True, False)
    assert found.reductions == ("full",)


def test_generated_tokens_may_be_given_in_lists(make):
    def count(prediction):
        parts = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
        return {"tokens": sum(int((part >= 0).sum()) for part in parts)}

    trainer = make(
        count, model=t5(), kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, predict_with_generate=True
    )
    assert check_metrics(trainer, MANY, forms=True).forms["eval_do_concat_batches"] == (True, False)


def test_a_probe_refuses_what_changes_metrics_together_with_a_reduction_too(make):
    trainer = make(mean_of_batches, eval_do_concat_batches=False)
    with pytest.raises(InvalidProbe) as caught:
        check_same_metrics(trainer, None, {"eval_do_concat_batches": True})
    assert caught.value.kind == "metrics_changed"
    check_same_metrics(make(lists_too, eval_do_concat_batches=False), None, {"eval_do_concat_batches": True})
    with pytest.raises(InvalidProbe):
        check_same_metrics(make(lists_too, eval_do_concat_batches=False), argmax, {"eval_do_concat_batches": True})


def test_a_script_is_described_with_what_else_its_metrics_accept_only_where_that_is_asked_for(launcher, ask, script):
    body = """parts = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
    labels = prediction.label_ids if isinstance(prediction.label_ids, list) else [prediction.label_ids]
    right = [scores.argmax(-1)[:, :-1] == own[:, 1:] for scores, own in zip(parts, labels)]
    return {'accuracy': float(np.concatenate(right).mean())}"""
    task = script(SCRIPT.replace("BODY", body))
    for forms in (False, True):
        schedule = Schedule(describe_only=True, check_forms=forms)
        described = launcher.probe(ask(task, schedule=schedule), how="fork", time_limit=120.0).reply.description
        expected = {**FORMS, "eval_do_concat_batches": (True, False)} if forms else {}
        assert described.metrics_forms == expected
        own = preflight.baseline_of(described, code=forms)
        assert {name: own.get(name) for name in FORMS if name in own.values} == (
            {n: v[0] for n, v in FORMS.items()} if forms else {}
        )
