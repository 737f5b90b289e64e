"""Shadow runs of real Trainers in real children, held against real runs of the same on the CPU, byte by byte where they can be.

Models are small but not tiny, so that a difference of one activation is seen.
"""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import QUICK, make_task

from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.harness.shadow.trace import Trace, breakdown
from autofit.harness.trainer_hooks import TRACE_FILE
from autofit.launch import Ended
from autofit.launch.watch import SERVER_DIED
from autofit.prediction import ShadowRuns, make_target
from autofit.records import Candidate, Failure, Outcome, Reply, Schedule, ShadowDevice
from autofit.study.preflight import baseline_of, describe
from autofit.trainer_args import arguments_of

LIMIT = 120.0
MEMORY = Schedule(timed_steps=0, evaluate=False)
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 3000}  # fmt: skip


@pytest.fixture(scope="module")
def warm(launcher):
    launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS))
    return launcher


def causal_task(**changes):
    base = make_task().model
    return make_task(config={**base.config, **SIZES}, seq_len=48, **changes)


@pytest.fixture(scope="module")
def described(warm, tmp_path_factory):
    """(task, description) of the causal model, described without weights."""
    task = causal_task()
    folder = tmp_path_factory.mktemp("describe") / "d"
    return task, describe(task, warm._machine, warm, folder, lambda text: None, ShadowDevice("cpu"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where traces are kept from test to test: each structure is traced once."""
    return tmp_path_factory.mktemp("shadows")


def shadows_of(warm, described, folder, target=None):
    task, description = described
    return ShadowRuns(task, description, target or make_target(), warm, folder, {"torch": "as installed"})


def test_a_description_without_weights_tells_what_one_with_weights_tells(warm, described, tmp_path):
    task, description = described
    real = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None)
    for name in ("parameters", "parameter_bytes", "trainable_bytes", "dtypes", "attention", "can_checkpoint", "config"):
        assert getattr(description, name) == getattr(real, name)
    assert description.parameter_bytes == 4 * description.parameters > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 8, "attention": "eager"},
        {"precision": "bf16"},
        {"optim": "adafactor"},
        {"optim": "sgd", "activation_checkpointing": True, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_live_bytes_of_training_are_those_of_the_real_run(warm, described, ask, changes, kept):
    task, description = described
    candidate = baseline_of(description).but(
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **changes}
    )
    attention = candidate.get("attention")
    request = ask(
        task,
        schedule=MEMORY,
        arguments=arguments_of(candidate, description.fields, "cpu"),
        model_kwargs={"attn_implementation": attention},
    )
    real = warm.probe(request, how="fork", time_limit=LIMIT).reply
    assert real.outcome is Outcome.FITS
    measured = next(p.allocated_bytes for p in real.phases if p.name == "train")
    prediction = shadows_of(warm, described, kept).predict(candidate)
    assert prediction.failure is None
    predicted = prediction.phase("train").allocated_bytes
    assert predicted == pytest.approx(measured, rel=0.002)
    if candidate["per_device_train_batch_size"] not in (2, 3):
        assert prediction.source == "rewritten"


def test_a_rewritten_trace_is_the_direct_one_to_the_byte(warm, described, kept):
    shadows = shadows_of(warm, described, kept, make_target(find("rtx-3090")))
    for changes in ({}, {"activation_checkpointing": True, "precision": "bf16"}, {"gradient_accumulation_steps": 4}):
        candidate = baseline_of(described[1]).but(
            {"per_device_train_batch_size": 7, "per_device_eval_batch_size": 5, **changes}
        )
        rewritten, direct = shadows.predict(candidate), shadows.verify(candidate)
        assert (rewritten.source, direct.source) == ("rewritten", "traced")
        assert rewritten.phases == direct.phases
        assert rewritten.growth == direct.growth
        assert rewritten.categories == direct.categories


def find(name):
    from autofit.catalog import find_gpu

    return find_gpu(name)


def test_a_trace_of_accumulation_beyond_two_is_the_direct_one(warm, described, ask, kept):
    """Four micro-batches traced themselves, against two of which two were copied."""
    task, description = described
    candidate = baseline_of(description).but(per_device_train_batch_size=3, gradient_accumulation_steps=4)
    shadows = shadows_of(warm, described, kept, make_target(find("t4")))
    request = ask(
        task,
        schedule=MEMORY,
        arguments=arguments_of(candidate, description.fields, "cpu"),
        shadow=ShadowDevice("cuda", (7, 5)),
    )
    reply = warm.probe(request, how="fork", time_limit=LIMIT).reply
    assert reply.outcome is Outcome.FITS
    direct = Trace.load(f"{request.folder}/{TRACE_FILE}")
    prediction = shadows.predict(candidate)
    train = direct.phases == direct.phase_names.index("train")
    assert prediction.phase("train").allocated_bytes == pytest.approx(int(direct.live_bytes[train].max()), rel=0.01)
    of_batch = direct.categories == direct.category_names.index("batch")
    assert set(direct.micro_batches[of_batch]) == {0, 1, 2, 3}


def test_every_live_byte_has_a_category_and_the_parts_add_up(warm, described, kept):
    shadows = shadows_of(warm, described, kept, make_target(find("rtx-4090")))
    candidate = baseline_of(described[1]).but(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    trace, _ = shadows.trace(candidate)
    parameters = described[1].parameter_bytes
    for event in np.linspace(0, len(trace.events) - 1, 25).astype(int):
        assert sum(breakdown(trace, int(event)).values()) == trace.live_bytes[event]
    prediction = shadows.predict(candidate)
    assert prediction.categories["parameters"] == parameters
    assert prediction.categories["optimizer state"] == pytest.approx(2 * parameters, rel=0.01)
    assert prediction.categories["logits and loss"] >= 4 * 4 * 48 * SIZES["vocab_size"]
    assert all(name for name, _ in prediction.modules if name)
    assert prediction.modules[0][1] >= prediction.modules[-1][1]


def test_gradients_appear_as_gradients_when_a_micro_batch_follows(warm, described, kept):
    candidate = baseline_of(described[1]).but(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    shadows = shadows_of(warm, described, kept)
    trace, _ = shadows.trace(candidate)
    of_gradients = trace.categories == trace.category_names.index("gradients")
    assert int(trace.sizes[of_gradients].sum()) == pytest.approx(
        2 * described[1].trainable_bytes, rel=0.01
    )  # two steps
    backward_of_first = int(trace.allocated_at[of_gradients].min())
    first_freed = int(trace.freed_at[of_gradients].min())
    assert first_freed - backward_of_first > len(trace.events) / 4  # they outlive the second micro-batch's forward pass


def test_evaluation_grows_as_it_is_measured_to_grow(warm, described, ask, kept):
    task, description = described
    candidate = baseline_of(description).but(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    request = ask(task, schedule=Schedule(timed_steps=0), arguments=arguments_of(candidate, description.fields, "cpu"))
    real = warm.probe(request, how="fork", time_limit=LIMIT).reply.growth
    full = shadows_of(warm, described, kept).predict(candidate)
    assert full.growth.outputs == real.outputs
    assert full.growth.rows_total == real.rows_total == 64
    assert full.growth.device_bytes_per_row == real.device_bytes_per_row
    reduced = shadows_of(warm, described, kept).predict(candidate.but(logits="argmax"))
    assert reduced.growth.outputs["predictions"] == 48 * 4  # classes in int32
    assert reduced.eval_bytes < full.eval_bytes


def test_a_card_keeps_what_its_own_kernels_keep(warm, tmp_path):
    """Below capability 8.0 there is no flash attention: efficient in float16, all scores in bfloat16. Workspaces differ."""
    config = {**make_task().model.config, **SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}
    task = make_task(config=config, seq_len=48, eval_rows=8)
    described = task, describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    candidate = baseline_of(described[1]).but(per_device_train_batch_size=8, precision="bf16", attention="sdpa")
    ampere, hopper, turing = (
        shadows_of(warm, described, tmp_path / "s", make_target(find(card)))
        for card in ("a100-40gb", "h100-80gb", "t4")
    )
    ampere, hopper = ampere.predict(candidate), hopper.predict(candidate)
    half, brain = turing.predict(candidate.but(precision="fp16")), turing.predict(candidate)
    assert ampere.failure is hopper.failure is half.failure is brain.failure is None
    assert half.phase("train").allocated_bytes == pytest.approx(ampere.phase("train").allocated_bytes, rel=0.03)
    scores = 8 * SIZES["num_attention_heads"] * 48 * 48 * 2  # bytes of one layer's, in 16 bits
    more = brain.phase("train").allocated_bytes - half.phase("train").allocated_bytes
    assert more >= SIZES["num_hidden_layers"] * scores
    assert brain.step_seconds > half.step_seconds  # bfloat16 is emulated there
    assert hopper.categories["workspace"] > ampere.categories["workspace"] > 0
    assert ampere.phase("train").reserved_bytes % 2**20 == 0
    assert ampere.phase("train").process_bytes > ampere.phase("train").reserved_bytes


def test_evaluation_that_moves_its_outputs_to_the_host_holds_less(warm, described, kept):
    shadows = shadows_of(warm, described, kept, make_target(find("rtx-3090")))
    own = baseline_of(described[1]).but(per_device_train_batch_size=2, per_device_eval_batch_size=16)
    held = [
        shadows.predict(own.but(eval_accumulation_steps=steps)).phase("evaluate").allocated_bytes
        for steps in (1, 2, None)
    ]
    assert held[0] < held[1] < held[2]


def test_lora_trains_adapters_alone(warm, tmp_path, kept):
    task = causal_task(lora_rank=4)
    description = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    assert 0 < description.trainable_bytes < description.parameter_bytes / 10
    shadows = shadows_of(warm, (task, description), kept, make_target(find("rtx-3090")))
    prediction = shadows.predict(baseline_of(description).but(per_device_train_batch_size=4))
    assert prediction.failure is None
    assert prediction.categories["optimizer state"] == pytest.approx(2 * description.trainable_bytes, rel=0.05)


SCRIPT = """
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        ids = torch.arange(16) + index
        return {"input_ids": ids % 100, "labels": ids % 100}

class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        flat = outputs.logits.view(-1, outputs.logits.size(-1))
        loss = torch.nn.functional.cross_entropy(flat, labels.view(-1), weight=self.weights)
        EXTRA
        return (loss, outputs) if return_outputs else loss

model = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2))
trainer = Mine(model=model, args=TrainingArguments("out", per_device_train_batch_size=4), train_dataset=Rows())
trainer.weights = torch.ones(100)
trainer.train()
"""


@pytest.mark.parametrize(
    "extra",
    [
        "pass",
        "assert not torch.isnan(loss), 'a loss that is no number'",
        "self.last = loss.item(); self.seen = labels.tolist()[0]",
        "loss = loss + outputs.logits[labels > 50].sum() * 0",
        "self.norm = outputs.logits.detach().cpu().numpy().mean()",
        "assert torch.isfinite(loss) and torch.isfinite(outputs.logits).all() and (labels >= 0).all()",
        "if (labels == -100).any(): raise ValueError('padding')",
    ],
)
def test_a_script_with_its_own_loss_is_traced(warm, ask, script, extra):
    task = script(textwrap.dedent(SCRIPT.replace("EXTRA", extra)))
    request = ask(task, schedule=MEMORY, shadow=ShadowDevice("cuda", (8, 6)))
    reply = warm.probe(request, how="fork", time_limit=LIMIT).reply
    assert reply.outcome is Outcome.FITS, reply.failure
    trace = Trace.load(f"{request.folder}/{TRACE_FILE}")
    assert trace.phase_names == ("load", "train")
    assert trace.facts["batch"] == 4


def test_what_cannot_be_traced_says_so_by_name(warm, ask, script):
    source = SCRIPT.replace("EXTRA", "torch.nn.utils.rnn.pack_padded_sequence(outputs.logits, labels.sum(1).cpu())")
    request = ask(script(source), schedule=MEMORY, shadow=ShadowDevice("cuda", (8, 6)))
    reply = warm.probe(request, how="fork", time_limit=LIMIT).reply
    assert reply.outcome is Outcome.CRASHED
    assert "pack_padded_sequence" in reply.failure.message + reply.failure.traceback
    assert reply.failure.phase in ("train", "backward")


def test_an_optimizer_that_is_not_modelled_is_refused_by_name(warm, described, kept):
    candidate = baseline_of(described[1]).but(optim="galore_adamw", per_device_train_batch_size=4)
    prediction = shadows_of(warm, described, kept).predict(candidate)
    assert prediction.failure is not None
    assert "galore" in prediction.failure.message


def test_metrics_that_refuse_zeros_do_not_end_a_shadow_run(warm, ask, script):
    source = SCRIPT.replace("EXTRA", "pass").replace(
        "train_dataset=Rows())", "train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=lambda p: 1 / 0)"
    )
    request = ask(script(source), schedule=Schedule(timed_steps=0), shadow=ShadowDevice("cpu"))
    reply = warm.probe(request, how="fork", time_limit=LIMIT).reply
    assert reply.outcome is Outcome.FITS, reply.failure
    assert any("ZeroDivisionError" in note for note in reply.notes)


def test_a_shadow_run_takes_no_memory_for_a_model_that_has_none(warm, ask):
    """Forty gigabytes of weights on a machine that has a fraction."""
    base = make_task().model
    sizes = {
        **SIZES,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 12,
    }
    task = make_task(config={**base.config, **sizes}, seq_len=32)
    request = ask(
        task, schedule=MEMORY, arguments={"per_device_train_batch_size": 2}, shadow=ShadowDevice("cuda", (9, 0))
    )
    ended = warm.probe(request, how="fork", time_limit=LIMIT)
    assert ended.reply.outcome is Outcome.FITS, ended.reply.failure
    assert ended.host_bytes < 2**30
    trace = Trace.load(f"{request.folder}/{TRACE_FILE}")
    assert trace.live_bytes.max() > 4 * 40e9


def test_traces_are_kept_and_read_again(warm, described, tmp_path):
    told: list[str] = []
    task, description = described
    candidate = baseline_of(description).but(per_device_train_batch_size=6)
    first = ShadowRuns(task, description, make_target(), warm, tmp_path, {}, on_run=told.append)
    assert not first.is_known(candidate)
    predicted = first.predict(candidate)
    assert len(told) == 2
    again = ShadowRuns(task, description, make_target(), warm, tmp_path, {}, on_run=told.append)
    assert again.is_known(candidate)
    assert again.predict(candidate) == predicted
    assert len(told) == 2
    kept = next(tmp_path.glob(f"*/{TRACE_FILE}"))
    kept.write_bytes(kept.read_bytes()[:100])  # damaged
    mended = ShadowRuns(task, description, make_target(), warm, tmp_path, {}, on_run=told.append)
    assert mended.predict(candidate) == predicted
    assert len(told) == 3


def test_a_probe_after_shadow_runs_measures_as_before(warm, described, ask):
    """The server imports torch._dynamo for shadow runs; a probe's zero point takes that into account."""
    task, description = described
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    reply = warm.probe(ask(task, schedule=QUICK, arguments=arguments), how="fork", time_limit=LIMIT).reply
    assert reply.outcome is Outcome.FITS
    train = next(p for p in reply.phases if p.name == "train")
    assert train.process_bytes < 2.5 * train.allocated_bytes


def test_a_candidate_of_one_row_is_traced_itself(warm, described, kept):
    candidate = Candidate({**baseline_of(described[1]).values, "per_device_train_batch_size": 1})
    prediction = shadows_of(warm, described, kept).predict(candidate)
    assert prediction.failure is None
    assert prediction.source == "traced"


def test_a_workload_without_an_evaluation_set_is_predicted_at_every_batch(warm, script, tmp_path):
    task = script(textwrap.dedent(SCRIPT.replace("EXTRA", "pass")))
    description = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    assert description.eval_rows is None
    shadows = shadows_of(warm, (task, description), tmp_path / "s", make_target(find("t4")))
    prediction = shadows.predict(baseline_of(description).but(per_device_train_batch_size=9))
    assert prediction.failure is None
    assert prediction.source == "rewritten"
    assert [p.name for p in prediction.phases] == ["load", "train"]


def test_rows_that_evaluation_looks_at_are_no_device_memory(warm, described, kept):
    shadows = shadows_of(warm, described, kept)
    trace, _ = shadows.trace(
        baseline_of(described[1]).but(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    )
    evaluating = trace.phases == trace.phase_names.index("evaluate")
    assert evaluating.sum() < 1500  # the forward passes of four batches; the rows of the set alone were 4,000 events


def test_an_evaluation_set_of_a_few_rows_is_one_program_at_every_batch(warm, tmp_path):
    task = causal_task(eval_rows=5)
    description = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    shadows = shadows_of(warm, (task, description), tmp_path / "s")
    own = baseline_of(description).but(per_device_train_batch_size=4, per_device_eval_batch_size=32)
    prediction = shadows.predict(own)
    assert prediction.source == "rewritten"
    assert prediction.growth.rows_total == 5
    # A batch of evaluation has no more rows than the set, and the set is gone through once.
    assert prediction.eval_bytes == shadows.predict(own.but(per_device_eval_batch_size=5)).eval_bytes
    assert prediction.phase("evaluate").allocated_bytes < 3 * 5 * 48 * 4 * SIZES["vocab_size"] + 60e6
    assert prediction.growth.rows_measured == 5


MANY_OUTPUTS = """
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))
        self.config = self.inner.config
    def forward(self, input_ids, labels=None):
        out = self.inner(input_ids=input_ids, labels=labels)
        mean = out.logits.mean(1)
        return {"loss": out.loss, "similar": mean @ mean.T, "fixed": torch.ones(5)}
"""


def test_outputs_that_do_not_grow_with_the_rows_are_projected_all_the_same(warm, script, tmp_path):
    source = SCRIPT.replace("model = LlamaForCausalLM", MANY_OUTPUTS + "model = LlamaForCausalLM").replace(
        "EXTRA", "pass"
    )
    head, _, _ = source.partition("trainer = Mine(")
    source = head + (
        "trainer = Trainer(model=Odd(), args=TrainingArguments('out', per_device_train_batch_size=4,"
        " eval_do_concat_batches=False), train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=lambda p: {})\n"
        "trainer.train()\n"
    )
    task = script(textwrap.dedent(source))
    description = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    shadows = shadows_of(warm, (task, description), tmp_path / "s", make_target(find("t4")))
    own = baseline_of(description).but(per_device_train_batch_size=4)
    small, large = (shadows.predict(own.but(per_device_eval_batch_size=b)) for b in (4, 16))
    assert small.failure is large.failure is None
    # Each row against every other of its batch takes 4 bytes times the batch; beside them stand five numbers a batch, which
    # take less of a row the more rows there are and blur the slope a little.
    assert small.growth.prediction_bytes_per_row == pytest.approx(4 * 4 + 5 * 4 / 4, rel=0.1)
    assert large.growth.prediction_bytes_per_row > 2 * small.growth.prediction_bytes_per_row


def test_rows_of_other_lengths_bring_a_mask_from_the_batch_on_that_holds_them(warm, script, tmp_path):
    """Two rows of 16 tokens, the others shorter: a trace sees only the two, a batch of eight is padded."""
    source = (
        SCRIPT.replace("EXTRA", "pass")
        .replace(
            "ids = torch.arange(16) + index",
            "ids = torch.arange(16 if index < 3 else 9) + index",
        )
        .replace('"labels": ids % 100}', '"attention_mask": torch.ones_like(ids), "labels": ids % 100}')
    )
    source = source.replace(
        "train_dataset=Rows())",
        "train_dataset=Rows(), data_collator=lambda rows: {name: torch.nn.utils.rnn.pad_sequence("
        "[row[name] for row in rows], batch_first=True) for name in rows[0]})",
    )
    task = script(textwrap.dedent(source))
    description = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    assert description.longest_rows == 3
    shadows = shadows_of(warm, (task, description), tmp_path / "s", make_target(find("rtx-3090")))
    own = baseline_of(description).but(gradient_accumulation_steps=1, precision="bf16")
    full, padded = (own.but(per_device_train_batch_size=b) for b in (3, 8))
    assert shadows.predict(padded).source == "rewritten"
    rewritten, direct = shadows.predict(padded), shadows.verify(padded)
    assert rewritten.phases == direct.phases
    assert shadows.family(padded).at(3).live_bytes.max() > shadows.family(full).at(3).live_bytes.max()


@pytest.mark.parametrize(
    "precision",
    ["fp16=True", *(pytest.param(p, marks=pytest.mark.long) for p in ("bf16=True", "tf32=True"))],
)
def test_a_script_that_asks_for_a_gpus_precision_is_predicted_without_one(warm, script, tmp_path, precision):
    source = SCRIPT.replace("EXTRA", "pass").replace('"out",', f'"out", {precision},')
    task = script(textwrap.dedent(source))
    description = describe(task, warm._machine, warm, tmp_path / "d", lambda text: None, ShadowDevice("cpu"))
    own = baseline_of(description)
    assert own["precision"] == precision.split("=")[0]
    shadows = shadows_of(warm, (task, description), tmp_path / "s", make_target(find("rtx-3090")))
    assert shadows.predict(own).failure is None


def test_generation_in_evaluation_comes_to_an_end(warm, ask, script):
    source = """
    import torch
    from torch.utils.data import Dataset
    from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

    class Rows(Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, index):
            ids = (torch.arange(8) + index) % 90 + 5
            return {"input_ids": ids, "labels": ids}

    config = BartConfig(vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32)
    args = Seq2SeqTrainingArguments("out", per_device_train_batch_size=2, per_device_eval_batch_size=2,
        predict_with_generate=True, generation_max_length=6)
    Seq2SeqTrainer(model=BartForConditionalGeneration(config), args=args, train_dataset=Rows(), eval_dataset=Rows(),
        compute_metrics=lambda p: {"rows": len(p.predictions)}).train()
    """
    request = ask(
        script(textwrap.dedent(source)), schedule=Schedule(timed_steps=0), shadow=ShadowDevice("cuda", (8, 6))
    )
    reply = warm.probe(request, how="fork", time_limit=60.0).reply
    assert reply.outcome is Outcome.FITS, reply.failure


def test_a_trace_leaves_no_secret_of_the_command_behind(warm, ask, script):
    task = script(textwrap.dedent(SCRIPT.replace("EXTRA", "pass")), "--hub_token", "hf_verysecretindeed")
    request = ask(task, schedule=MEMORY, shadow=ShadowDevice("cpu"))
    assert warm.probe(request, how="fork", time_limit=LIMIT).reply.outcome is Outcome.FITS
    written = [p for p in Path(request.folder).rglob("*") if p.is_file() and b"verysecret" in p.read_bytes()]
    assert written == []


def test_sparse_gradients_are_refused_by_name(warm, ask, script):
    source = SCRIPT.replace("EXTRA", "pass").replace(
        "trainer = Mine(",
        "model.model.embed_tokens.sparse = True\ntrainer = Mine(",
    )
    request = ask(script(textwrap.dedent(source)), schedule=MEMORY, shadow=ShadowDevice("cpu"))
    reply = warm.probe(request, how="fork", time_limit=LIMIT).reply
    assert reply.outcome is Outcome.CRASHED
    assert "sparse" in reply.failure.message


@pytest.mark.parametrize("reply", ["died", "killed"])
def test_a_shadow_run_that_somebody_has_ended_is_made_once_more(warm, described, tmp_path, reply):
    failures = {"died": (Outcome.CRASHED, SERVER_DIED), "killed": (Outcome.KILLED, "killed")}
    outcome, kind = failures[reply]
    asked = []

    class Ends:
        """The launcher, whose first probe comes back ended."""

        snapshot = None

        def probe(self, request, **how):
            asked.append(request.folder)
            if len(asked) == 1:
                return Ended(Reply(outcome, failure=Failure("train", 1, kind, kind)), 0.1, None)
            return warm.probe(request, **how)

    shadows = shadows_of(Ends(), described, tmp_path)
    prediction = shadows.predict(baseline_of(described[1]))
    assert prediction.failure is None and prediction.peak_bytes
    assert asked[0] == asked[1] and len(asked) == 3


def test_a_shadow_run_that_fails_by_itself_is_not_made_again(described, tmp_path):
    asked = []

    class Fails:
        snapshot = None

        def probe(self, request, **how):
            asked.append(request)
            return Ended(Reply(Outcome.CRASHED, failure=Failure("train", 1, "ValueError", "no")), 0.1, None)

    assert shadows_of(Fails(), described, tmp_path).predict(baseline_of(described[1])).failure.kind == "ValueError"
    assert len(asked) == 1
