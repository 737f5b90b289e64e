"""Claim: `autofit --help` takes less than 0.3 seconds of processor time.

Measured: user and system seconds of the child that runs it, which a busy machine changes little; the median of 7 runs
after one that fills Python's cache of compiled modules.

    python benchmarks/help_time.py             writes results/help_time.json
    python benchmarks/help_time.py --check     the same, and ends with 1 where the claim does not hold
    python benchmarks/help_time.py --quick     3 runs
"""

import os
import subprocess
import sys
from typing import Any

import common

LIMIT_SECONDS = 0.3
COMMAND = ("-m", "autofit", "--help")


def measure_once() -> float:
    """Processor seconds of one run. Raises RuntimeError where it does not end well."""
    process = subprocess.Popen(
        [sys.executable, *COMMAND], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    message = process.stderr.read().decode(errors="replace").strip()
    _, status, usage = os.wait4(process.pid, 0)
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"`python {' '.join(COMMAND)}` ended with {process.returncode}: {message[-500:]}")
    return usage.ru_utime + usage.ru_stime


def measure(repeats: int) -> dict[str, Any]:
    measure_once()
    seconds = [measure_once() for _ in range(repeats)]
    summary = common.summarize(seconds)
    return {
        "claim": f"`autofit --help` takes less than {LIMIT_SECONDS} s of processor time",
        "holds": summary["median"] < LIMIT_SECONDS,
        "processor_seconds": summary,
        "samples": seconds,
        "machine": common.machine_facts(),
    }


def main() -> int:
    options = common.make_parser(__doc__, "help_time").parse_args()
    results = measure(3 if options.quick else 7)
    common.write_results(common.results_path(options), results)
    figure = common.format_seconds(results["processor_seconds"])
    verdict = common.format_verdict(results["holds"])
    print(f"autofit --help: {figure} of processor time; below {LIMIT_SECONDS} s: {verdict}")
    return 1 if options.check and not results["holds"] else 0


if __name__ == "__main__":
    sys.exit(main())
