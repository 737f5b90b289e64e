"""Claim: a probe never holds more of the device than its budget, and one that would need more runs out of memory.

Measured on the first CUDA device with bert-base-uncased (text classification in float32, rows of 128 tokens, effective
batch 64), for budgets of 8, 16 and 24 GB, each with two probes: one that should fit, one of longer rows and a larger batch
that should run out. What the child counts (the peak that torch reserved, and the context) stands beside what NVML tells of
the device meanwhile, read from outside every 20 ms. Before them a canary shows whether a fork of the warm server can use
the device; where it cannot, the probes start fresh, and that is told. Nobody else may use the device.

Three further parts hold predictions against measurements, ten configurations each (`acceptance/predictions.py`): live and reserved
bytes in training, live bytes in evaluation; median at most 1 %, worst 5 %.

Every part is written to results/gpu_acceptance.json as soon as it is done, and a rerun on the same machine skips it. Ends
with 0 when all parts hold, 1 when one does not, 2 where there is no CUDA device.

    python benchmarks/gpu_acceptance.py                          budgets: at most three minutes
    python benchmarks/gpu_acceptance.py --part predictions-1     … -2, -3: at most four minutes each
    python benchmarks/gpu_acceptance.py --again                  measures finished parts again
    python benchmarks/gpu_acceptance.py --quick                  the smallest budget only
    python benchmarks/gpu_acceptance.py --device cpu --quick     the same code with MiniLM and small budgets, no result
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from acceptance import predictions

from autofit.codec import decode
from autofit.errors import DeviceError
from autofit.launch import Ended, Launcher
from autofit.machine import Nvml, read_machine
from autofit.records import Machine, Outcome, Reply, Request, Schedule, digest
from autofit.units import format_bytes, parse_bytes

EXIT_HOLDS, EXIT_FAILS, EXIT_NO_DEVICE = 0, 1, 2
PROBE = Schedule(timed_steps=10, timed_seconds=1.0)
CANARY = Schedule(timed_steps=0, evaluate=False)
TIME_LIMIT = 120.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Shape:
    batch: int  # rows per device and step
    effective_batch: int
    seq_len: int


@dataclass(frozen=True)
class Part:
    model: str
    budget: str
    fits: Shape
    runs_out: Shape


# By the usual count of bytes for training in float32 (16 for a parameter, about 80 MB for a row of 128 tokens), the first
# shape takes half to two thirds of its budget, and the second, of more than 40 GB, exceeds all of them.
CUDA_PARTS = tuple(
    Part("bert-base-uncased", budget, Shape(batch, 64, 128), Shape(128, 128, 512))
    for budget, batch in (("8GB", 32), ("16GB", 64), ("24GB", 64))
)
CPU_PARTS = tuple(
    Part("all-MiniLM-L6-v2", budget, Shape(batch, 8, 64), Shape(64, 64, 256))
    for budget, batch in (("600MB", 4), ("1.2GB", 8))
)


class Witness:
    """What NVML tells of the device while a probe runs, read in a thread; None throughout where nobody answers.

    `used_growth` is the growth of what all processes hold; `process_bytes` what is listed for processes that were not there
    before, None where NVML lists none (in a container it may not).
    """

    def __init__(self, nvml: Nvml | None, device_id: str | None) -> None:
        self._nvml, self._device_id = nvml if device_id is not None else None, device_id
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.used_growth: int | None = None
        self.process_bytes: int | None = None

    def __enter__(self) -> "Witness":
        if self._nvml is not None:
            self._used_before = self._nvml.used_bytes(self._device_id)
            self._known = {pid for pid, _ in self._nvml.processes(self._device_id) or ()}
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            self._stop.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            used = self._nvml.used_bytes(self._device_id)
            if used is not None and self._used_before is not None:
                self.used_growth = max(self.used_growth or 0, used - self._used_before)
            new = [held for pid, held in self._nvml.processes(self._device_id) or () if pid not in self._known]
            if new and None not in new:
                self.process_bytes = max(self.process_bytes or 0, sum(new))

    @property
    def seen_bytes(self) -> int | None:
        return self.used_growth if self.process_bytes is None else self.process_bytes


class Bench:
    """Probes on one machine, each way that its server allows."""

    def __init__(self, machine: Machine, root: Path, launcher: Launcher) -> None:
        self._machine, self._launcher = machine, launcher
        self._nvml = Nvml.open() if machine.device_id is not None else None
        self._requests = common.Requests(root, machine.device)

    def meet(self, part: Part) -> dict[str, Any]:
        """Warm the server and run the canary, after which the launcher knows whether it may fork."""
        began = time.monotonic()
        self._launcher.warm()
        request = self._request(part, part.fits, CANARY, None)
        trusted = self._launcher.trust(request)
        path = Path(request.folder) / "reply.json"
        reply = decode(path.read_bytes(), Reply, path) if path.exists() else None
        return {
            "fork_is_used": self._launcher.can_fork,
            "trusted": trusted,
            "canary_ran": Path(request.folder).exists(),  # on the CPU none is needed
            "outcome": None if reply is None else reply.outcome.value,
            "failure": describe_failure(reply),
            "server_import_seconds": self._launcher.import_seconds,
            "seconds": time.monotonic() - began,
        }

    def measure(self, part: Part) -> dict[str, Any]:
        began = time.monotonic()
        budget = parse_bytes(part.budget)
        fits, runs_out = (self._probe(part, shape, budget) for shape in (part.fits, part.runs_out))
        checks = {
            "the first probe fits": fits["outcome"] == Outcome.FITS.value,
            "the second runs out of device memory": runs_out["outcome"] == Outcome.DEVICE_OOM.value,
            "the budget is enforced": fits["cap"] == runs_out["cap"] == "enforced",
            "its peak is known": fits["process_bytes"] is not None,
        }
        for name, probe in (("first", fits), ("second", runs_out)):
            for source in ("process_bytes", "seen_bytes"):
                if probe[source] is not None:
                    checks[f"the {name} stays within the budget, by its {source}"] = probe[source] <= budget
        return {
            "holds": all(checks.values()),
            "budget_bytes": budget,
            "checks": checks,
            "fits": fits,
            "runs_out": runs_out,
            "seconds": time.monotonic() - began,
        }

    def _request(self, part: Part, shape: Shape, schedule: Schedule, budget_bytes: int | None) -> Request:
        task = common.model_task(
            part.model, seq_len=shape.seq_len, effective_batch=shape.effective_batch, eval_rows=256
        )
        return self._requests.make(task, schedule, batch=shape.batch, budget_bytes=budget_bytes)

    def _probe(self, part: Part, shape: Shape, budget_bytes: int) -> dict[str, Any]:
        how = "fork" if self._launcher.can_fork else "fresh"
        request = self._request(part, shape, PROBE, budget_bytes)
        with Witness(self._nvml, self._machine.device_id) as witness:
            ended = self._launcher.probe(request, how=how, time_limit=TIME_LIMIT)
        if ended.reply.failure is not None and ended.reply.outcome is not Outcome.DEVICE_OOM:
            print(ended.reply.failure.traceback[-2000:], file=sys.stderr)
        return {"shape": asdict(shape), "start": how, **read_ended(ended), **read_witness(witness, ended)}


def read_ended(ended: Ended) -> dict[str, Any]:
    reply = ended.reply
    return {
        "outcome": reply.outcome.value,
        "failure": describe_failure(reply),
        "cap": reply.cap,
        "context_bytes": reply.context_bytes,
        "reserved_bytes": highest(reply, "reserved_bytes"),
        "process_bytes": highest(reply, "process_bytes"),
        "phases": {
            phase.name: {"reserved_bytes": phase.reserved_bytes, "process_bytes": phase.process_bytes}
            for phase in reply.phases
        },
        "host_bytes": ended.host_bytes,
        "rows_per_second": None if reply.train_speed is None else reply.train_speed.per_second,
        "first_step_seconds": reply.first_step_seconds,
        "seconds": ended.seconds,
    }


def read_witness(witness: Witness, ended: Ended) -> dict[str, Any]:
    counted, seen = highest(ended.reply, "process_bytes"), witness.seen_bytes
    return {
        "seen_bytes": seen,
        "seen_process_bytes": witness.process_bytes,
        "seen_used_growth_bytes": witness.used_growth,
        "seen_beyond_counted_bytes": None if counted is None or seen is None else seen - counted,
    }


def highest(reply: Reply, name: str) -> int | None:
    return max((held for held in (getattr(phase, name) for phase in reply.phases) if held is not None), default=None)


def describe_failure(reply: Reply | None) -> str | None:
    """Without the traceback, whose paths are the machine's own."""
    if reply is None or reply.failure is None:
        return None
    return f"{reply.failure.kind} in {reply.failure.phase}: {reply.failure.message}"


def read_results(path: Path, identity: str) -> dict[str, Any]:
    """What an earlier run of the same on the same machine has left; empty where there is none, or it is damaged."""
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return there if isinstance(there, dict) and there.get("identity") == identity else {}


def print_part(name: str, part: dict[str, Any]) -> None:
    print(f"{name}: {common.format_verdict(part['holds'])} ({part['seconds']:.0f} s)")
    for kind in ("fits", "runs_out"):
        probe = part[kind]
        sizes = [format_bytes(probe[k], like="GB") for k in ("reserved_bytes", "context_bytes", "seen_bytes")]
        print(
            f"  {probe['shape']['batch']} × {probe['shape']['seq_len']} tokens, {probe['start']}: {probe['outcome']}; "
            f"reserved {sizes[0]}, context {sizes[1]}, seen from outside {sizes[2]}; {probe['seconds']:.1f} s"
        )
    for check in (check for check, holds in part["checks"].items() if not holds):
        print(f"  not so: {check}")


def run(machine: Machine, parts: tuple[Part, ...], path: Path, again: bool) -> dict[str, Any]:
    """Measure what is not finished yet, each part written when it is done."""
    identity = digest([machine.key, machine.device_id, [asdict(part) for part in parts]])
    earlier = {} if again else read_results(path, identity)
    finished = earlier.get("parts", {})
    results = {
        "claim": "a probe holds no more of the device than its budget, and one that would need more runs out of memory",
        "holds": None,
        "identity": identity,
        "machine": common.machine_facts(machine),
        "server": earlier.get("server"),
        "parts": finished,
        **{name: earlier[name] for name in ("predictions", "prediction_errors") if name in earlier},
    }
    left = [part for part in parts if part.budget not in finished]
    if left:
        with tempfile.TemporaryDirectory() as root, Launcher(machine) as launcher:
            bench = Bench(machine, Path(root), launcher)
            results["server"] = bench.meet(left[0])
            for part in left:
                finished[part.budget] = bench.measure(part)
                common.write_results(path, results)
    for part in parts:
        print_part(part.budget + (" (finished before)" if part not in left else ""), finished[part.budget])
    results["holds"] = all(part["holds"] for part in finished.values())
    return results


def compare(machine: Machine, parts: tuple[Part, ...], path: Path, options: argparse.Namespace) -> int:
    """One part of the predictions; on the CPU, to try the script, its first configuration."""
    identity = digest([machine.key, machine.device_id, [asdict(part) for part in parts]])
    results = read_results(path, identity) or {
        "identity": identity,
        "machine": common.machine_facts(machine),
        "parts": {},
    }
    if options.again:
        results.pop("predictions", None)
    chosen = predictions.PARTS[options.part][: 1 if options.quick else None]
    predictions.run_part(options.part, machine, results, lambda told: common.write_results(path, told), chosen)
    summary = predictions.summarize(results["predictions"])
    for counter in predictions.CHECKED:
        if counter in summary:
            told = summary[counter]
            print(f"{counter}: median {told['median']:.2%}, worst {told['worst']:.2%} of {told['count']}")
    print(f"{summary['configurations']} configurations predicted: {common.format_verdict(summary['holds'])}")
    return EXIT_HOLDS if summary["holds"] else EXIT_FAILS


def parse(argv: list[str]) -> argparse.Namespace:
    parser = common.make_parser(__doc__, "gpu_acceptance")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N, or cpu to try the script")
    parser.add_argument("--part", choices=("budgets", *predictions.PARTS), default="budgets")
    parser.add_argument("--again", action="store_true", help="measure finished parts again")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        machine = read_machine(options.device)
    except DeviceError as error:
        print(f"gpu_acceptance was not run: {error}")
        return EXIT_NO_DEVICE
    path = common.results_path(options)
    if machine.device == "cpu":
        common.use_one_thread()
        parts = CPU_PARTS
        path = options.out or common.ROOT / "autofit-runs/benchmarks/cpu_acceptance.json"
    else:
        parts = CUDA_PARTS[:1] if options.quick else CUDA_PARTS
    if options.part != "budgets":
        return compare(machine, parts, path, options)
    results = run(machine, parts, path, options.again)
    common.write_results(path, results)
    told = sum(part["holds"] for part in results["parts"].values())
    print(f"{told} of {len(parts)} budgets: {common.format_verdict(results['holds'])}")
    return EXIT_HOLDS if results["holds"] else EXIT_FAILS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
