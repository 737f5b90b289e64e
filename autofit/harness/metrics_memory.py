"""What a workload's metrics function takes of host memory, by the row: it is called again on half of what it was given.

A metric whose memory is not linear in rows is not foreseen by it.
"""

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autofit.harness.device_meter import torch_allocations

MOST_SECONDS = 5.0  # of one call: longer ones are not repeated


def bytes_per_row(compute: Callable[[Any], Any], prediction: Any, seconds: float = 0.0) -> float | None:
    """Peak bytes of NumPy, Python and torch within `compute`, for each row beyond half of them. None: not known.

    `prediction` is the `EvalPrediction` that it has seen before, so that what it imports and keeps is there; that call took
    `seconds`.
    """
    rows = _rows(prediction.predictions)
    if not rows or rows < 2 or seconds > MOST_SECONDS:
        return None
    try:
        half = _peak(compute, _first(prediction, rows // 2))
        if half is None:
            return None
        whole = _peak(compute, _first(prediction, rows))
    except Exception:  # noqa: BLE001 - the workload's own function, which may refuse fewer rows; it has run whole before
        return None
    return None if whole is None else max(whole - half, 0) / (rows - rows // 2)


def _peak(compute: Callable[[Any], Any], prediction: Any) -> int | None:
    began = time.perf_counter()
    with _traced() as peak:
        compute(prediction)
    return peak() if time.perf_counter() - began < MOST_SECONDS else None


@contextlib.contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """The context gives a function that tells, after its end, the sum of both peaks."""
    found = 0
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        with torch_allocations() as torch_peak:
            yield lambda: found
            arrays = tracemalloc.get_traced_memory()[1] - before
    finally:
        if mine:
            tracemalloc.stop()
    found = arrays + torch_peak()


def _rows(value: Any) -> int | None:
    if isinstance(value, (tuple, list)):
        return next((rows for rows in map(_rows, value) if rows), None)
    return value.shape[0] if isinstance(value, np.ndarray) and value.ndim else None


def _first(prediction: Any, rows: int) -> Any:
    """The same of the first rows; arrays are views of the whole."""

    def cut(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(cut(item) for item in value)
        return value[:rows] if isinstance(value, np.ndarray) and value.ndim else value

    parts = {"inputs": prediction.inputs, "losses": getattr(prediction, "losses", None)}
    given = {name: cut(value) for name, value in parts.items() if value is not None}
    return type(prediction)(predictions=cut(prediction.predictions), label_ids=cut(prediction.label_ids), **given)
