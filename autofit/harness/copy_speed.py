"""How fast this machine copies what evaluation has accumulated: torch's concatenation on the device, NumPy's on the host.

A small array is put behind a large one, as the evaluation loop does it. From some tens of MB on the rate no longer changes:
the result is new memory at every turn, which on the host is touched for the first time.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autofit.extrapolation import EvaluationGrowth, Speed
from autofit.harness.evaluation import copied_rows, copy_seconds

MOST_BYTES = 48 * 2**20  # above what malloc takes from its heap (32 MiB), so that new memory is new to the process
LEAST_BYTES = 2**20
TURNS = 3
SLOWEST = {"cpu": 5e8, "cuda": 5e10}  # bytes per second: where copies come to little even so, they are not measured
LITTLE = 0.02  # of the whole evaluation


def with_copies(
    growth: EvaluationGrowth,
    timed: Speed,
    accumulation_steps: int | None,
    concatenates: bool,
    device: torch.device,
    synchronize: Callable[[], None],
) -> EvaluationGrowth:
    """`growth` with what copies take in the timed evaluation and in that of the whole set, at this machine's rates.

    Takes up to 100 MB on the host and on the device, so it is called when all peaks have been read.
    """
    on_device, on_host = copied_rows(growth.rows_total, growth.batch or 1, accumulation_steps, concatenates)
    device_bytes, host_bytes = on_device * growth.device_bytes_per_row, on_host * growth.host_bytes_per_row
    slowest = device_bytes / SLOWEST.get(device.type, SLOWEST["cpu"]) + host_bytes / SLOWEST["cpu"]
    linear = statistics.median(timed.seconds) * growth.rows_total / timed.rows
    if slowest < LITTLE * linear:
        return growth
    # Each array is as large as what has accumulated, up to all; of what is written, two thirds of that are the middle.
    rows = growth.rows_total * 2 / 3
    held = min(rows, (accumulation_steps or growth.rows_total) * (growth.batch or 1) * 2 / 3)
    rated = dataclasses.replace(
        growth,
        device_copy_rate=device_rate(int(held * growth.device_bytes_per_row), device, synchronize),
        host_copy_rate=host_rate(int(rows * growth.host_bytes_per_row)),
    )
    whole, few = (
        copy_seconds(rated, rows, growth.batch or 1, accumulation_steps, concatenates)
        for rows in (growth.rows_total, timed.rows)
    )
    return dataclasses.replace(rated, copy_seconds=whole, timed_copy_seconds=few)


def host_rate(size: int) -> float:
    """Bytes per second that `np.concatenate` writes for an array of about `size` bytes. Takes two of them, and 0.1 s."""
    array = np.zeros(_bounded(size) // 4, np.float32)
    array.fill(1.0)
    return _rate(lambda: np.concatenate((array, array[:1024])), lambda: None)


def device_rate(size: int, device: Any, synchronize: Callable[[], None]) -> float:
    """The same of `torch.cat` on `device`, synchronised at the edges of each turn."""
    tensor = torch.ones(_bounded(size) // 4, device=device)
    return _rate(lambda: torch.cat((tensor, tensor[:1024])), synchronize)


def _bounded(size: int) -> int:
    return min(max(size, LEAST_BYTES), MOST_BYTES)


def _rate(concatenate: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    seconds, size = [], 0
    for _ in range(TURNS + 1):
        synchronize()
        began = time.perf_counter()
        size = concatenate().nbytes
        synchronize()
        seconds.append(max(time.perf_counter() - began, 1e-9))
    return size / statistics.median(seconds[1:])  # the first turn warms up
