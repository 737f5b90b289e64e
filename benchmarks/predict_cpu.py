"""Claim: on the CPU a shadow run tells the live tensor bytes of a training to 1 %, and its resident memory to 5 %.

Forty-three settings of fifteen small models (encoders, decoders, encoder-decoders, vision; batches of 4 to 64; with and without
checkpointing, accumulation, bf16, LoRA, other optimizers, and a reduction of the logits before evaluation keeps them)
are predicted twice: rewritten from shadow runs at batches 2 and 3, as users get it, and traced at the very batch. Each is
then trained and evaluated for a few steps by a probe, with one thread, and read three ways:

    live       peak of live tensor bytes in an optimizer step, by torch's profiler; predicted to 1 % in the median, 3 % at worst
    resident   peak growth of resident memory in training, above the state before it; predicted to 5 %
    evaluate   the same in evaluation; predicted to 5 %

What a kernel takes and gives back within one operator is no tensor, and so not predicted: some megabytes of oneDNN's, the
most in convolutions.

Resident memory is read with MALLOC_MMAP_THRESHOLD_=131072 in the probes' environment, which has glibc give back every
larger block when it is freed. With its own, growing threshold it keeps some, which no sum of tensors can tell: three
settings are probed so too, and what they take above the prediction is told, not judged.

    python benchmarks/predict_cpu.py             about ten minutes; writes results/predict_cpu.json
    python benchmarks/predict_cpu.py --check     the same, and ends with 1 where the claim does not hold
    python benchmarks/predict_cpu.py --quick     three settings
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

from autofit.launch import Launcher
from autofit.machine import read_machine
from autofit.prediction import ShadowRuns, make_target
from autofit.records import (
    Candidate,
    Description,
    Machine,
    ModelTask,
    Outcome,
    Prediction,
    Reply,
    Request,
    Schedule,
    ScriptTask,
    ShadowDevice,
    Task,
    digest,
)
from autofit.study import preflight
from autofit.trainer_args import arguments_of

LIVE_MEDIAN, LIVE_WORST, RESIDENT_WORST = 0.01, 0.03, 0.05
MMAP_THRESHOLD = ("MALLOC_MMAP_THRESHOLD_", "131072")
EVAL_ROWS = 256
TIME_LIMIT = 300.0

CLASSIFY, GENERATE, SEE = "text-classification", "causal-lm", "image-classification"


def _encoder(kind: str, layers: int, hidden: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    return {"model_type": kind, **sizes, "intermediate_size": 4 * hidden, "vocab_size": vocabulary, **more}


def _bart(layers: int, hidden: int) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("attention_heads", hidden // 64), ("ffn_dim", 4 * hidden))
    }
    return {"model_type": "bart", "d_model": hidden, "vocab_size": 50265, **sides}


GPT2 = {"model_type": "gpt2", "n_embd": 384, "n_layer": 4, "n_head": 6, "vocab_size": 50257}
DISTILBERT = {"model_type": "distilbert", "dim": 512, "n_layers": 3, "n_heads": 8, "hidden_dim": 2048}
SWIN = {"model_type": "swin", "embed_dim": 96, "depths": [1, 1, 2, 2], "num_heads": [3, 6, 12, 24]}
RESNET = {"model_type": "resnet"}  # 50 layers
BERT = _encoder("bert", 3, 512, 30522)
LLAMA = _encoder("llama", 4, 512, 32000, num_key_value_heads=2)
QWEN = _encoder("qwen2", 3, 256, 151936, num_key_value_heads=2, tie_word_embeddings=True)
DEBERTA = _encoder(
    "deberta-v2", 3, 384, 128100, relative_attention=True, position_buckets=256, pos_att_type=["p2c", "c2p"]
)

# name -> configuration, task, tokens or pixels, LoRA rank
MODELS: dict[str, tuple[dict[str, Any], str, int, int | None]] = {
    "bert": (BERT, CLASSIFY, 64, None),
    "bert short": (BERT, CLASSIFY, 16, None),
    "distilbert": (DISTILBERT, CLASSIFY, 64, None),
    "roberta lora": (_encoder("roberta", 4, 512, 50265), CLASSIFY, 64, 8),
    "deberta-v3": (DEBERTA, CLASSIFY, 64, None),
    "gpt2": (GPT2, GENERATE, 32, None),
    "llama": (LLAMA, GENERATE, 32, None),
    "llama lora": (LLAMA, GENERATE, 64, 8),
    "qwen2": (QWEN, GENERATE, 16, None),
    "vit": (_encoder("vit", 4, 768, 0), SEE, 112, None),
    "swin": (SWIN, SEE, 224, None),
    "resnet": (RESNET, SEE, 112, None),
    "bart": (_bart(2, 512), CLASSIFY, 32, None),
}

# An encoder-decoder that learns to copy; the command's first argument is its kind.
SEQ2SEQ = """
import sys
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Trainer, TrainingArguments, default_data_collator
kind, rows, tokens = sys.argv[1], 256, 32
sizes = {
    "t5": dict(d_model=512, d_ff=2048, num_layers=3, num_heads=8, vocab_size=32128, decoder_start_token_id=0),
    "bart": dict(d_model=512, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
                 encoder_attention_heads=8, decoder_attention_heads=8, vocab_size=50265),
}
class Copies(torch.utils.data.Dataset):
    def __len__(self):
        return rows
    def __getitem__(self, index):
        ids = torch.randint(3, 30000, (tokens,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
def accuracy(prediction):
    scores = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    classes = scores.argmax(-1) if scores.ndim > 2 else scores
    return {"accuracy": float((classes == prediction.label_ids).mean())}
model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **sizes[kind]))
arguments = TrainingArguments(output_dir="out", report_to="none", save_strategy="no")
Trainer(model, arguments, default_data_collator, Copies(), Copies(), compute_metrics=accuracy).train()
"""
SCRIPTS = ("t5", "bart")

# model -> settings; what a setting does not say is the workload's default
RECOMPUTE: dict[str, Any] = {"activation_checkpointing": True}
BF16: dict[str, Any] = {"precision": "bf16"}
ARGMAX: dict[str, Any] = {"logits": "argmax"}


def _batch(rows: int, accumulation: int = 1) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    return {**sizes, "gradient_accumulation_steps": accumulation}


CASES: dict[str, list[dict[str, Any]]] = {
    "bert": [
        _batch(8),
        _batch(16),
        _batch(16) | RECOMPUTE,
        _batch(4, 4),
        _batch(8) | BF16,
        _batch(16) | BF16 | RECOMPUTE,
        _batch(8) | ARGMAX,
        _batch(8) | {"attention": "eager"},
        _batch(8) | {"optim": "adamw_torch"},
        _batch(8) | {"optim": "sgd"},
    ],
    "bert short": [_batch(32), _batch(64), _batch(64) | RECOMPUTE],
    "distilbert": [_batch(16), _batch(8, 2)],
    "roberta lora": [_batch(16), _batch(16) | RECOMPUTE],
    "deberta-v3": [_batch(4), _batch(8) | RECOMPUTE],
    "gpt2": [_batch(8), _batch(4, 2), _batch(8) | RECOMPUTE, _batch(8) | BF16, _batch(16) | ARGMAX],
    "llama": [_batch(8), _batch(16) | RECOMPUTE | ARGMAX, _batch(8, 2) | BF16],
    "llama lora": [_batch(8), _batch(4, 2) | ARGMAX],
    "qwen2": [_batch(8) | ARGMAX],
    "vit": [_batch(8), _batch(16) | RECOMPUTE, _batch(8, 2) | BF16],
    "swin": [_batch(4), _batch(8) | RECOMPUTE],
    "resnet": [_batch(8)],
    "bart": [_batch(8), _batch(8) | RECOMPUTE],
    "t5 script": [_batch(8), _batch(4, 2), _batch(8) | BF16],
    "bart script": [_batch(8) | ARGMAX, _batch(16) | RECOMPUTE | ARGMAX],
}
QUICK_CASES = {"bert short": [_batch(32)], "gpt2": [_batch(4, 2)], "vit": [_batch(8) | RECOMPUTE]}
OWN_THRESHOLD = ("bert 8", "gpt2 8", "vit 8")  # probed with glibc's own threshold too


def make_task(model: str, folder: Path) -> Task:
    kind, _, script = model.partition(" ")
    if script == "script":
        file = folder / "seq2seq.py"
        file.write_text(SEQ2SEQ)
        return Task(script=ScriptTask((str(file), kind), str(folder), digest=digest(SEQ2SEQ)))
    config, task, size, rank = MODELS[model]
    shape = {"image_size": size} if task == SEE else {"seq_len": size}
    return Task(model=ModelTask(kind, config, task, 8, "float32", EVAL_ROWS, lora_rank=rank, **shape))


def name_case(model: str, knobs: dict[str, Any]) -> str:
    """`gpt2 4×2 bf16`."""
    accumulation = knobs["gradient_accumulation_steps"]
    parts = [model, f"{knobs['per_device_train_batch_size']}" + (f"×{accumulation}" if accumulation > 1 else "")]
    parts += ["checkpointing"] if knobs.get("activation_checkpointing") else []
    parts += [str(knobs[name]) for name in ("precision", "attention", "optim", "logits") if name in knobs]
    return " ".join(parts)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """For the processes that are started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class Bench:
    """One machine and its two servers: glibc reads the threshold when a process starts."""

    def __init__(self, machine: Machine, root: Path) -> None:
        self._machine, self._root, self._probes = machine, root, 0

    def measure(self, cases: dict[str, list[dict[str, Any]]], own_threshold: tuple[str, ...]) -> list[dict[str, Any]]:
        rows = []
        with environment(*MMAP_THRESHOLD), Launcher(self._machine) as launcher:
            for model, settings in cases.items():
                rows += self._measure_model(launcher, model, settings)
        with Launcher(self._machine) as launcher:
            for row in rows:
                if row["name"] in own_threshold:
                    task, description = row["_described"]
                    reply = self._probe(launcher, task, description, row["_candidate"])
                    row["own_threshold_resident_bytes"] = phase_bytes(reply, "train")
        return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]

    def _measure_model(
        self, launcher: Launcher, model: str, settings: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        folder = self._root / model.replace(" ", "-")
        folder.mkdir()
        task = make_task(model, folder)
        description = preflight.describe(
            task, self._machine, launcher, folder / "describe", lambda note: None, ShadowDevice("cpu")
        )
        runs = ShadowRuns(task, description, make_target(), launcher, folder / "shadows", self._machine.versions)
        for knobs in settings:
            candidate = preflight.baseline_of(description).but(knobs)
            began = time.monotonic()
            predicted, traced = must_predict(runs.predict(candidate)), must_predict(runs.verify(candidate))
            shadow_seconds, began = time.monotonic() - began, time.monotonic()
            reply = self._probe(launcher, task, description, candidate)
            row = {
                "name": name_case(model, knobs),
                "source": predicted.source,
                "same_traced": predicted.phases == traced.phases,
                "live": pair(live_bytes(predicted, "train"), live_bytes(reply, "train")),
                "resident": pair(phase_bytes(predicted, "train"), phase_bytes(reply, "train")),
                "evaluate": pair(phase_bytes(predicted, "evaluate"), phase_bytes(reply, "evaluate")),
                "shadow_seconds": shadow_seconds,
                "probe_seconds": time.monotonic() - began,
                "_described": (task, description),
                "_candidate": candidate,
            }
            print_row(row)
            yield row

    def _probe(self, launcher: Launcher, task: Task, description: Description, candidate: Candidate) -> Reply:
        """Raises RuntimeError for a probe that did not run to its end."""
        self._probes += 1
        attention = candidate.get("attention")
        request = Request(
            probe=f"{self._probes:04d}",
            folder=str(self._root / f"{self._probes:04d}"),
            task=task,
            device="cpu",
            schedule=Schedule(timed_steps=0),
            arguments=arguments_of(candidate, description.fields, "cpu"),
            model_kwargs={} if attention is None else {"attn_implementation": attention},
            logits=candidate.get("logits"),
        )
        reply = launcher.probe(request, how="fork", time_limit=TIME_LIMIT).reply
        if reply.outcome is not Outcome.FITS:
            raise RuntimeError(f"a probe ended with {reply.outcome.value}: {reply.failure}")
        return reply


def must_predict(prediction: Prediction) -> Prediction:
    if prediction.failure is not None:
        raise RuntimeError(f"a shadow run ended with {prediction.failure.kind}: {prediction.failure.message}")
    return prediction


def live_bytes(record: Prediction | Reply, name: str) -> int:
    return next(phase.allocated_bytes for phase in record.phases if phase.name == name)


def phase_bytes(record: Prediction | Reply, name: str) -> int:
    return next(phase.process_bytes for phase in record.phases if phase.name == name)


def pair(predicted: int, measured: int) -> dict[str, Any]:
    return {"predicted_bytes": predicted, "measured_bytes": measured, "error": predicted / measured - 1}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst size of the errors, and how far glibc's own threshold lies above the prediction."""
    figures = {}
    for name in ("live", "resident", "evaluate"):
        sizes = [abs(row[name]["error"]) for row in rows]
        figures[name] = {"median": statistics.median(sizes), "worst": max(sizes)}
    return figures


def judge(figures: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    return (
        figures["live"]["median"] <= LIVE_MEDIAN
        and figures["live"]["worst"] <= LIVE_WORST
        and figures["resident"]["worst"] <= RESIDENT_WORST
        and figures["evaluate"]["worst"] <= RESIDENT_WORST
        and all(row["same_traced"] for row in rows)
    )


HEADER = f"{'MB predicted / measured':42}{'live':>24}{'resident':>24}{'evaluate':>24}"


def print_row(row: dict[str, Any]) -> None:
    cells = ""
    for name in ("live", "resident", "evaluate"):
        one = row[name]
        figure = f"{one['predicted_bytes'] / 1e6:.0f} / {one['measured_bytes'] / 1e6:.0f}"
        cells += f"{figure:>15} {one['error']:+8.2%}"
    differs = "" if row["same_traced"] else "  traced at this batch: another figure"
    print(f"{row['name']:42}{cells}{differs}", flush=True)


def main() -> int:
    options = common.make_parser(__doc__, "predict_cpu").parse_args()
    common.use_one_thread()
    machine = read_machine("cpu")
    print(HEADER)
    with tempfile.TemporaryDirectory() as root:
        cases, own = (QUICK_CASES, ()) if options.quick else (CASES, OWN_THRESHOLD)
        rows = Bench(machine, Path(root)).measure(cases, own)
    figures = summarize(rows)
    holds = judge(figures, rows)
    above = {
        row["name"]: row["own_threshold_resident_bytes"] / row["resident"]["predicted_bytes"] - 1
        for row in rows
        if "own_threshold_resident_bytes" in row
    }
    results = {
        "claim": "on the CPU live bytes are predicted to 1 % in the median and 3 % at worst, resident memory to 5 %",
        "holds": holds,
        "errors": figures,
        "above_prediction_at_glibcs_own_threshold": above,
        "threads": 1,
        "settings": rows,
        "machine": common.machine_facts(machine),
    }
    common.write_results(common.results_path(options), results)
    for name, share in above.items():
        print(f"{name}: {share:+.1%} above the prediction at glibc's own threshold")
    told = ", ".join(f"{n} {f['median']:.2%} ({f['worst']:.2%})" for n, f in figures.items())
    print(f"{len(rows)} settings, error in the median (at worst): {told}: {common.format_verdict(holds)}")
    return 1 if options.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
