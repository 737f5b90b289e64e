"""Claim: a probe from the warm server costs at least 5 times less before its first step than one in a fresh interpreter.

A fresh interpreter imports torch and transformers for every probe; the server has imported them once, with what the
workload itself imports, and forks. Measured, in one run and in turn, so that both see the same machine: the catalog's
MiniLM (text classification, rows of 64 tokens, effective batch 8) on the CPU, one thread in each child, 5 probes each
way, for every one of them

    before       seconds from the request to the beginning of the first optimizer step, as the child's progress tells
    first step   seconds from the request to the end of that step, which takes equally long both ways
    overhead     seconds from the request to the child's end, less what it spent in optimizer steps and evaluations

The claim is about the first. Ratios are those of the medians; ranges are the lowest and the highest. What the server
itself costs, once, is told too.

    python benchmarks/probe_overhead.py             about a minute; writes results/probe_overhead.json
    python benchmarks/probe_overhead.py --check     the same, and ends with 1 where the claim does not hold
    python benchmarks/probe_overhead.py --quick     2 probes each way
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import common

from autofit.launch import Launcher
from autofit.machine import read_machine
from autofit.records import Outcome, Request, Schedule

LIMIT_RATIO = 5.0
WAYS = ("fresh", "fork")
PROBE = Schedule(timed_steps=0)  # worst-case steps and evaluation; how long a probe measures is not asked here
TIME_LIMIT = 120.0
FIGURES = {"before_first_step": "before the first step", "first_step": "first step done", "overhead": "overhead"}


def measure(repeats: int) -> dict[str, Any]:
    common.use_one_thread()
    machine = read_machine("cpu")
    task = common.model_task("all-MiniLM-L6-v2", seq_len=64, effective_batch=8, eval_rows=64)
    with tempfile.TemporaryDirectory() as root, Launcher(machine) as launcher:
        requests = common.Requests(Path(root), "cpu")
        modules = warm(launcher, requests.make(task, Schedule(describe_only=True)))
        samples = [
            measure_once(launcher, requests.make(task, PROBE, batch=8), how) for how in common.in_turn(WAYS, repeats)
        ]
        import_seconds = launcher.import_seconds
    ways, ratios = common.compare_ways(samples, WAYS, FIGURES)
    return {
        "claim": f"a probe from the warm server costs at least {LIMIT_RATIO:.0f} times less before its first step",
        "holds": ratios["before_first_step"] >= LIMIT_RATIO,
        "ratios": ratios,
        "seconds": ways,
        "server_import_seconds": import_seconds,
        "server_modules": modules,
        "threads": 1,
        "samples": samples,
        "machine": common.machine_facts(machine),
    }


def warm(launcher: Launcher, request: Request) -> int:
    """Have the server import what every workload needs, then what this one imported. Returns how many modules that is."""
    launcher.warm()
    described = launcher.probe(request, how="fork", time_limit=TIME_LIMIT).reply
    if described.description is None:
        raise RuntimeError(f"the workload could not be described: {described.failure}")
    launcher.warm(described.description.modules)
    return len(described.description.modules)


def measure_once(launcher: Launcher, request: Request, how: str) -> dict[str, Any]:
    """Raises RuntimeError for a probe that did not run to its end, whose times would say nothing."""
    ended = launcher.probe(request, how=how, time_limit=TIME_LIMIT)
    reply = ended.reply
    if reply.outcome is not Outcome.FITS or reply.first_step_seconds is None:
        raise RuntimeError(f"a {how} probe ended with {reply.outcome.value}: {reply.failure}")
    return {
        "how": how,
        "before_first_step_seconds": common.first_step_seconds(request),
        "first_step_seconds": reply.first_step_seconds,
        "overhead_seconds": ended.seconds - reply.measured_seconds,
        "seconds": ended.seconds,
        "waited_seconds": reply.delay_seconds,  # of its threads, for a processor
    }


def print_table(results: dict[str, Any]) -> None:
    common.print_ways(results, FIGURES)
    print(f"the server's own imports, once: {results['server_import_seconds']:.1f} s")


def main() -> int:
    options = common.make_parser(__doc__, "probe_overhead").parse_args()
    results = measure(2 if options.quick else 5)
    common.write_results(common.results_path(options), results)
    print_table(results)
    verdict = common.format_verdict(results["holds"])
    ratio = common.format_ratio(results["ratios"]["before_first_step"])
    print(f"fresh / fork before the first step: {ratio}; at least {LIMIT_RATIO:.0f}×: {verdict}")
    return 1 if options.check and not results["holds"] else 0


if __name__ == "__main__":
    sys.exit(main())
