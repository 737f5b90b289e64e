"""Whether a logits reduction leaves the workload's metrics as they are, shown on the workload's own function."""

import math
from typing import Any

from autofit.harness import rows
from autofit.harness.data_sets import pick_evaluation_set
from autofit.harness.row_sample import has_rows
from autofit.harness.rules import InvalidProbe

CHECK_BATCHES = 2


def check_same_metrics(trainer: Any, reduction: Any) -> None:
    """Evaluate a few rows with and without `reduction` and compare. Raises InvalidProbe, or what metrics raise."""
    _, dataset = pick_evaluation_set(trainer, [])
    if trainer.compute_metrics is None or dataset is None or not has_rows(dataset):
        return
    batch = trainer.args.per_device_eval_batch_size
    chosen = rows.subset(dataset, rows.RowPlan(dataset).typical(min(len(dataset), CHECK_BATCHES * batch)))
    before = trainer.preprocess_logits_for_metrics
    results = []
    for function in (before, reduction):
        trainer.preprocess_logits_for_metrics = function
        results.append(trainer.evaluate(chosen))
    trainer.preprocess_logits_for_metrics = before
    full, reduced = ({k: v for k, v in r.items() if not k.endswith(_TIMES)} for r in results)
    different = [k for k in full if k not in reduced or not _close(full[k], reduced[k])]
    if different:
        name = different[0]
        raise InvalidProbe(
            "metrics_changed", f"{name} is {full[name]} on full logits and {reduced.get(name)} on reduced ones"
        )


_TIMES = ("_runtime", "_per_second", "_time", "epoch")


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    return a == b
