"""Reductions of logits on what models really give, and on structures that nobody has."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from autofit import logits as module
from autofit.logits import (
    REDUCTIONS,
    CannotReduceError,
    argmax,
    dense_argmax,
    first,
    next_token_loss,
    token_loss,
    top_k,
)

TEXT = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def nothing_seen_before(monkeypatch):
    monkeypatch.setattr(module, "_DECIDED", {})


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=2, **changes))


def bert(kind, **changes):
    return kind(BertConfig(**TEXT, num_labels=7, **changes))


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


BART = {
    "vocab_size": 300,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def segformer(**changes):
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    more = {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    return SegformerForSemanticSegmentation(
        SegformerConfig(**sizes, **more, decoder_hidden_size=16, num_labels=5, **changes)
    )


def token_rows(count, length, labels="tokens", source=None):
    random = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, 300, (source or length,), generator=random)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if labels == "tokens":
            row["labels"] = ids.clone() if source is None else torch.randint(3, 300, (length,), generator=random)
        elif labels == "tags":
            row["labels"] = torch.randint(0, 7, (length,), generator=random)
        else:
            row["labels"] = torch.randint(0, 7, (), generator=random)
        rows.append(row)
    return rows


def evaluate(model, rows, tmp_path, reduction=None):
    """(predictions, labels) as a metrics function gets them from the real Trainer, over two batches."""
    kept = []
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to="none", disable_tqdm=True
    )
    Trainer(
        model,
        arguments,
        eval_dataset=rows,
        compute_metrics=lambda prediction: kept.append(prediction) or {},
        preprocess_logits_for_metrics=reduction,
    ).evaluate()
    return kept[0].predictions, kept[0].label_ids


def scores_of(predictions):
    return predictions[0] if isinstance(predictions, tuple) else predictions


MODELS = {
    "llama": (llama, lambda: token_rows(6, 8)),
    "llama with hidden states": (lambda: llama(output_hidden_states=True), lambda: token_rows(6, 8)),
    "t5": (t5, lambda: token_rows(6, 8, source=12)),
    "t5, source as long as target": (t5, lambda: token_rows(6, 8, source=8)),
    "bart": (lambda: BartForConditionalGeneration(BartConfig(**BART)), lambda: token_rows(6, 8, source=12)),
    "bert tags": (lambda: bert(BertForTokenClassification), lambda: token_rows(6, 8, "tags")),
    "bert tags with everything": (
        lambda: bert(
            BertForTokenClassification,
            output_hidden_states=True,
            output_attentions=True,
            attn_implementation="eager",
        ),
        lambda: token_rows(6, 8, "tags"),
    ),
    "bert classes": (lambda: bert(BertForSequenceClassification), lambda: token_rows(6, 8, "class")),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_class_on_top_is_what_a_metrics_function_would_have_found(name, tmp_path):
    make, rows = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), rows()
    full, labels = evaluate(model, data, tmp_path)
    reduced, same_labels = evaluate(model, data, tmp_path, argmax)
    assert np.array_equal(labels, same_labels)
    assert isinstance(full, tuple) == ("hidden" in name or "everything" in name or name[:2] in ("t5", "ba"))
    assert np.array_equal(reduced, scores_of(full).argmax(-1))
    assert reduced.dtype == (np.int16 if name.startswith("bert") else np.int32)


@pytest.mark.parametrize("name", MODELS)
def test_of_everything_that_a_model_gives_the_scores_alone_are_kept(name, tmp_path):
    make, rows = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), rows()
    full, _ = evaluate(model, data, tmp_path)
    assert np.array_equal(evaluate(model, data, tmp_path, first)[0], scores_of(full))


def test_bart_with_a_head_for_rows_gives_classes_of_rows(tmp_path):
    rows = token_rows(6, 8, "class")
    for row in rows:
        row["input_ids"][-1] = 2
        row["input_ids"][:-1] = row["input_ids"][:-1].clamp(min=3)
    model = BartForSequenceClassification(BartConfig(**BART, num_labels=7))
    full, _ = evaluate(model, rows, tmp_path)
    assert isinstance(full, tuple)
    assert np.array_equal(evaluate(model, rows, tmp_path, argmax)[0], full[0].argmax(-1))


def test_the_likeliest_classes_come_first(tmp_path):
    model, rows = llama(), token_rows(6, 8)
    full, labels = evaluate(model, rows, tmp_path)
    reduced, _ = evaluate(model, rows, tmp_path, top_k)
    assert reduced.shape == (6, 8, 5)
    assert np.array_equal(reduced[..., 0], full.argmax(-1))
    right = (reduced == labels[..., None]).any(-1)
    assert np.array_equal(right, (np.argsort(-full, axis=-1)[..., :5] == labels[..., None]).any(-1))
    assert top_k(torch.rand(4, 3), torch.zeros(4, dtype=torch.long)).shape == (4, 3)


def test_the_perplexity_of_a_causal_model_is_that_of_its_own_loss(tmp_path):
    model, rows = llama(), token_rows(6, 8)
    for row in rows[:3]:
        row["labels"][:2] = -100
    losses, labels = evaluate(model, rows, tmp_path, next_token_loss)
    counted = labels[:, 1:] != -100
    with torch.no_grad():
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        own = model(**batch).loss.item()
    assert math.isclose(losses[:, 1:][counted].mean(), own, rel_tol=1e-5)
    assert (losses[labels == -100] == 0).all() and (losses[:, 0] == 0).all()
    assert losses.shape == labels.shape and losses.dtype == np.float32


@pytest.mark.parametrize("name", ["t5", "bart", "bert tags", "bert classes"])
def test_the_loss_of_models_that_predict_their_labels_in_place_is_their_own(name, tmp_path):
    make, rows = MODELS[name]
    model, data = make().eval(), rows()
    losses, labels = evaluate(model, data, tmp_path, token_loss)
    with torch.no_grad():
        own = model(**{key: torch.stack([row[key] for row in data]) for key in data[0]}).loss.item()
    assert losses.shape == labels.shape
    assert math.isclose(losses[labels != -100].mean(), own, rel_tol=1e-5)


@pytest.mark.parametrize("more", [{}, {"output_hidden_states": True}], ids=["alone", "with hidden states"])
@pytest.mark.parametrize("size", [(32, 32), (32, 48)])
def test_maps_of_classes_are_those_of_the_examples_of_transformers(more, size, tmp_path):
    random = torch.Generator().manual_seed(0)
    rows = [
        {
            "pixel_values": torch.rand(3, *size, generator=random),
            "labels": torch.randint(0, 5, size, generator=random),
        }
        for _ in range(6)
    ]
    rows[0]["labels"][:4] = 255
    model = segformer(**more)
    full, labels = evaluate(model, rows, tmp_path)
    reduced, _ = evaluate(model, rows, tmp_path, dense_argmax)
    wide = torch.nn.functional.interpolate(
        torch.from_numpy(scores_of(full)), size=labels.shape[-2:], mode="bilinear", align_corners=False
    )
    assert np.array_equal(reduced, wide.argmax(dim=1).numpy())
    assert reduced.dtype == np.int16


def labels_of(*shape, classes=4):
    return torch.randint(0, classes, shape)


UNKNOWN = {
    "nothing": ((), labels_of(3)),
    "an object": (object(), labels_of(3)),
    "whole numbers, as generation gives": (torch.zeros(3, 8, dtype=torch.long), labels_of(3, 8)),
    "no class dimension": (torch.rand(3, 8), labels_of(3, 8)),
    "one class": (torch.rand(3, 1), labels_of(3)),
    "other rows": (torch.rand(4, 5), labels_of(3)),
    "longer than its labels, as with a learned prompt": (torch.rand(3, 10, 5), labels_of(3, 8)),
    "labels that are numbers": (torch.rand(3, 5), torch.rand(3)),
    "labels in several parts": ((torch.rand(3, 8), torch.rand(3, 8)), (labels_of(3), labels_of(3))),
    "two heads": ((torch.rand(3, 5), torch.rand(3, 6)), labels_of(3)),
    "a pooled state before the scores": ({"pooled": torch.rand(3, 9), "logits": torch.rand(3, 5)}, labels_of(3)),
    "a pooled state and scores inside": ((torch.rand(3, 9), (torch.rand(3, 5),)), labels_of(3)),
    "an attention as large as the labels allow": ((torch.rand(3, 8, 9), torch.rand(3, 8, 8)), labels_of(3, 8)),
    "no labels": (torch.rand(3, 5), None),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("reduction", [argmax, top_k, token_loss, next_token_loss], ids=lambda f: f.__name__)
def test_what_is_not_known_is_refused_and_not_guessed(name, reduction):
    logits, labels = UNKNOWN[name]
    with pytest.raises(CannotReduceError, match="^cannot_reduce: "):
        reduction(logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.rand(3, 5, 8, 8), labels_of(3, 16, 24)),
        (torch.rand(3, 5, 8, 8), labels_of(3, 16)),
        (torch.rand(2, 5, 8, 8), labels_of(3, 16, 16)),
        (torch.rand(3, 8, 8, 5), labels_of(3, 32, 32)),
        ((torch.rand(3, 5, 8, 8), torch.rand(3, 6, 8, 8)), labels_of(3, 16, 16)),
        (torch.rand(3, 5, 8, 8), None),
    ],
    ids=["other proportions", "no map", "other rows", "channels last", "two heads", "no labels"],
)
def test_maps_that_are_not_known_are_refused(logits, labels):
    with pytest.raises(CannotReduceError, match="^cannot_reduce: "):
        dense_argmax(logits, labels)


def test_several_labels_per_row_and_regression_keep_their_scores_only():
    scores, state = torch.rand(3, 6), torch.rand(3, 9)
    assert first((scores, state), torch.rand(3, 6)) is scores
    assert first({"state": state, "logits": torch.rand(3, 1)}, torch.rand(3)).shape == (3, 1)
    with pytest.raises(CannotReduceError):
        first([scores, torch.rand(3, 6)], torch.rand(3, 6))


def test_labels_that_no_class_has_tell_which_part_is_the_scores():
    scores, states, labels = torch.rand(2, 4, 50), torch.rand(2, 4, 8), torch.full((2, 4), -100)
    labels[0, 0] = 9
    assert torch.equal(argmax((states, scores), labels).long(), scores.argmax(-1))


def test_a_batch_in_which_nothing_decides_follows_one_in_which_it_was_clear():
    scores, labels = torch.rand(2, 4, 50), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(CannotReduceError, match="several outputs could be the scores"):
        argmax((torch.rand(2, 4, 8), scores), labels)
    argmax((torch.rand(2, 7, 8), torch.rand(2, 4, 50)), labels)
    assert torch.equal(argmax((torch.rand(2, 4, 8), scores), labels).long(), scores.argmax(-1))
    assert argmax((torch.rand(2, 3, 8), scores), None).shape == (2, 4)  # a test set without labels
    with pytest.raises(CannotReduceError):  # another model
        argmax((torch.rand(2, 4, 8), torch.rand(2, 4, 40)), labels)


@pytest.mark.parametrize(("classes", "kind"), [(181, torch.int16), (182, torch.int32), (46_341, torch.int64)])
def test_whole_numbers_hold_an_index_into_a_confusion_matrix(classes, kind):
    scores = torch.zeros(2, classes)
    scores[:, -1] = 1
    reduced = argmax(scores, torch.tensor([0, 1]))
    assert reduced.dtype == kind
    index = classes * reduced.numpy() + np.array([0, classes - 1])
    assert index.tolist() == [classes * (classes - 1), classes * classes - 1]


def test_half_precision_is_reduced_as_metrics_would_see_it():
    scores = torch.rand(4, 9, 33).to(torch.bfloat16)
    labels = labels_of(4, 9)
    assert np.array_equal(argmax(scores, labels).numpy(), scores.float().numpy().argmax(-1))
    expected = torch.nn.functional.cross_entropy(scores.float().movedim(-1, 1), labels, reduction="none")
    assert torch.allclose(token_loss(scores, labels), expected)


def test_every_reduction_is_importable_by_its_name():
    assert all(getattr(module, name) is function for name, function in REDUCTIONS.items())


# ---- any structure ----


@st.composite
def outputs(draw):
    """(outputs, labels, where a part was put that may be the scores), the scores among whatever else there is."""
    rows, length, classes = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(2, 6))
    token_level = draw(st.booleans())
    shape = (rows, length) if token_level else (rows,)
    labels = torch.from_numpy(
        np.array(draw(st.lists(st.integers(0, classes - 1), min_size=math.prod(shape), max_size=math.prod(shape))))
    ).reshape(shape)
    values = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scores = torch.rand(*shape, classes, generator=values)
    others = draw(
        st.lists(
            st.lists(st.integers(1, 6), min_size=1, max_size=4).map(lambda s: torch.rand(*s, generator=values)),
            max_size=3,
        )
    )
    parts = [scores, *others]
    order = draw(st.permutations(range(len(parts))))
    laid = [parts[index] for index in order]
    kind = draw(st.sampled_from(["tuple", "list", "dict", "alone", "layers"]))
    if kind == "alone" or len(laid) == 1:
        return scores, labels, scores, []
    if kind == "layers":
        return (scores, tuple(others)) if len(others) > 1 else (scores, *others), labels, scores, others
    made = {"tuple": tuple, "list": list, "dict": lambda p: {f"part{i}": part for i, part in enumerate(p)}}[kind](laid)
    return made, labels, scores, others


@given(outputs())
@settings(max_examples=300, deadline=None)
def test_what_is_reduced_is_the_scores_or_nothing(case):
    logits, labels, scores, others = case
    module._DECIDED.clear()
    rivals = [part for part in others if part.shape[:-1] == labels.shape and part.shape[-1] > 1]
    try:
        reduced = argmax(logits, labels)
    except CannotReduceError as error:
        assert rivals, error
        return
    possible = [part for part in rivals if part.shape[-1] > int(labels.max())]
    assert not possible or (isinstance(logits, tuple) and any(isinstance(part, tuple) for part in logits))
    assert torch.equal(reduced.long(), scores.argmax(-1))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 300), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=50, deadline=None)
def test_reduced_then_padded_is_padded_then_reduced(rows, length, classes, dtype):
    """What the Trainer's containers make of batches of different lengths."""
    from transformers.trainer_pt_utils import nested_concat

    module._DECIDED.clear()
    batches = [torch.rand(rows, length, classes).to(dtype), torch.rand(rows, length + 3, classes).to(dtype)]
    labels = [torch.zeros(batch.shape[:2], dtype=torch.long) for batch in batches]
    reduced = nested_concat(*(argmax(batch, own) for batch, own in zip(batches, labels, strict=True)))
    whole = nested_concat(*batches)
    counted = nested_concat(*labels) != -100
    assert torch.equal(reduced[counted].long(), whole.argmax(-1)[counted])
    assert (reduced[~counted] == -100).all()
