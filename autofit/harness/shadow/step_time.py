"""Seconds that a step would take on a device, from the operators of its trace: good for ranking, not for telling.

Against nine published configurations of bert-large on a V100 the formula ranked 35 of 36 pairs as measured; its
seconds were 0.9 to 1.6 of the measured ones. So it may order candidates whose predictions differ by more than 10 %,
and probes correct it.

Not here: data loading, communication between devices, kernels that run at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autofit.catalog.gpus import Gpu

# Of its peak rate and of its bandwidth, what a good kernel of a training step reaches.
RATE_SHARE = 0.7
BANDWIDTH_SHARE = 0.8
# A kernel waits at least this long for the host in a Trainer loop: 19 to 26 microseconds were measured, with autograd,
# autocast, hooks and Python; bare launches take 6.
LAUNCH_SECONDS = 22e-6


@dataclass(frozen=True)
class Rates:
    """Peaks of a device, in floating-point operations and bytes per second."""

    fp32_flops: float
    tf32_flops: float | None  # None: fp32 is never rounded to tf32
    half_flops: float  # bf16 and fp16; whether the device has bf16 at this rate is the caller's to know
    bandwidth_bytes: float
    launch_seconds: float  # of the host, for each kernel


# Some cores of a common machine. Only the order of what comes from it means anything, and that roughly: arithmetic in
# 16 bits is no faster, less traffic is.
CPU_RATES = Rates(
    fp32_flops=2e11, tf32_flops=None, half_flops=2e11, bandwidth_bytes=2e10, launch_seconds=LAUNCH_SECONDS
)


def gpu_rates(gpu: Gpu) -> Rates:
    return Rates(
        fp32_flops=gpu.fp32_flops,
        tf32_flops=gpu.tf32_flops,
        half_flops=gpu.half_flops,
        bandwidth_bytes=gpu.bandwidth_bytes,
        launch_seconds=LAUNCH_SECONDS,
    )


def step_seconds(
    flops: ArrayLike,
    bytes: ArrayLike,
    kinds: ArrayLike,
    kind_names: Sequence[str],
    rates: Rates,
    tf32: bool,
    kernels: ArrayLike | None = None,
) -> float:
    """The larger of what the device computes and what the host launches, which run side by side.

    device = Σ over operators of max(flops / (0.7 rate), bytes / (0.8 bandwidth)); host = launch seconds × kernels.

    One element per operator: its operations, the bytes it moves, its kind as an index into `kind_names`
    (`matmul_fp32`, `matmul_half`, `other`), and how many kernels it starts, one unless given. `tf32`: whether matrix
    products of fp32 are rounded to tf32; without effect where the device has none. Raises ValueError for a kind that
    has no rate.
    """
    matmul_fp32 = rates.tf32_flops if tf32 and rates.tf32_flops is not None else rates.fp32_flops
    rate_of = {"matmul_fp32": matmul_fp32, "matmul_half": rates.half_flops, "other": rates.fp32_flops}
    unknown = [name for name in kind_names if name not in rate_of]
    if unknown:
        raise ValueError(f"no rate for operators of kind {', '.join(unknown)}; kinds are {', '.join(rate_of)}")
    flops = np.asarray(flops, dtype=np.float64)
    peaks = np.array([rate_of[name] for name in kind_names], dtype=np.float64)[np.asarray(kinds, dtype=np.int64)]
    moving = np.asarray(bytes, dtype=np.float64) / (BANDWIDTH_SHARE * rates.bandwidth_bytes)
    device = np.maximum(flops / (RATE_SHARE * peaks), moving).sum()
    launches = flops.size if kernels is None else np.asarray(kernels).sum()
    return float(max(device, rates.launch_seconds * launches))
