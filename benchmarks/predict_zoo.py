"""Claim: nine in ten of the model types that transformers has can be predicted: the user's own Trainer trains and evaluates
in a shadow run, without weights, GPU or memory.

For each model type of `workloads/zoo_models.py`, a choice by breadth that nothing is taken out of: one shadow run of
`workloads/zoo.py`, a script that knows nothing of autofit, on a device of CUDA's capability 8.0, at a batch of 2, through
two optimizer steps and an evaluation. It counts as traced when both were recorded to their end. Told are the seconds
from the request to the child's end, how many operators there were, and of what failed the exception, its phase and
where it was raised; `needs` names the package whose absence is the reason.

A traced run is no proof that its figures are right. Where sizes depend on values, what operators are answered with is
an upper bound (`autofit/harness/shadow/semantics/answers.py`): models that loop over their experts, such as
switch_transformers and nllb-moe, count every token for each expert; those that multiply by groups, as mixtral does, are
not concerned.

    python benchmarks/predict_zoo.py             some minutes; writes results/predict_zoo.json
    python benchmarks/predict_zoo.py --check     the same, and ends with 1 where the claim does not hold
    python benchmarks/predict_zoo.py --quick     12 model types, under a minute
    python benchmarks/predict_zoo.py bert t5     these only, written like --quick
"""

import contextlib
import os
import queue
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from workloads.zoo_models import MODELS, QUICK, all_models, task_of

from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.harness.shadow.trace import Trace
from autofit.harness.trainer_hooks import TRACE_FILE
from autofit.launch import Ended, Launcher
from autofit.machine import read_machine
from autofit.records import Failure, Outcome, Request, Schedule, ScriptTask, ShadowDevice, Task

LIMIT_SHARE = 0.9
DEVICE = ShadowDevice("cuda", (8, 0))
BATCH = 2
TIME_LIMIT = 120.0
CHILDREN = min(2, os.cpu_count() or 1)  # at a time
WORKLOAD = common.ROOT / "benchmarks" / "workloads" / "zoo.py"
PHASES = {"train", "evaluate"}
# Names that transformers imports only where a package is installed, and uses without asking.
NAMES_OF = {"center_to_corners_format": "PIL"}


def measure(models: tuple[str, ...]) -> dict[str, Any]:
    common.use_one_thread()
    machine = read_machine("cpu")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(CHILDREN))
        launchers = [stack.enter_context(Launcher(machine)) for _ in range(CHILDREN)]
        idle: queue.SimpleQueue[Launcher] = queue.SimpleQueue()

        def warm(launcher: Launcher) -> None:
            launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS))
            idle.put(launcher)

        def run(model: str) -> dict[str, Any]:
            launcher = idle.get()
            try:
                return measure_one(launcher, Path(root), model)
            finally:
                idle.put(launcher)

        list(pool.map(warm, launchers))
        rows = list(pool.map(run, models))
    traced = [row for row in rows if row["traced"]]
    share = len(traced) / len(rows)
    return {
        "claim": f"at least {LIMIT_SHARE:.0%} of the model types trace, training and evaluation",
        "holds": share >= LIMIT_SHARE,
        "share": share,
        "traced": len(traced),
        "model_types": len(rows),
        "by_task": _by_task(rows),
        "seconds": common.summarize([row["seconds"] for row in rows]),
        "wall_seconds": round(time.monotonic() - began, 1),
        "children_at_a_time": CHILDREN,
        "device": DEVICE.name,
        "batch": BATCH,
        "note": "sizes that depend on values are upper bounds: a loop over experts counts every token for each of them",
        "rows": rows,
        "machine": common.machine_facts(machine),
    }


def measure_one(launcher: Launcher, root: Path, model: str) -> dict[str, Any]:
    request = make_request(root, model)
    ended = launcher.probe(request, how="fork", time_limit=TIME_LIMIT, trusted=True)
    row = {"model_type": model, "task": task_of(model), "traced": False, "seconds": round(ended.seconds, 2)}
    row |= describe(ended, Path(request.folder) / TRACE_FILE)
    print(format_row(row), flush=True)
    return row


def make_request(root: Path, model: str) -> Request:
    return Request(
        probe=model,
        folder=str(root / model),
        task=Task(script=ScriptTask((str(WORKLOAD), model), str(root))),
        device="cpu",
        schedule=Schedule(timed_steps=0),
        arguments={"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH},
        shadow=DEVICE,
    )


def describe(ended: Ended, trace_file: Path) -> dict[str, Any]:
    if ended.reply.outcome is not Outcome.FITS:
        return {
            "failure": describe_failure(ended.reply.failure or Failure("start", None, ended.reply.outcome.value, ""))
        }
    try:
        trace = Trace.load(trace_file)
    except (FileNotFoundError, ValueError) as error:
        return {"failure": describe_failure(Failure("train", None, type(error).__name__, "it left no trace"))}
    missing = PHASES - set(trace.phase_names)
    if missing:
        return {"failure": describe_failure(Failure(min(missing), None, "missing", "the phase was not recorded"))}
    return {"traced": True, "operators": len(trace.op_flops), "allocations": len(trace.sizes)}


def describe_failure(failure: Failure) -> dict[str, Any]:
    needs = re.search(
        r"requires? (?:the )?`?([\w.-]+)`? (?:library|package|to be installed)|No module named '(\w+)'",
        failure.traceback + failure.message,
    )
    told = {"phase": failure.phase, "kind": failure.kind, "message": failure.message[:300]}
    told["where"] = find_places(failure.traceback)
    unknown = re.fullmatch(r"name '(\w+)' is not defined", failure.message)
    if needs is not None:
        told["needs"] = next(group for group in needs.groups() if group)
    elif unknown is not None and unknown.group(1) in NAMES_OF:
        told["needs"] = NAMES_OF[unknown.group(1)]
    return told


def find_places(text: str) -> list[str]:
    """Where the exception passed through code of models, innermost last, and where it was raised, without folders."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    places = [f"{Path(file).name}:{line} {function}" for file, line, function in frames]
    in_models = [place for place, (file, _, _) in zip(places, frames, strict=True) if "/models/" in file]
    return list(dict.fromkeys(in_models[-1:] + places[-1:]))


def _by_task(rows: list[dict[str, Any]]) -> dict[str, str]:
    every, traced = Counter(row["task"] for row in rows), Counter(row["task"] for row in rows if row["traced"])
    return {task: f"{traced[task]} of {every[task]}" for task in MODELS if every[task]}


def format_row(row: dict[str, Any]) -> str:
    if row["traced"]:
        return f"{row['model_type']:30} {row['seconds']:5.1f} s  {row['operators']:6} operators"
    failure = row["failure"]
    needs = f"needs {failure['needs']}: " if "needs" in failure else ""
    where = f" ({'; '.join(failure['where'])})" if failure["where"] else ""
    return (
        f"{row['model_type']:30} {row['seconds']:5.1f} s  {needs}{failure['kind']} in {failure['phase']}: "
        f"{failure['message'][:160]}{where}"
    )


def main() -> int:
    parser = common.make_parser(__doc__, "predict_zoo")
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="only these; default: all")
    options = parser.parse_args()
    unknown = set(options.model_types) - set(all_models())
    if unknown:
        parser.error(f"not in the list: {', '.join(sorted(unknown))}")
    models = tuple(options.model_types) or (QUICK if options.quick else all_models())
    options.quick = options.quick or bool(options.model_types)
    results = measure(models)
    common.write_results(common.results_path(options), results)
    print(f"{results['wall_seconds']:.0f} s in all; by task: {results['by_task']}")
    verdict = common.format_verdict(results["holds"])
    figures = f"{results['traced']} of {results['model_types']} ({results['share']:.1%})"
    print(f"model types that trace: {figures}; at least {LIMIT_SHARE:.0%}: {verdict}")
    return 1 if options.check and not results["holds"] else 0


if __name__ == "__main__":
    sys.exit(main())
