"""What evaluation accumulates, row by row, and what that comes to over the whole evaluation set.

Trainer keeps the outputs of every step and concatenates them to what it has, so that old and new arrays exist at once:
the peak is twice the array. `eval_accumulation_steps` moves what has accumulated to the host, where the same happens
again; `eval_do_concat_batches=False` keeps a list and has no copy. NumPy has no bfloat16, so on the host such outputs
are copies of twice the size. Rows are padded to the longest seen.
"""

from collections.abc import Iterator
from typing import Any

from autofit.records import EvaluationGrowth

# In the order in which Trainer's evaluation loop makes its containers, in all supported versions.
OUTPUTS = ("losses", "predictions", "labels", "inputs")


class AccumulationLog:
    """Counts bytes per row of everything that the evaluation loop stores, by standing in for its container class."""

    def __init__(self, batch: int) -> None:
        """`batch`: rows of one step. Where a row is laid out as two (pairs), both are its own."""
        self._made, self._batch = 0, batch
        self.bytes_per_row: dict[str, float] = {}  # as the device holds them
        self.host_bytes_per_row: dict[str, float] = {}  # as NumPy holds them

    def install(self, trainer_module: Any) -> None:
        """`trainer_module` is `transformers.trainer`, which looks its container class up by name at every evaluation."""
        log, container = self, trainer_module.EvalLoopContainer

        class CountingContainer(container):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.output = OUTPUTS[log._made % len(OUTPUTS)]
                log._made += 1

            def add(self, tensors: Any) -> None:
                log._count(self.output, tensors)
                super().add(tensors)

        trainer_module.EvalLoopContainer = CountingContainer

    def _count(self, output: str, tensors: Any) -> None:
        rows = size = host_size = 0
        for tensor in tensors_in(tensors):
            rows = max(rows, tensor.shape[0] if tensor.dim() else 1)
            size += tensor.numel() * tensor.element_size()
            host_size += tensor.numel() * (4 if str(tensor.dtype) == "torch.bfloat16" else tensor.element_size())
        if rows:
            rows = self._batch if rows % self._batch == 0 else rows
            for known, value in ((self.bytes_per_row, size), (self.host_bytes_per_row, host_size)):
                known[output] = max(known.get(output, 0.0), value / rows)


def project(
    *,
    on_host: bool,
    base_bytes: int,
    first_step_peak: int,
    measured_peak: int,
    outputs: dict[str, float],
    host_outputs: dict[str, float],
    rows_measured: int,
    rows_total: int,
    batch: int,
    accumulation_steps: int | None,
    concatenates: bool,
) -> EvaluationGrowth:
    """Peak of an evaluation over `rows_total` rows, from a few steps of it.

    `base_bytes` is what was in use when evaluation began, `first_step_peak` the highest use in its first step (one batch
    accumulated), `measured_peak` the highest over all measured steps as the budget counts it. `on_host`: the device is
    the CPU, so that device and host arrays share one memory. The projection is linear in rows; what the metrics function
    itself allocates is contained only as far as it was measured.
    """
    per_row, host_per_row = sum(outputs.values()), sum(host_outputs.values())
    step = max(first_step_peak - base_bytes - per_row * min(batch, rows_measured), 0)
    copies = 2 if concatenates else 1
    # What accumulates on the device before it is moved, and what the move makes of it: arrays share the memory of
    # tensors on the CPU, save where they are converted.
    flushed = per_row * min(rows_total, (accumulation_steps or rows_total) * batch)
    whole = host_per_row * rows_total
    converted = sum(size for name, size in host_outputs.items() if size != outputs[name]) * rows_total
    device = base_bytes + max(step + flushed, copies * flushed)
    if not on_host:
        host = whole * (copies if accumulation_steps else 1)
    elif accumulation_steps:
        host = copies * whole
        device = base_bytes + max(step + flushed + whole, copies * whole)
    else:
        host = whole
        device = max(device, base_bytes + flushed + converted)
    return EvaluationGrowth(
        rows_measured=rows_measured,
        rows_total=rows_total,
        device_bytes_per_row=per_row,
        host_bytes_per_row=host_per_row,
        projected_process_bytes=int(max(device, measured_peak)),
        projected_host_bytes=int(host),
        outputs=dict(outputs),
    )


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
