"""Claim: what a search emits really fits under its budget, and the next batch size of the same settings really does not.

The text classification example is searched under a memory budget. Then it is trained for a few steps by a plain
`Trainer.train()` from the emitted files alone, in a fresh interpreter without the harness's phases, under the same cap (soft
RLIMIT_DATA above the process's state before training). The same with the next larger batch size, accumulation lowered
accordingly, has to run out of memory.

    python benchmarks/emitted_settings.py [--quick] [--check]

Writes results/emitted_settings.json. `--check` exits 1 where the emitted settings run out or the next batch size fits.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, format_verdict, machine_facts, make_parser, results_path, use_one_thread, write_results

import autofit
from autofit.units import format_bytes, parse_bytes

EXAMPLE = ROOT / "examples" / "text_classification.py"
# 16 rows an optimizer step, and less memory than 16 at once would take.
FLAGS = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "8")
BUDGET = "560MB"
QUICK_KNOBS = (
    "precision=fp32",
    "optim=adamw_torch_fused",
    "activation_checkpointing=off",
    "attention=sdpa",
    "per_device_train_batch_size=4,8",
    "per_device_eval_batch_size=8",
)
STEPS = 6

CAPPED_RUN = """
import runpy, sys
import transformers
from autofit.harness.device_meter import CpuMeter
example, budget, *argv = sys.argv[1:]
train, meter = transformers.Trainer.train, CpuMeter()
def capped(trainer, *args, **kwargs):
    meter.enter_training(trainer.model, int(budget))
    train(trainer, *args, **kwargs)
    meter.release()
    print("trained", trainer.state.global_step)
    raise SystemExit(0)
transformers.Trainer.train = capped
sys.argv = [example, *argv]
runpy.run_path(example, run_name="__main__")
"""


def train_capped(arguments: dict, budget_bytes: int) -> dict:
    """Train the example for a few steps under the cap. Returns whether it fitted, and the error where not."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training_args.json"
        short = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": STEPS // 2, "output_dir": folder}
        file.write_text(json.dumps({**arguments, **short}))
        done = subprocess.run(
            [sys.executable, "-c", CAPPED_RUN, str(EXAMPLE), str(budget_bytes), str(file)],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
        )
    fitted = done.returncode == 0 and f"trained {STEPS}" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "Error" in line] or [""]
    return {"fits": fitted, "exit": done.returncode, "error": "" if fitted else lines[-1]}


def main() -> int:
    options = make_parser(__doc__, "emitted_settings").parse_args()
    use_one_thread()
    run = ROOT / "autofit-runs" / "benchmarks" / "emitted-settings"
    shutil.rmtree(run, ignore_errors=True)
    began = time.monotonic()
    knobs = QUICK_KNOBS if options.quick else ()
    result = autofit.search(
        command=("python", str(EXAMPLE), *FLAGS), budget=BUDGET, device="cpu", out=run, max_probes=20, knobs=knobs
    )
    seconds = time.monotonic() - began
    best = result.selection.best.candidate
    arguments = json.loads((run / "best" / "training_args.json").read_text())
    batch = arguments["per_device_train_batch_size"]
    effective = batch * arguments["gradient_accumulation_steps"]
    budget_bytes = parse_bytes(BUDGET)
    emitted = train_capped(arguments, budget_bytes)
    larger = {
        **arguments,
        "per_device_train_batch_size": 2 * batch,
        "gradient_accumulation_steps": effective // (2 * batch),
    }
    next_batch = train_capped(larger, budget_bytes) if 2 * batch <= effective else None
    facts = {
        "budget_bytes": budget_bytes,
        "best": best.values,
        "peak_bytes": result.selection.best.peak_bytes,
        "search_seconds": seconds,
        "emitted": emitted,
        "next_batch": {"per_device_train_batch_size": 2 * batch, **(next_batch or {"fits": None})},
        "machine": machine_facts(),
    }
    write_results(results_path(options), facts)
    holds = emitted["fits"] and next_batch is not None and not next_batch["fits"] and "memory" in next_batch["error"]
    print(f"emitted  batch {batch}: {'fits' if emitted['fits'] else emitted['error']}")
    print(
        f"next     batch {2 * batch}: {'fits' if next_batch and next_batch['fits'] else (next_batch or {}).get('error', 'not there')}"
    )
    print(
        f"emitted settings fit under {format_bytes(budget_bytes, BUDGET[-2:])} and the next batch size does not: {format_verdict(holds)}"
    )
    return 0 if holds or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
