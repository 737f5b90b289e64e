"""Parts of `gpu_acceptance.py` that hold predictions against a CUDA device: 30 configurations, ten a part.

Each is predicted from two shadow runs (its own batch sizes are none of theirs) and then probed: live bytes, what torch
reserved, and live bytes in evaluation. The prediction knows the card's capability and nothing else of it; no budget is set, so
that nothing is given back early. Peaks are those of torch's own counters.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.launch import Launcher
from autofit.prediction import ShadowRuns, make_target
from autofit.records import Candidate, KnobValue, Machine, Outcome, Request, Schedule, ShadowDevice, Task, digest
from autofit.study.preflight import baseline_of, describe
from autofit.trainer_args import arguments_of
from autofit.workloads.model_task import make_model_task

PART_SECONDS = 225.0  # what is not done by then is done by the next call
TIME_LIMIT = 120.0
MEMORY = Schedule(timed_steps=0)
MEDIAN_AIM, WORST_AIM = 0.01, 0.05
CHECKED = ("train_allocated_bytes", "train_reserved_bytes", "evaluate_allocated_bytes")


@dataclass(frozen=True)
class Configuration:
    model: str
    batch: int
    seq_len: int | None = None
    image_size: int | None = None
    lora_rank: int | None = None
    dtype: str = "float32"
    knobs: dict[str, KnobValue] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [self.model, f"{self.batch} × {self.seq_len or self.image_size}"]
        parts += [f"lora r={self.lora_rank}"] if self.lora_rank else []
        parts += [] if self.dtype == "float32" else [self.dtype]
        return ", ".join([*parts, *(f"{name} {value}" for name, value in self.knobs.items())])


def _knobs(**changes: KnobValue) -> dict[str, KnobValue]:
    return changes


BF16, FP16 = _knobs(precision="bf16"), _knobs(precision="fp16")
CKPT = _knobs(activation_checkpointing=True)
EAGER, FOREACH = _knobs(attention="eager"), _knobs(optim="adamw_torch")
TWO = _knobs(gradient_accumulation_steps=2)
FOUR = _knobs(gradient_accumulation_steps=4)

PARTS: dict[str, tuple[Configuration, ...]] = {
    "predictions-1": (
        Configuration("bert-base-uncased", 8, 128),
        Configuration("bert-base-uncased", 32, 512),
        Configuration("bert-base-uncased", 32, 512, knobs=CKPT),
        Configuration("bert-base-uncased", 32, 128, knobs=BF16),
        Configuration("bert-base-uncased", 16, 512, knobs=FP16),
        Configuration("bert-base-uncased", 16, 256, knobs=EAGER),
        Configuration("bert-base-uncased", 4, 32, knobs=FOREACH),
        Configuration("bert-large-uncased", 8, 256, knobs=BF16),
        Configuration("roberta-base", 16, 128, knobs=FOUR),
        Configuration("distilbert-base-uncased", 64, 128, knobs=BF16 | TWO),
    ),
    "predictions-2": (
        Configuration("gpt2", 4, 512),
        Configuration("gpt2", 8, 1024, knobs=BF16),
        Configuration("gpt2", 8, 1024, knobs=BF16 | CKPT),
        Configuration("gpt2-medium", 4, 512, knobs=CKPT),
        Configuration("HuggingFaceTB/SmolLM2-135M", 8, 1024, knobs=BF16),
        Configuration("Qwen/Qwen2.5-0.5B", 4, 1024, knobs=BF16),
        Configuration("Qwen/Qwen2.5-0.5B", 4, 1024, dtype="bfloat16", knobs=CKPT),
        Configuration("Qwen/Qwen2.5-0.5B", 8, 512, knobs=TWO),
        Configuration("meta-llama/Llama-3.2-1B", 2, 2048, dtype="bfloat16"),
        Configuration("meta-llama/Llama-3.2-1B", 4, 2048, dtype="bfloat16", knobs=CKPT),
    ),
    "predictions-3": (
        Configuration("vit-base-patch16-224", 32, image_size=224),
        Configuration("vit-base-patch16-224", 32, image_size=224, knobs=BF16),
        Configuration("vit-base-patch16-224", 8, image_size=384, knobs=CKPT),
        Configuration("vit-base-patch16-224", 16, image_size=512, knobs=BF16 | CKPT),
        Configuration("swin-tiny-patch4-window7-224", 32, image_size=224),
        Configuration("swin-tiny-patch4-window7-224", 32, image_size=224, knobs=BF16 | CKPT),
        Configuration("deberta-v3-base", 8, 256, knobs=BF16),
        Configuration("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 1024, lora_rank=16, dtype="bfloat16"),
        Configuration("meta-llama/Llama-3.1-8B", 2, 1024, lora_rank=16, dtype="bfloat16", knobs=CKPT),
        Configuration("gpt2", 16, 256, knobs=_knobs(optim="adafactor")),
    ),
}


class Comparison:
    """Predictions and probes of one machine."""

    def __init__(self, machine: Machine, root: Path, launcher: Launcher) -> None:
        self._machine, self._root, self._launcher = machine, root, launcher

    def compare(self, configuration: Configuration) -> dict[str, Any]:
        began = time.monotonic()
        task, arguments = self._task(configuration)
        folder = self._root / digest(asdict(configuration))
        description = describe(task, self._machine, self._launcher, folder / "describe", _quiet, ShadowDevice("cpu"))
        candidate = baseline_of(description).but({**arguments, **configuration.knobs})
        runs = ShadowRuns(
            task,
            description,
            make_target(machine=self._machine),
            self._launcher,
            folder / "shadows",
            self._machine.versions,
        )
        prediction = runs.predict(candidate)
        predicted_seconds = time.monotonic() - began
        measured = self._probe(task, description.fields, candidate, folder / "probe")
        told: dict[str, Any] = {
            "configuration": asdict(configuration),
            "source": prediction.source,
            "failure": None if prediction.failure is None else prediction.failure.message,
            "outcome": measured["outcome"],
            "prediction_seconds": predicted_seconds,
            "seconds": time.monotonic() - began,
            "context_bytes": measured["context_bytes"],
        }
        for name in CHECKED:
            phase, counter = name.split("_", 1)
            record = prediction.phase(phase)
            predicted = None if record is None else getattr(record, counter)
            told[name] = {"predicted": predicted, "measured": measured.get(name)}
            if predicted and measured.get(name):
                told[name]["error"] = predicted / measured[name] - 1
        return told

    def _task(self, configuration: Configuration) -> tuple[Task, dict[str, Any]]:
        accumulation = int(configuration.knobs.get("gradient_accumulation_steps", 1))
        model, _ = make_model_task(
            configuration.model,
            transformers_version=self._machine.versions.get("transformers", ""),
            seq_len=configuration.seq_len,
            image_size=configuration.image_size,
            dtype=configuration.dtype,
            lora_rank=configuration.lora_rank,
            eval_rows=256,
            base_args={
                "per_device_train_batch_size": configuration.batch,
                "per_device_eval_batch_size": configuration.batch,
                "gradient_accumulation_steps": accumulation,
            },
        )
        return Task(model=model), {"gradient_accumulation_steps": accumulation}

    def _probe(self, task: Task, fields: tuple[str, ...], candidate: Candidate, folder: Path) -> dict[str, Any]:
        request = Request(
            probe="predicted",
            folder=str(folder),
            task=task,
            device=self._machine.device,
            schedule=MEMORY,
            arguments=arguments_of(candidate, fields, self._machine.device),
            model_kwargs={} if candidate.get("attention") is None else {"attn_implementation": candidate["attention"]},
            logits=candidate.get("logits"),
        )
        how = "fork" if self._launcher.can_fork else "fresh"
        reply = self._launcher.probe(request, how=how, time_limit=TIME_LIMIT).reply
        if reply.outcome is not Outcome.FITS and reply.failure is not None:
            print(reply.failure.traceback[-1500:], file=sys.stderr)
        measured: dict[str, Any] = {"outcome": reply.outcome.value, "context_bytes": reply.context_bytes}
        for phase in reply.phases:
            measured[f"{phase.name}_allocated_bytes"] = phase.allocated_bytes
            measured[f"{phase.name}_reserved_bytes"] = phase.reserved_bytes
        return measured


def _quiet(_: str) -> None:
    pass


def run_part(
    name: str, machine: Machine, results: dict[str, Any], write: Any, configurations: tuple[Configuration, ...] = ()
) -> dict[str, Any]:
    """Compare what is not done yet, each written as soon as it is; ends early rather than exceed its time."""
    began = time.monotonic()
    done = results.setdefault("predictions", {})
    chosen = configurations or PARTS[name]
    with tempfile.TemporaryDirectory() as root, Launcher(machine) as launcher:
        launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS))
        comparison = Comparison(machine, Path(root), launcher)
        for configuration in chosen:
            if configuration.name in done:
                continue
            if time.monotonic() - began > PART_SECONDS:
                print(f"{name}: out of time; the same command goes on with {configuration.name}")
                break
            done[configuration.name] = comparison.compare(configuration)
            print_row(configuration.name, done[configuration.name])
            results["prediction_errors"] = summarize(done)
            write(results)
    return results


def print_row(name: str, told: dict[str, Any]) -> None:
    errors = [f"{c.removesuffix('_bytes')} {told[c]['error']:+.2%}" for c in CHECKED if "error" in told[c]]
    print(f"  {name}: {told['outcome']}, {', '.join(errors) or told['failure']} ({told['seconds']:.0f} s)")


def summarize(done: dict[str, Any]) -> dict[str, Any]:
    """Median and worst of the absolute errors by counter, and whether they hold."""
    summary: dict[str, Any] = {"configurations": len(done)}
    for counter in CHECKED:
        errors = [abs(told[counter]["error"]) for told in done.values() if "error" in told[counter]]
        if errors:
            summary[counter] = {"median": statistics.median(errors), "worst": max(errors), "count": len(errors)}
    checked = [summary[c] for c in CHECKED if c in summary]
    summary["holds"] = bool(checked) and all(s["median"] <= MEDIAN_AIM and s["worst"] <= WORST_AIM for s in checked)
    return summary
