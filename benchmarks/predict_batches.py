"""Claim: two shadow runs, at batches 2 and 3, give the peaks of every other batch to the byte, and cost a few seconds.

Ten models of the catalog in their real sizes, on a simulated RTX 3090: with and without checkpointing, bf16 autocast,
accumulation over 4 micro-batches, and evaluation. Every structure is traced at 2 and 3; the event list that follows for
another batch, 4 to 64, is replayed through the simulated allocator, and held against a trace made at that very batch and
accumulation: allocated and reserved bytes, in training and in evaluation. A trace holds two micro-batches of an optimizer
step, since all later ones do the same; what they do once more to the layout of free blocks is not in it, and the allocator
may give out a block somewhat larger or smaller there: peaks with accumulation over 4 may differ by 0.2 %.

Beside that, in processor seconds of one thread, imports left out:

    another batch   rewriting and replaying bert-base at one more batch: under 0.05 s
    bert-base       two optimizer steps traced: under 2.5 s; at another batch or hidden size about as long
    llama 7b        two optimizer steps of 2048 tokens, with checkpointing: under 8 s
    llama 70b       the same, in less than 1 GB of resident memory

    python benchmarks/predict_batches.py             about eight minutes; writes results/predict_batches.json
    python benchmarks/predict_batches.py --check     the same, and ends with 1 where the claim does not hold
    python benchmarks/predict_batches.py --quick     one model
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import psutil

from autofit.catalog import find_gpu, find_model
from autofit.harness.shadow.allocator import AllocatorSettings
from autofit.harness.shadow.family import with_accumulation
from autofit.harness.shadow.trace import Trace, replay
from autofit.harness.trainer_hooks import TRACE_FILE
from autofit.launch import Ended, Launcher
from autofit.machine import read_machine
from autofit.prediction import ShadowRuns, make_target
from autofit.records import Candidate, Machine, ModelTask, Outcome, Request, Schedule, Task
from autofit.study import preflight
from autofit.trainer_args import arguments_of

GPU = "rtx-3090"
BATCH_SECONDS, BERT_SECONDS, LLAMA_SECONDS, LLAMA_RESIDENT_BYTES = 0.05, 2.5, 8.0, 10**9
ACCUMULATION_LIMIT = 0.002  # of peaks with more micro-batches than are traced
GROWTH = 1.3  # of a trace's time from the small to the large; processor seconds vary by a tenth
TIME_LIMIT = 600.0
EVAL_ROWS = 512

Settings = dict[str, Any]
PLAIN: Settings = {}
RECOMPUTE: Settings = {"activation_checkpointing": True}
BF16: Settings = {"precision": "bf16"}
FOUR: Settings = {"gradient_accumulation_steps": 4}
ARGMAX: Settings = {"logits": "argmax"}

# model -> tokens per row (None: images), then by structure the batches that are held against traces
CASES: dict[str, tuple[int | None, list[tuple[Settings, tuple[int, ...]]]]] = {
    "bert-base-uncased": (
        128,
        [(PLAIN, (4, 16, 64)), (BF16, (8,)), (BF16 | RECOMPUTE, (32,)), (FOUR, (8,))],
    ),
    "roberta-base": (256, [(RECOMPUTE, (16, 64)), (BF16 | FOUR, (4,))]),
    "distilbert-base-uncased": (128, [(PLAIN, (64,)), (BF16 | {"attention": "eager"}, (16,))]),
    "deberta-v3-base": (128, [(PLAIN, (4,)), (BF16 | RECOMPUTE, (16,))]),
    "gpt2": (256, [(PLAIN, (8,)), (BF16 | ARGMAX, (32,))]),
    "Llama-3.2-1B": (512, [(PLAIN, (4,)), (RECOMPUTE, (16,))]),
    "Qwen2.5-0.5B": (512, [(RECOMPUTE, (8,)), (FOUR | ARGMAX, (4,))]),
    "SmolLM2-135M": (512, [(RECOMPUTE | ARGMAX, (16,)), (FOUR, (5,))]),
    "vit-base-patch16-224": (None, [(BF16, (32,)), (RECOMPUTE, (64,))]),
    "swin-tiny-patch4-window7-224": (None, [(PLAIN, (16,)), (BF16 | FOUR, (8,))]),
}
QUICK_CASES = {"bert-base-uncased": (128, [(PLAIN, (16,)), (BF16 | FOUR, (4,))])}

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
LLAMA_70B = LLAMA_7B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
WIDE_BERT = {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 48}  # four times bert-base


def make_task(model: str, tokens: int | None, config: dict[str, Any] | None = None, dtype: str | None = None) -> Task:
    """A model of the catalog, or one of the given configuration, in the dtype of its checkpoint."""
    if config is None:
        found = find_model(model)
        if found is None:
            raise ValueError(f"{model} is not in the catalog")
        config, kind = found.config, found.task
    else:
        kind = "causal-lm" if config["model_type"] == "llama" else "text-classification"
    return Task(
        model=ModelTask(
            model=model,
            config=config,
            task=kind,
            effective_batch=8,
            dtype=dtype or config.get("dtype") or config.get("torch_dtype") or "float32",
            eval_rows=EVAL_ROWS,
            seq_len=tokens,
            image_size=None if tokens else config["image_size"],
        )
    )


class Bench:
    """Shadow runs on one simulated card, started from one warm server."""

    def __init__(self, machine: Machine, launcher: Launcher, root: Path) -> None:
        self._machine, self._launcher, self._root = machine, launcher, root
        self._target = make_target(find_gpu(GPU))
        self._runs = 0

    # ---- the same to the byte ----

    def compare(self, cases: dict[str, Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for model, (tokens, structures) in cases.items():
            rows += self._compare_model(model, make_task(model, tokens), structures)
        return rows

    def _compare_model(self, model: str, task: Task, structures: list[Any]) -> Iterator[dict[str, Any]]:
        folder = self._root / model
        reasons: list[str] = []
        description = preflight.describe(
            task, self._machine, self._launcher, folder / "describe", lambda note: None, self._target.device
        )
        runs = ShadowRuns(
            task,
            description,
            self._target,
            self._launcher,
            folder / "shadows",
            self._machine.versions,
            on_run=reasons.append,
        )
        for settings, batches in structures:
            for batch in batches:
                candidate = preflight.baseline_of(description).but(
                    {"gradient_accumulation_steps": 1, **settings},
                    per_device_train_batch_size=batch,
                    per_device_eval_batch_size=2 * batch,
                )
                reasons.clear()
                predicted = runs.predict(candidate)
                if predicted.failure is not None:
                    raise RuntimeError(f"{model} cannot be traced: {predicted.failure}")
                trace = self.trace(task, candidate, description.fields)
                peaks = replay(trace, AllocatorSettings()).peaks
                differences = {
                    f"{phase.name} {kind}": getattr(phase, kind) - getattr(peaks[phase.name], kind)
                    for phase in predicted.phases
                    for kind in ("allocated_bytes", "reserved_bytes")
                }
                row = {
                    "model": model,
                    "settings": name_settings(settings),
                    "batch": batch,
                    "source": predicted.source,
                    "reason": next((text for text in reasons if "one by one" in text), None),
                    "events": len(trace.events),
                    "traced": {
                        name: {"allocated_bytes": p.allocated_bytes, "reserved_bytes": p.reserved_bytes}
                        for name, p in peaks.items()
                    },
                    "differences": {name: value for name, value in differences.items() if value},
                }
                row["worst"] = max(
                    abs(value) / getattr(peaks[name.split()[0]], name.split()[1]) for name, value in differences.items()
                )
                row["same"] = row["source"] == "rewritten" and not row["differences"]
                allowed = ACCUMULATION_LIMIT if "gradient_accumulation_steps" in settings else 0.0
                row["holds"] = row["source"] == "rewritten" and row["worst"] <= allowed
                print_row(row)
                yield row

    # ---- one shadow run ----

    def trace(self, task: Task, candidate: Candidate, fields: tuple[str, ...]) -> Trace:
        """At this very batch and accumulation, on this very card: nothing of it is rewritten."""
        attention = candidate.get("attention")
        arguments = arguments_of(candidate.but(eval_accumulation_steps=None), fields, "cpu")
        kwargs = {} if attention is None else {"attn_implementation": attention}
        folder = self._run(task, Schedule(timed_steps=0), arguments, kwargs, candidate.get("logits"))[0]
        return Trace.load(folder / TRACE_FILE)

    def _run(
        self,
        task: Task,
        schedule: Schedule,
        arguments: dict[str, Any],
        model_kwargs: dict[str, Any] | None = None,
        logits: Any = None,
    ) -> tuple[Path, Ended]:
        self._runs += 1
        folder = self._root / f"{self._runs:04d}"
        request = Request(
            probe=folder.name,
            folder=str(folder),
            task=task,
            device="cpu",
            schedule=schedule,
            arguments=arguments,
            model_kwargs=model_kwargs or {},
            logits=logits,
            shadow=self._target.device,
        )
        ended = self._launcher.probe(request, how="fork", time_limit=TIME_LIMIT, trusted=True)
        if ended.reply.outcome is not Outcome.FITS:
            raise RuntimeError(f"a shadow run ended with {ended.reply.outcome.value}: {ended.reply.failure}")
        return folder, ended

    # ---- what it costs ----

    def cost(self, task: Task, batch: int, recompute: bool = False, repeats: int = 3) -> dict[str, Any]:
        """Two optimizer steps, no evaluation: processor seconds (the least of some), and resident memory at its highest.

        The first run is not counted: it tells what the server has to import.
        """
        arguments = {"per_device_train_batch_size": batch, "activation_checkpointing": recompute, "use_cpu": True}
        preflight.describe(
            task, self._machine, self._launcher, self._root / "describe", lambda note: None, self._target.device
        )
        seconds, resident = [], []
        for _ in range(repeats):
            before = self._children_seconds()
            ended = self._run(task, Schedule(timed_steps=0, evaluate=False), arguments)[1]
            seconds.append(self._children_seconds() - before)
            resident.append(ended.host_bytes or 0)
        return {"processor_seconds": min(seconds), "all_seconds": seconds, "resident_bytes": max(resident)}

    def _children_seconds(self) -> float:
        """Processor time of all ended shadow runs: what the server has collected."""
        servers = [p for p in psutil.Process().children() if "autofit.harness.server" in p.cmdline()]
        return sum(sum(p.cpu_times()[2:4]) for p in servers)

    def batch_seconds(self) -> dict[str, Any]:
        """Processor seconds in this process for one more batch of bert-base, accumulation over 4 included where asked."""
        task = make_task("bert-base-uncased", 128)
        folder = self._root / "one-more-batch"
        description = preflight.describe(
            task, self._machine, self._launcher, folder / "describe", lambda note: None, self._target.device
        )
        runs = ShadowRuns(task, description, self._target, self._launcher, folder / "shadows", self._machine.versions)
        seconds = {}
        for accumulation in (1, 4):
            candidate = preflight.baseline_of(description).but(gradient_accumulation_steps=accumulation)
            family = runs.family(candidate)
            if family is None or not hasattr(family, "at"):
                raise RuntimeError(f"bert-base is no family: {family}")
            samples = []
            for batch in range(4, 65, 4):
                began = time.process_time()
                trace = family.at(batch)
                replay(with_accumulation(trace, accumulation) if accumulation > 2 else trace, AllocatorSettings())
                samples.append(time.process_time() - began)
            seconds[f"accumulation {accumulation}"] = common.summarize(samples)
        return seconds


def measure_costs(bench: Bench) -> dict[str, Any]:
    bert, bert_wide = make_task("bert-base-uncased", 128), find_model("bert-base-uncased").config | WIDE_BERT
    return {
        "another batch": bench.batch_seconds(),
        "bert-base, batch 8": bench.cost(bert, 8),
        "bert-base, batch 64": bench.cost(bert, 64),
        "bert of hidden size 3072, batch 8": bench.cost(make_task("wide-bert", 128, bert_wide), 8),
        "llama 7b": bench.cost(make_task("llama-7b", 2048, LLAMA_7B, "bfloat16"), 2, True, repeats=2),
        "llama 70b": bench.cost(make_task("llama-70b", 2048, LLAMA_70B, "bfloat16"), 2, True, repeats=1),
    }


def judge_costs(costs: dict[str, Any]) -> dict[str, bool]:
    bert = costs["bert-base, batch 8"]["processor_seconds"]
    others = ("bert-base, batch 64", "bert of hidden size 3072, batch 8")
    return {
        "another batch": max(one["median"] for one in costs["another batch"].values()) < BATCH_SECONDS,
        "bert-base": bert < BERT_SECONDS,
        "no growth": all(costs[name]["processor_seconds"] < GROWTH * bert for name in others),
        "llama 7b": costs["llama 7b"]["processor_seconds"] < LLAMA_SECONDS,
        "llama 70b": costs["llama 70b"]["resident_bytes"] < LLAMA_RESIDENT_BYTES,
    }


def name_settings(settings: Settings) -> str:
    parts = [str(settings[name]) for name in ("precision", "attention", "logits") if name in settings]
    parts += ["checkpointing"] if settings.get("activation_checkpointing") else []
    parts += ["accumulation 4"] if "gradient_accumulation_steps" in settings else []
    return " ".join(parts) or "plain"


def print_row(row: dict[str, Any]) -> None:
    figures = ""
    for phase in ("train", "evaluate"):
        one = row["traced"].get(phase, {"allocated_bytes": 0, "reserved_bytes": 0})
        figures += f"{one['allocated_bytes'] / 1e6:12.1f} /{one['reserved_bytes'] / 1e6:9.1f}"
    told = "the same" if row["same"] else row["reason"] or f"differs by {row['worst']:.3%}: {row['differences']}"
    print(f"{row['model']:30}{row['settings']:26}{row['batch']:>5}{figures}  {told}", flush=True)


def print_costs(costs: dict[str, Any], held: dict[str, bool]) -> None:
    for name, cost in costs.items():
        if name == "another batch":
            told = ", ".join(f"{kind} {one['median'] * 1000:.0f} ms" for kind, one in cost.items())
        else:
            told = f"{cost['processor_seconds']:.2f} s of the processor, {cost['resident_bytes'] / 1e6:.0f} MB resident"
        print(f"{name}: {told}")
    missed = [name for name, holds in held.items() if not holds]
    if missed:
        print(f"missed: {', '.join(missed)}")


def main() -> int:
    options = common.make_parser(__doc__, "predict_batches").parse_args()
    common.use_one_thread()
    machine = read_machine("cpu")
    with tempfile.TemporaryDirectory() as root, Launcher(machine) as launcher:
        bench = Bench(machine, launcher, Path(root))
        print(f"{'MB allocated / reserved':56}{'batch':>5}{'train':>23}{'evaluate':>23}")
        rows = bench.compare(QUICK_CASES if options.quick else CASES)
        if options.quick:
            costs: dict[str, Any] = {"another batch": bench.batch_seconds()}
            held = {"another batch": max(one["median"] for one in costs["another batch"].values()) < BATCH_SECONDS}
        else:
            costs = measure_costs(bench)
            held = judge_costs(costs)
    same = sum(row["same"] for row in rows)
    holds = all(row["holds"] for row in rows) and all(held.values())
    results = {
        "claim": "two shadow runs give the peaks of every other batch to the byte, and cost a few seconds",
        "holds": holds,
        "same": same,
        "compared": len(rows),
        "costs": costs,
        "costs_hold": held,
        "gpu": GPU,
        "threads": 1,
        "batches": rows,
        "machine": common.machine_facts(machine),
    }
    common.write_results(common.results_path(options), results)
    print_costs(costs, held)
    print(
        f"{same} of {len(rows)} the same to the byte, {sum(held.values())} of {len(held)} costs kept: "
        f"{common.format_verdict(holds)}"
    )
    return 1 if options.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
