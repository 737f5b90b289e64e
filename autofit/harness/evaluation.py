"""What evaluation accumulates, row by row, and what that comes to over the whole evaluation set.

Trainer keeps the outputs of every step in containers of four kinds and concatenates new ones to what each has, so that
old and new arrays of one container exist at once. `eval_accumulation_steps` moves what has accumulated to the host, where
the same happens again; `eval_do_concat_batches=False` keeps a list and has no copy. NumPy has no bfloat16, so on the host
such outputs are copies of twice the size. Rows are padded to the longest seen.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.records import EvaluationGrowth

# In the order in which Trainer's evaluation loop makes its containers, and moves them, in all supported versions.
CONTAINERS = ("losses", "predictions", "labels", "inputs")
# glibc takes blocks of up to 32 MiB from its heap (mallopt(3), M_MMAP_THRESHOLD). An array that grows by copies leaves a hole
# there, which the next one does not fit in, and whose pages stay resident: as much again as the array, or as this.
HOLE_BYTES = 32 * 2**20
ADDED = ("losses", "inputs", "predictions", "labels")  # the order in which it adds to them


class AccumulationLog:
    """Counts bytes per row of everything that the evaluation loop stores, by standing in for its container class."""

    def __init__(self, batch: int, names: Callable[[Any], list[str]] = lambda predictions: ["predictions"]) -> None:
        """`batch`: rows of one step. Where a row is laid out as two (pairs), both are its own. `names`: what a model calls
        the predictions of one step, one name for each element."""
        self._made, self._batch, self._names = 0, batch, names
        self.bytes_per_row: dict[str, float] = {}  # as the device holds them
        self.host_bytes_per_row: dict[str, float] = {}  # as NumPy holds them

    def install(self, trainer_module: Any) -> None:
        """`trainer_module` is `transformers.trainer`, which looks its container class up by name at every evaluation."""
        log, container = self, trainer_module.EvalLoopContainer

        class CountingContainer(container):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.output = CONTAINERS[log._made % len(CONTAINERS)]
                log._made += 1

            def add(self, tensors: Any) -> None:
                log._count(self.output, tensors)
                super().add(tensors)

        trainer_module.EvalLoopContainer = CountingContainer

    def limit(self, rows: int) -> None:
        """There are no more rows than this in all."""
        self._batch = min(self._batch, rows)

    def forget(self) -> None:
        """Begin anew, with an evaluation of another kind."""
        self.bytes_per_row, self.host_bytes_per_row = {}, {}

    def _count(self, container: str, tensors: Any) -> None:
        rows = max((t.shape[0] if t.dim() else 1 for t in tensors_in(tensors)), default=0)
        if not rows:
            return
        # Rows laid out as one (packing without padding) or as several each (pairs, tokens) are a whole batch.
        rows = rows if 1 < rows < self._batch else self._batch
        parts = {container: tensors}
        if container == "predictions":
            names = self._names(tensors)
            parts = dict(zip(names, tensors, strict=True)) if len(names) > 1 else {names[0]: tensors}
        for name, part in parts.items():
            size = host_size = 0
            for tensor in tensors_in(part):
                size += tensor.numel() * tensor.element_size()
                host_size += tensor.numel() * (4 if str(tensor.dtype) == "torch.bfloat16" else tensor.element_size())
            for known, value in ((self.bytes_per_row, size), (self.host_bytes_per_row, host_size)):
                known[name] = max(known.get(name, 0.0), value / rows)


def output_names(keys: list[str] | None, predictions: Any, untouched: bool) -> list[str]:
    """What the elements of `predictions` are called. `keys`: of the model's output, the loss and what it ignores left out;
    `untouched`: nothing has changed their structure since."""
    if not untouched or not keys:
        return ["predictions"]
    if isinstance(predictions, (tuple, list)):
        return keys if len(predictions) == len(keys) > 1 else ["predictions"]
    return keys if len(keys) == 1 else ["predictions"]


@dataclass(frozen=True)
class Kept:
    """What one container keeps of a row: bytes on the device, and as NumPy has them."""

    device: float
    host: float

    @property
    def converted(self) -> bool:
        """Whether the move to NumPy makes a copy even where both are one memory."""
        return self.device != self.host


def project(
    *,
    on_host: bool,
    base_bytes: int,
    first_step_peak: int,
    measured_peak: int,
    outputs: Mapping[str, float],
    host_outputs: Mapping[str, float],
    rows_measured: int,
    rows_total: int,
    batch: int,
    accumulation_steps: int | None,
    concatenates: bool,
    metrics_bytes_per_row: float = 0.0,
    left_bytes: float = 0.0,
    host_level_bytes: int | None = None,
    phase: str = "evaluate",
) -> EvaluationGrowth:
    """Peak of an evaluation over `rows_total` rows, from a few steps of it.

    `base_bytes` is what was in use when evaluation began, `first_step_peak` the highest use in its first step (one batch
    accumulated), `measured_peak` the highest over all measured steps as the budget counts it. `on_host`: the device is
    the CPU, so that device and host arrays share one memory. `metrics_bytes_per_row`: what the metrics function takes
    beside the arrays that it is given. `left_bytes`: on the CPU, what stays resident of a forward when it is done. All of
    it is taken to be linear in rows.
    """
    kept = _containers(outputs, host_outputs)
    per_row, host_per_row = sum(k.device for k in kept.values()), sum(k.host for k in kept.values())
    step = max(first_step_peak - base_bytes - per_row * min(batch, rows_measured), 0)
    window = min(rows_total, (accumulation_steps or rows_total) * batch)
    last = rows_total % window or window
    device = host = 0.0
    left = left_bytes if on_host else 0.0
    for before, rows in {(rows_total - last, last), (max(rows_total - last - window, 0), window)}:
        there = _accumulating(kept, rows, batch, step, concatenates)
        moved, both = _moving(kept, before, rows, batch, concatenates)
        host = max(host, moved)
        device = max(device, max(there + before * host_per_row, both + left) if on_host else there)
    metrics = rows_total * (host_per_row + metrics_bytes_per_row)
    host = max(host, metrics)
    copied = rows_total > (batch if on_host else window)
    holes = sum(min(rows_total * k.host, HOLE_BYTES) for k in kept.values()) if concatenates and copied else 0
    host += holes
    if on_host:
        host = device = max(device, metrics + left) + holes
    return EvaluationGrowth(
        rows_measured=rows_measured,
        rows_total=rows_total,
        device_bytes_per_row=per_row,
        host_bytes_per_row=host_per_row,
        projected_process_bytes=int(max(base_bytes + device, measured_peak)),
        projected_host_bytes=int(host),
        outputs=dict(outputs),
        metrics_bytes_per_row=metrics_bytes_per_row,
        host_level_bytes=host_level_bytes,
        phase=phase,
        base_bytes=base_bytes,
        step_bytes=int(step),
        batch=batch,
    )


def device_bytes(growth: EvaluationGrowth, batch: int, accumulation_steps: int, concatenates: bool) -> int | None:
    """Peak on a device that is not the host, at another batch and number of steps, from what one evaluation measured.

    What one step takes is taken to be linear in its rows. None where an old journal does not tell.
    """
    if growth.base_bytes is None or growth.step_bytes is None or not growth.batch:
        return None
    kept = _containers(growth.outputs, growth.outputs)
    step = growth.step_bytes * batch / growth.batch
    rows = min(growth.rows_total, accumulation_steps * batch)
    return int(growth.base_bytes + _accumulating(kept, rows, batch, step, concatenates))


def copied_rows(rows: int, batch: int, accumulation_steps: int | None, concatenates: bool) -> tuple[int, int]:
    """Rows that an evaluation of `rows` rows copies because arrays cannot grow: (on the device, on the host).

    Times the bytes of a row that is what concatenation writes. On the device every step but the first after a flush writes
    all that has accumulated since, on the host every flush but the first all that there is: `rows` squared over twice
    the rows of a step, or of a flush. `eval_do_concat_batches=False` keeps lists, and copies nothing.
    """
    if not concatenates or rows <= 0:
        return 0, 0
    window = min(rows, (accumulation_steps or rows) * batch)
    flushes, rest = divmod(rows, window)
    on_device = flushes * _sum_of_growing(window, batch) + _sum_of_growing(rest, batch)
    return on_device, _sum_of_growing(rows, window)


def _sum_of_growing(rows: int, step: int) -> int:
    """2 × step + 3 × step + … up to `rows`: what is written when every step but the first makes the array anew."""
    whole, rest = divmod(rows, step)
    written = step * (whole * (whole + 1) // 2 - 1) if whole else 0
    return written + (rows if rest and whole else 0)


def copy_seconds(
    growth: EvaluationGrowth, rows: int, batch: int, accumulation_steps: int | None, concatenates: bool
) -> float:
    """That evaluating `rows` rows takes for the copies of `copied_rows`, at the rates that `growth` tells; 0 without any."""
    on_device, on_host = copied_rows(rows, batch, accumulation_steps, concatenates)
    parts = (
        (on_device * growth.device_bytes_per_row, growth.device_copy_rate),
        (on_host * growth.host_bytes_per_row, growth.host_copy_rate),
    )
    return sum(size / rate for size, rate in parts if rate)


def _containers(outputs: Mapping[str, float], host_outputs: Mapping[str, float]) -> dict[str, Kept]:
    """By container: all that is neither losses, labels nor inputs are predictions, concatenated as one."""
    found = {}
    for container in CONTAINERS:
        names = [n for n in outputs if (n if n in CONTAINERS else "predictions") == container]
        found[container] = Kept(sum(outputs[n] for n in names), sum(host_outputs[n] for n in names))
    return found


def _accumulating(kept: Mapping[str, Kept], rows: int, batch: int, step: float, concatenates: bool) -> float:
    """Highest bytes on the device while `rows` accumulate there; `step` is what one forward takes beside its outputs.

    The variables of the loop hold the last batch until the next one is there.
    """
    whole = sum(k.device for k in kept.values())
    if rows <= batch or not concatenates:
        return rows * whole + step
    peak = (rows + batch) * whole + step
    held = (rows - batch) * whole + batch * whole
    for name in ADDED:
        peak = max(peak, held + rows * kept[name].device)
        held += batch * kept[name].device  # the new array in place of the old one
    return peak


def _moving(kept: Mapping[str, Kept], before: int, rows: int, batch: int, concatenates: bool) -> tuple[float, float]:
    """Highest bytes while `rows` move to the host, which holds `before` of them: there, and where both are one memory.

    One container moves after the other. Where both are one memory, an array is the tensor that it was made of, unless it
    was converted or copied; what is released then may still be held by the variables of the loop.
    """
    copies = concatenates and before > 0
    apart = concatenates and rows > batch  # the variables' tensors are no part of the containers'
    variables = min(batch, rows)
    peak_host = peak_both = 0.0
    for at in range(len(CONTAINERS)):
        host = both = 0.0
        for place, name in enumerate(CONTAINERS):
            one = kept[name]
            there, tensors = before * one.host, rows * one.device
            released = copies or one.converted
            held = variables * one.device if apart else 0.0
            if place < at:
                host += there + rows * one.host
                both += there + rows * one.host if released else there + tensors
                held = variables * one.device if released else held
            else:
                host, both = host + there, both + there + tensors
            if place == at:
                copied = (before + rows) * one.host if copies else 0.0
                host += rows * one.host + copied
                both += (rows * one.host if one.converted else 0.0) + copied
            both += held
        peak_host, peak_both = max(peak_host, host), max(peak_both, both)
    return peak_host, peak_both


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor of nested dicts, lists and tuples."""
    if hasattr(value, "element_size"):
        yield value
    elif hasattr(value, "values"):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
