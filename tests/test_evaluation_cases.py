"""What people have reported of evaluation (transformers' issues and forums), each as the behaviour that it calls for.

Real Trainers in real children on the CPU. The numbers of the cases are those by which they are collected: C01 is the first.
"""

import dataclasses
import textwrap

import pytest
from conftest import QUICK

from autofit.harness.evaluation_phases import kept_sentence
from autofit.launch import Launcher
from autofit.records import Budget, Candidate, EvaluationGrowth, Measurement, Outcome, Reply, Schedule
from autofit.study.judgement import measurement_of
from autofit.study.preflight import describe

PEAKS = Schedule(timed_steps=0)
LIMIT = 120.0
MB = 10**6
AMPLE = Budget(100 * 10**9, 100 * 10**9)

PRELUDE = """
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config,
    T5ForConditionalGeneration, Trainer, TrainingArguments)

WORDS = {words}

def llama(**changes):
    sizes = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**{{**sizes, **changes}}))

def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
        decoder_start_token_id=0))

class Rows(Dataset):
    def __init__(self, rows, length=32):
        self.rows, self.length = rows, length
    def __len__(self):
        return self.rows
    def __getitem__(self, index):
        ids = (torch.arange(self.length) + index) % 90 + 5
        return {{"input_ids": ids, "labels": ids.clone()}}

def scores(given):
    return given.predictions[0] if isinstance(given.predictions, tuple) else given.predictions

def accuracy(given):
    return {{"accuracy": float((scores(given).argmax(-1) == given.label_ids).mean())}}

def trainer(model, rows=64, metrics=accuracy, kind=Trainer, **changes):
    arguments = changes.pop("arguments", TrainingArguments)("out", report_to="none", **changes)
    return kind(model, arguments, train_dataset=Rows(16), eval_dataset=Rows(rows), compute_metrics=metrics)
"""
ARGUMENTS = {"use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}


@pytest.fixture
def probe(launcher: Launcher, ask, script):
    """`probe(source, …)`: the reply of a probe of PRELUDE and the source."""

    def run(source: str, words: int = 2000, **fields) -> Reply:
        task = script(PRELUDE.format(words=words) + textwrap.dedent(source))
        arguments = {**ARGUMENTS, **fields.pop("arguments", {})}
        request = ask(task, **{"schedule": PEAKS, "arguments": arguments, **fields})
        return launcher.probe(request, how="fork", time_limit=LIMIT).reply

    return run


@pytest.fixture
def judged(launcher: Launcher, machine, ask, script):
    """`judged(source, budget)`: what the search makes of a probe of it."""

    def run(source: str, budget: Budget, **arguments) -> Measurement:
        task = script(PRELUDE.format(words=2000) + textwrap.dedent(source))
        request = ask(task, schedule=PEAKS, arguments={**ARGUMENTS, **arguments})
        ended = launcher.probe(request, how="fork", time_limit=LIMIT)
        return measurement_of(ended, request, Candidate({}), "evaluate", budget, machine)

    return run


# ---- what accumulates ----


def test_c01_an_evaluation_that_fits_for_some_steps_and_not_for_all_rows_is_over_budget(judged):
    """transformers#7232: evaluation dies half way, although training and its first steps fit."""
    few, many = (judged(f"trainer(llama(), rows={rows}).train()", AMPLE) for rows in (64, 2000))
    assert few.outcome is many.outcome is Outcome.FITS
    assert many.growth.rows_measured == 16
    assert many.growth.projected_process_bytes > 2 * 2000 * 32 * 2000 * 4
    seen = max(p.process_bytes for p in many.phases)
    refused = judged("trainer(llama(), rows=2000).train()", Budget(seen + 200 * MB, AMPLE.host_bytes))
    assert (refused.outcome, refused.failure.kind, refused.failure.phase) == (
        Outcome.OVER_BUDGET,
        "eval_growth",
        "evaluate",
    )


@pytest.mark.parametrize(("changes", "copies"), [("", 2), (", eval_do_concat_batches=False", 1), (", metrics=None", 0)])
def test_c02_arrays_are_held_twice_while_they_are_concatenated_once_in_a_list_and_not_at_all_for_a_loss(
    probe, changes, copies
):
    """transformers#12878, #8476: 65 MB of logits peaked at 133 MB, 70 MB as a list, 6 MB without metrics."""
    metrics = "" if "metrics" in changes else ", metrics=lambda given: {}"
    growth = probe(f"trainer(llama(), rows=1000{metrics}{changes}).train()").growth
    array = 1000 * 32 * 2000 * 4
    assert growth.outputs.get("logits", 0) == (32 * 2000 * 4 if copies else 0)
    assert growth.projected_host_bytes == pytest.approx(copies * array, rel=0.1, abs=40 * MB)


def test_c03_a_candidate_that_moves_the_growth_to_the_host_fails_there_by_name(judged):
    """transformers#11011: with eval_accumulation_steps=1 host memory climbs instead, and the process is killed."""
    source = "trainer(llama(), rows=2000).train()"
    roomy = judged(source, AMPLE, eval_accumulation_steps=1)
    assert roomy.growth.projected_host_bytes > 2 * 2000 * 32 * 2000 * 4
    tight = judged(source, Budget(AMPLE.device_bytes, 900 * MB), eval_accumulation_steps=1)
    assert (tight.outcome, tight.failure.kind) == (Outcome.HOST_OOM, "host_growth")
    assert "2000 rows" in tight.failure.message and "host memory" in tight.failure.message


def test_c04_numpy_that_has_no_memory_is_host_memory_and_costs_no_search(judged):
    """transformers#10722: NumPy is asked for terabytes and raises."""
    source = """
    def enormous(given):
        raise np._core._exceptions._ArrayMemoryError((200_000, 77, 50_000), np.dtype(np.float32))
    trainer(llama(), metrics=enormous).train()
    """
    m = judged(source, AMPLE)
    assert (m.outcome, m.failure.phase) == (Outcome.HOST_OOM, "metrics")
    assert "Unable to allocate" in m.failure.message


def test_c08_whatever_accumulates_beside_logits_is_named_with_its_bytes(probe):
    """transformers#29892, #8633: caches of keys and values gathered with the logits."""
    cached = probe("trainer(llama(use_cache=True)).train()").growth
    assert set(cached.outputs) == {"losses", "logits", "labels"}  # a cache is left out by the configuration
    hidden = probe("trainer(llama(output_hidden_states=True)).train()").growth
    assert hidden.outputs["hidden_states"] == 3 * 32 * 32 * 4  # embeddings and two layers
    assert hidden.outputs["logits"] == 32 * 2000 * 4
    two = probe("trainer(t5()).train()").growth
    assert two.outputs["encoder_last_hidden_state"] == 32 * 32 * 4
    inputs = probe("trainer(llama(), include_for_metrics=['inputs']).train()").growth
    assert inputs.outputs["inputs"] == 32 * 8


def test_c09_an_evaluation_that_crashes_is_no_lack_of_memory(judged):
    """transformers#30631: outputs whose second dimension differs cannot be concatenated."""
    source = """
    class Attends(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            made = super().forward(input_ids, labels=labels)
            length = input_ids.shape[1]
            return {"loss": made.loss, "logits": made.logits, "attention": torch.zeros(len(input_ids), length, length)}
    class Mixed(Rows):
        def __getitem__(self, index):
            self.length = 64 if index < 8 else 16
            return super().__getitem__(index)
    model = Attends(llama().config)
    Trainer(model, TrainingArguments("out", report_to="none"), train_dataset=Rows(16), eval_dataset=Mixed(64),
            compute_metrics=accuracy).train()
    """
    m = judged(source, AMPLE)
    assert m.outcome is Outcome.CRASHED
    assert m.failure.phase == "evaluate" and "RuntimeError" in m.failure.kind
    assert m.train_bytes  # training is known all the same


def test_c13_evaluation_runs_on_top_of_what_training_holds(probe):
    """transformers#32282: the first evaluation after training runs out, on its own it would have fitted."""
    reply = probe("trainer(llama(hidden_size=256, intermediate_size=1024)).train()", words=4000)
    names = [p.name for p in reply.phases]
    assert names.index("train") < names.index("evaluate") < names.index("train-again")
    weights = next(p for p in reply.phases if p.name == "load").process_bytes
    base = reply.growth.projected_process_bytes - reply.growth.projected_host_bytes
    kept = next(note for note in reply.notes if "evaluation keeps" in note)
    assert "of 64 rows; of each row logits 512000 bytes, labels 256 bytes, losses 4 bytes" in kept
    assert reply.steps >= 3 and base >= 3 * weights  # the weights and AdamW's two states


def test_c15_whether_metrics_were_active_is_on_record(probe, launcher, machine, script, tmp_path):
    """FLock-io/llm-loss-validator#82: a metrics function turned an evaluation of constant memory into one that grows."""
    for metrics, expected in (("accuracy", True), ("None", False)):
        task = script(PRELUDE.format(words=200) + f"trainer(llama(), metrics={metrics}).train()")
        described = describe(task, machine, launcher, tmp_path / metrics, lambda text: None)
        assert described.has_metrics is expected
        assert any("keeps losses alone" in note for note in described.notes) is not expected
    with_metrics, without = (
        probe(f"trainer(llama(), metrics={metrics}).train()").growth for metrics in ("accuracy", "None")
    )
    assert with_metrics.device_bytes_per_row > 1000 * without.device_bytes_per_row == 4000


def test_c08_what_stands_beside_the_scores_is_told_with_a_way_out():
    growth = EvaluationGrowth(4, 1000, 1e5, 1e5, 0, 0, {"logits": 8e4, "hidden_states": 2e4, "labels": 8.0}, 3e4)
    told = kept_sentence(growth)
    assert "hidden_states 20000 bytes" in told and "hidden_states are not needed where autofit.logits.first" in told
    assert "metrics take 30000000 bytes" in told
    assert "not needed" not in kept_sentence(dataclasses.replace(growth, outputs={"logits": 8e4, "labels": 2e4}))


# ---- predict() and generation ----


def test_predict_is_a_phase_of_its_own_where_the_script_calls_it(probe):
    predicts = dataclasses.replace(PEAKS, predict=True)
    reply = probe("trainer(llama(), rows=500, metrics=None).train()", schedule=predicts)
    assert [p.name for p in reply.phases] == ["load", "train", "evaluate", "predict", "train-again"]
    growth = reply.growth  # evaluate() keeps losses alone here, predict() everything
    assert growth.phase == "predict"
    assert growth.outputs["logits"] == 32 * 2000 * 4
    plain = probe("trainer(llama(), rows=500, metrics=None).train()")
    assert plain.growth.phase == "evaluate" and "logits" not in plain.growth.outputs
    assert "predict" not in [p.name for p in plain.phases]


def test_predict_that_does_not_fit_is_told_by_its_name(launcher, machine, ask, script):
    task = script(PRELUDE.format(words=2000) + "trainer(llama(), rows=2000, metrics=None).train()")
    request = ask(task, schedule=dataclasses.replace(PEAKS, predict=True), arguments=ARGUMENTS)
    ended = launcher.probe(request, how="fork", time_limit=LIMIT)
    budget = Budget(900 * MB, AMPLE.host_bytes)
    m = measurement_of(ended, request, Candidate({}), "evaluate", budget, machine)
    assert (m.outcome, m.failure.phase) == (Outcome.OVER_BUDGET, "predict")
    assert "predict() takes" in m.failure.message


@pytest.mark.parametrize(
    ("behind", "predicts"),
    [("trainer_.predict(Rows(4))", True), ("pass", False), ("print('predict(')", False)],
)
def test_a_script_that_calls_predict_is_known_before_it_does(launcher, machine, script, tmp_path, behind, predicts):
    source = PRELUDE.format(words=100) + f"trainer_ = trainer(llama())\ntrainer_.train()\n{behind}\n"
    described = describe(script(source), machine, launcher, tmp_path / "d", lambda text: None)
    assert described.predicts is predicts


def test_text_is_generated_to_its_full_length_where_memory_is_measured(probe):
    source = """
    class Ends(T5ForConditionalGeneration):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **named):
            made = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **named)
            made.logits[..., 1] = made.logits[..., 1] + 1e4  # the end token, always
            return made
    trainer(Ends(t5().config), kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, predict_with_generate=True,
            generation_max_length=24, metrics=lambda given: {"length": given.predictions.shape[1]}).train()
    """
    reply = probe(source, words=200)
    assert reply.outcome is Outcome.FITS, reply.failure
    assert reply.growth.outputs["predictions"] == 24 * 8


def test_running_out_of_memory_while_text_is_generated_is_told_so(probe):
    source = """
    class Short(T5ForConditionalGeneration):
        def generate(self, *given, **named):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    trainer(Short(t5().config), kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, predict_with_generate=True).train()
    """
    reply = probe(source, words=200)
    assert (reply.outcome, reply.failure.phase) == (Outcome.DEVICE_OOM, "generate")


def test_a_timed_evaluation_takes_the_users_own_metrics_into_account(probe):
    source = """
    import time
    def slow(given):
        time.sleep(0.002 * len(given.label_ids))
        return {}
    trainer(llama(), metrics=METRICS).train()
    """
    slow, quick = (
        probe(source.replace("METRICS", name), words=100, schedule=QUICK, timed_eval_rows=64)
        for name in ("slow", "lambda given: {}")
    )
    assert min(slow.eval_speed.seconds) >= 64 * 0.002
    assert slow.eval_speed.per_second < quick.eval_speed.per_second
