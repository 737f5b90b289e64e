"""After how many evaluation steps what has accumulated goes to the host: the number that copies least of those that fit.

On a GPU that is about the largest that fits, since the host copies everything that it has at every flush, and slowly. Where
device and host are one memory nothing is freed by it, but two arrays of middle size are copied faster than one large one.
"""

import math
from collections.abc import Sequence

from autofit.harness.evaluation import copy_seconds, device_bytes
from autofit.records import EvaluationGrowth, Measurement

FEW = 256  # numbers of steps, all of which are looked at
SPARE = 0.95  # of the budget: projections are within 5 %


def choose_steps(m: Measurement, batch: int, limit_bytes: int | None, options: Sequence[int] = ()) -> int:
    """The fastest number of steps at `batch` within `limit_bytes` of device memory, by what `m` measured at any batch.

    `limit_bytes` is None where the device is the host. `options`: the only ones there are. At least 1, or the least option,
    also where not even that fits.
    """
    growth, joined = m.growth, concatenates(m)
    most = max(math.ceil(growth.rows_total / batch), 1)
    if limit_bytes is not None:
        most = _most_fitting(m, batch, int(limit_bytes * SPARE), most)
    if options:
        listed = [n for n in options if n <= most] or [min(options)]
    else:
        near = range(1, most + 1) if most <= FEW else {most, *_cheapest(growth, batch)}
        listed = [n for n in near if 1 <= n <= most]
    return min(listed, key=lambda n: (copy_seconds(growth, growth.rows_total, batch, n, joined), -n))


def seconds_with(m: Measurement, steps: int) -> float | None:
    """Of the whole evaluation that `m` timed, if it were flushed after `steps`; None where copies were not measured."""
    growth = m.growth
    if growth is None or not m.eval_seconds or (growth.device_copy_rate is None and growth.host_copy_rate is None):
        return None
    batch = int(m.candidate["per_device_eval_batch_size"])
    copies = copy_seconds(growth, growth.rows_total, batch, steps, concatenates(m))
    return min(m.eval_seconds) - growth.copy_seconds + copies


def concatenates(m: Measurement) -> bool:
    return m.candidate.get("eval_do_concat_batches", True) is not False


def _most_fitting(m: Measurement, batch: int, limit: int, most: int) -> int:
    """The peak rises with the number of steps."""
    if _peak(m, batch, most) <= limit:
        return most
    fits, fails = 1, most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _peak(m, batch, middle) <= limit else (fits, middle)
    return fits


def _peak(m: Measurement, batch: int, steps: int) -> float:
    peak = device_bytes(m.growth, batch, steps, concatenates(m))
    if peak is not None:
        return peak
    # An old journal, or an estimate: beside the highest that was in use everything is there twice.
    measured = m.phase("evaluate")
    held = 0 if measured is None else measured.process_bytes or 0
    return held + 2 * m.growth.device_bytes_per_row * batch * steps


def _cheapest(growth: EvaluationGrowth, batch: int) -> list[int]:
    """Where copies on the device, which grow with the rows between two flushes, and those on the host, which shrink, cost
    the least together: around the root of all rows × batch × what a row costs there over what it costs here."""
    if not growth.device_copy_rate or not growth.host_copy_rate or not growth.device_bytes_per_row:
        return []
    here = growth.device_bytes_per_row / growth.device_copy_rate
    there = growth.host_bytes_per_row / growth.host_copy_rate
    steps = math.sqrt(growth.rows_total * batch * there / here) / batch
    whole = growth.rows_total / batch
    flushes = max(math.floor(whole / steps), 1)  # equal ones: a last one of a few rows costs as much as any other
    return [math.ceil(whole / n) for n in {1, 2, 3, 4, flushes, flushes + 1}]
