"""What the benchmarks share: their command line, the machine that a figure is true for, results on disk, and requests.

A benchmark measures one published claim. In full it writes `results/NAME.json`; with `--quick` it only shows that it runs,
and writes to `autofit-runs/benchmarks/`, so that a published figure is never replaced by a hasty one.
"""

import argparse
import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit import codec
from autofit.catalog import find_model
from autofit.machine import read_machine
from autofit.records import Machine, ModelTask, Request, Schedule, Task
from autofit.store import write_json

ROOT = Path(__file__).resolve().parent.parent
PRIVATE = ("device_id",)  # what tells one machine from another of its kind


def make_parser(text: str | None, name: str) -> argparse.ArgumentParser:
    """`text` is the script's docstring. `results_path` gives the path that `--out` stands for."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="show that it runs: fewest repeats, no published result")
    parser.add_argument("--check", action="store_true", help="end with 1 where the claim does not hold")
    parser.add_argument("--out", type=Path, help=f"default: results/{name}.json; with --quick autofit-runs/benchmarks/")
    parser.set_defaults(name=name)
    return parser


def results_path(options: argparse.Namespace) -> Path:
    folder = ROOT / ("autofit-runs/benchmarks" if options.quick else "results")
    return options.out or folder / f"{options.name}.json"


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace the file at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def machine_facts(machine: Machine | None = None) -> dict[str, Any]:
    """What a figure depends on, without what names this one machine."""
    facts = codec.to_json_value(machine or read_machine("cpu"))
    facts["system"] = re.match(r"\S* ?\d*(\.\d+)?", facts["system"]).group()  # no builder's mark: `Linux 6.8`
    return {name: value for name, value in facts.items() if name not in PRIVATE and value is not None}


def use_one_thread() -> None:
    """One OpenMP thread in every child: on a shared CPU several spin for each other, and times swing by factors."""
    os.environ["OMP_NUM_THREADS"] = "1"


def summarize(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def in_turn(ways: Sequence[str], repeats: int) -> Iterator[str]:
    """Every way once in each repeat, in an order that turns around, so that all see the same machine."""
    for repeat in range(repeats):
        yield from ways if repeat % 2 == 0 else ways[::-1]


def compare_ways(
    samples: Sequence[dict[str, Any]], ways: Sequence[str], figures: Iterable[str]
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, float]]:
    """Of each figure (`NAME_seconds` in a sample) the summary by way, and the ratio of the first way's median to the last's."""
    summaries = {
        how: {name: summarize([s[f"{name}_seconds"] for s in samples if s["how"] == how]) for name in figures}
        for how in ways
    }
    first, last = summaries[ways[0]], summaries[ways[-1]]
    return summaries, {name: first[name]["median"] / last[name]["median"] for name in figures}


def print_ways(results: dict[str, Any], figures: Mapping[str, str]) -> None:
    """A line for each way and one for the ratios; `figures` are names and their titles."""
    print(f"{'':10}" + "".join(f"{title:26}" for title in figures.values()).rstrip())
    for how, summaries in results["seconds"].items():
        print(f"{how:10}" + "".join(f"{format_seconds(summaries[name]):26}" for name in figures).rstrip())
    print(f"{'ratio':10}" + "".join(f"{format_ratio(results['ratios'][name]):26}" for name in figures).rstrip())


def first_step_seconds(request: Request) -> float:
    """From the request to the beginning of the first optimizer step, as the child's progress tells."""
    text = (Path(request.folder) / "progress.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return next(line["seconds"] for line in lines if line["phase"] == "train" and line["step"] == 1)


def format_seconds(summary: dict[str, float]) -> str:
    """`0.66 s (0.64–0.70)`: the median and the range."""
    return f"{summary['median']:.2f} s ({summary['lowest']:.2f}–{summary['highest']:.2f})"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio < 100 else f"{ratio:.0f}×"


def format_verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def model_task(model: str, *, seq_len: int, effective_batch: int, eval_rows: int) -> Task:
    """Text classification with a model of the catalog, in float32."""
    found = find_model(model)
    if found is None:
        raise ValueError(f"{model} is not in the catalog")
    return Task(
        model=ModelTask(
            model=model,
            config=found.config,
            task="text-classification",
            effective_batch=effective_batch,
            dtype="float32",
            eval_rows=eval_rows,
            seq_len=seq_len,
        )
    )


class Requests:
    """Numbered requests for one device, each with a folder of its own below `root`."""

    def __init__(self, root: Path, device: str) -> None:
        self._root, self._device, self._made = root, device, 0

    def make(
        self, task: Task, schedule: Schedule, *, batch: int | None = None, budget_bytes: int | None = None
    ) -> Request:
        """`batch` is rows per device and step; the effective batch of the task is held by accumulation. None: as given."""
        self._made += 1
        probe = f"{self._made:04d}"
        arguments = {}
        if batch is not None:
            accumulation = task.model.effective_batch // batch
            if accumulation * batch != task.model.effective_batch:
                raise ValueError(f"{batch} rows do not divide an effective batch of {task.model.effective_batch}")
            arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        return Request(
            probe=probe,
            folder=str(self._root / probe),
            task=task,
            device=self._device,
            schedule=schedule,
            arguments=arguments,
            budget_bytes=budget_bytes,
        )
