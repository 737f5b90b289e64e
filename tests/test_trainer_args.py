"""Candidates to the arguments that the installed transformers takes, and back."""

import ast
import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from landscapes import make_description
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments

from autofit.emission import model_kwargs, snippet, training_arguments, write_files
from autofit.errors import UsageError
from autofit.records import Candidate
from autofit.trainer_args import (
    ALIASES,
    REPLACEMENTS,
    arguments_of,
    candidate_values,
    check_names,
    check_single_process,
    metrics_values,
    probe_overrides,
)

FIELDS = tuple(f.name for f in dataclasses.fields(TrainingArguments) if f.init)
candidates = st.fixed_dictionaries(
    {
        "per_device_train_batch_size": st.sampled_from([1, 4, 32]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 8]),
        "activation_checkpointing": st.booleans(),
        "precision": st.sampled_from(["fp32", "bf16"]),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "sgd"]),
        "per_device_eval_batch_size": st.sampled_from([1, 8, 64]),
        "eval_accumulation_steps": st.sampled_from([None, 1, 8]),
    }
)


@given(candidates)
def test_the_installed_class_resolves_exactly_what_a_candidate_says(values):
    arguments = TrainingArguments(output_dir="x", **arguments_of(Candidate(values), FIELDS, "cpu"))
    resolved = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    resolved["optim"] = resolved["optim"].value
    assert candidate_values(resolved) == values


@pytest.mark.parametrize(
    ("user", "precision", "said"),
    [
        ({"tf32": None}, "fp32", None),  # None and False are not the same to torch: convolutions
        ({"tf32": None}, "bf16", None),
        ({"tf32": None}, "tf32", True),
        ({"tf32": False}, "fp32", None),
        ({"tf32": True}, "tf32", True),
        ({"tf32": True}, "fp32", False),
        ({"tf32": True}, "bf16", False),
        ({"tf32": True, "bf16": True}, "bf16", None),  # the user's own stays as it is
        ({"tf32": True, "bf16": True}, "fp32", False),
        ({"tf32": True, "bf16": True}, "fp16", False),
    ],
)
def test_tf32_is_said_only_where_the_candidate_changes_it(user, precision, said):
    candidate = Candidate({"precision": precision})
    assert arguments_of(candidate, FIELDS, "cuda:0", user).get("tf32") is said
    assert "tf32" not in arguments_of(candidate, FIELDS, "cpu", user)
    description = make_description(fields=FIELDS, arguments=user, resolved=user)
    emitted = training_arguments(candidate, description, "cuda:0")
    assert emitted["tf32"] is (user["tf32"] if said is None else said)


@given(candidates)
def test_only_fields_of_the_given_class_leave(values):
    old = ("per_device_train_batch_size", "gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "no_cuda")
    emitted = arguments_of(Candidate(values), old, "cpu")
    assert set(emitted) <= set(old)
    assert emitted["no_cuda"] is True
    assert emitted["gradient_checkpointing"] == values["activation_checkpointing"]
    if values["activation_checkpointing"]:
        assert emitted["gradient_checkpointing_kwargs"] == {"use_reentrant": False}


def test_the_emitted_file_is_read_by_both_parsers_unchanged(tmp_path):
    baseline = Candidate({"precision": "fp32", "attention": "sdpa", "logits": "full"})
    candidate = Candidate(
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "activation_checkpointing": True,
            "precision": "bf16",
            "optim": "adamw_torch",
            "per_device_eval_batch_size": 64,
            "eval_accumulation_steps": 4,
            "attention": "eager",
            "logits": "argmax",
        }
    )
    given_by_user = {
        "learning_rate": 1e-4,
        "output_dir": "o",
        "gradient_checkpointing": False,
        "auto_find_batch_size": True,
    }
    description = make_description(fields=FIELDS, arguments=given_by_user)
    write_files(tmp_path / "best", candidate, baseline, description, "cpu")
    (parsed,) = HfArgumentParser(TrainingArguments).parse_json_file(str(tmp_path / "best/training_args.json"))
    built = TrainingArguments(**training_arguments(candidate, description, "cpu"))
    for arguments in (parsed, built):
        assert arguments.activation_checkpointing is True
        assert arguments.learning_rate == 1e-4
        assert arguments.use_cpu is True
        assert arguments.auto_find_batch_size is False
        assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 2)
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == [
        "model_kwargs.json",
        "snippet.py",
        "training_args.json",
    ]


def test_the_snippet_gives_what_arguments_cannot_say():
    baseline = Candidate({"attention": "sdpa", "logits": "full"})
    namespace: dict = {}
    source = snippet(Candidate({"attention": "eager", "logits": "argmax"}), baseline)
    exec(compile(source, "snippet.py", "exec"), namespace)  # noqa: S102 - what a user would do with it
    from autofit.logits import argmax

    assert namespace["preprocess_logits_for_metrics"] is argmax
    assert namespace["MODEL_KWARGS"] == {"attn_implementation": "eager"}
    assert model_kwargs(baseline, baseline) == {}


def test_the_lines_of_a_snippet_do_what_it_says_as_they_stand():
    baseline = Candidate({"attention": "sdpa", "logits": "full", "loss": "own"})
    candidate = Candidate({"attention": "eager", "logits": "argmax", "loss": "scaled"})
    told = ast.get_docstring(ast.parse(snippet(candidate, baseline, {"loss_is_scaled_for_ga": False})))
    lines = [line.strip() for line in told.splitlines() if line.startswith("    ")]
    config = BertConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    model, trainer = BertForSequenceClassification(config), SimpleNamespace()
    exec("\n".join(lines), {"model": model, "trainer": trainer})  # noqa: S102 - what a user would do with it
    from autofit.logits import argmax

    assert model.config._attn_implementation == "eager"
    assert (trainer.loss_is_scaled_for_ga, trainer.preprocess_logits_for_metrics) == (False, argmax)
    assert (
        ast.get_docstring(ast.parse(snippet(candidate.but(attention="sdpa", logits="full"), baseline))).count("\n") == 0
    )


def test_every_removed_name_is_refused_at_once_with_its_replacement():
    with pytest.raises(UsageError) as error:
        check_names({"no_cuda": True, "evaluation_strategy": "epoch", "learning_rate": 1e-3, "lr": 1}, FIELDS, "5.24.0")
    message = str(error.value)
    assert "no_cuda → use_cpu" in message
    assert "evaluation_strategy → eval_strategy" in message
    assert "lr → not a TrainingArguments field" in message
    assert "learning_rate" not in message


def test_every_replacement_that_is_a_single_name_is_a_field_of_the_installed_class():
    names = {new for new in REPLACEMENTS.values() if new.isidentifier()}
    assert names
    assert names <= set(FIELDS)
    assert set(ALIASES) <= set(FIELDS)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_settings_of_several_processes_are_refused(name):
    with pytest.raises(UsageError, match=name):
        check_single_process({name: "full_shard"})
    check_single_process({name: None})


@pytest.mark.parametrize("strategy", ["no", "epoch", "steps"])
def test_a_probe_keeps_out_of_the_users_folders_trackers_and_schedule(strategy):
    user = {"eval_strategy": strategy}
    overrides = probe_overrides("probe", user, FIELDS, 100)
    arguments = TrainingArguments(**{"output_dir": "real", "push_to_hub": True, "report_to": "none", **overrides})
    assert arguments.output_dir == "probe"
    assert arguments.push_to_hub is False
    assert arguments.save_strategy == "no"
    assert arguments.eval_strategy == ("no" if strategy == "no" else "steps")
    assert strategy == "no" or arguments.eval_steps > 10**6


def test_what_a_metrics_function_receives_is_a_knob_only_where_the_candidate_has_it():
    resolved = {
        "eval_do_concat_batches": True,
        "batch_eval_metrics": False,
        "prediction_loss_only": False,
        "include_for_metrics": ["inputs", "loss"],
    }
    knobs = metrics_values(resolved)
    assert knobs == {**resolved, "include_for_metrics": "inputs+loss"}
    assert "include_for_metrics" not in metrics_values({**resolved, "include_for_metrics": []})
    assert metrics_values({}) == {}
    candidate = Candidate(candidate_values({**asdict_of(TrainingArguments("o", use_cpu=True))}))
    assert not set(resolved) & set(arguments_of(candidate, FIELDS, "cpu"))
    assert resolved.items() <= arguments_of(candidate.but(knobs), FIELDS, "cpu").items()
    assert arguments_of(candidate.but(include_for_metrics=None), FIELDS, "cpu")["include_for_metrics"] == []


def asdict_of(arguments):
    return {**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}, "optim": "adamw_torch"}
