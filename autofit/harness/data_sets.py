"""Which rows a probe takes: the training set and one evaluation set, or what the script's own loaders make of them."""

from typing import Any

from autofit.harness import rows
from autofit.harness.row_sample import buffered, has_rows, largest_set
from autofit.harness.row_sizes import Reader

EVAL_STEPS = 4  # of a measured evaluation
BUFFERED_ROWS = 500  # of an iterable set


def pick_training_set(trainer: Any, notes: list[str], sample: int | None = None) -> Any:
    """The training set, its rows to be asked for by index and read as far as a plan of them needs: of an iterable one
    the first rows.

    `sample`: so many rows are read, as the first process has chosen; None: as many as the bounds allow. What was cut,
    which sizes were found, and whether the script has a loader of its own, is said in `notes`. A set that the script's
    own loader runs over is left as it is.
    """
    dataset = trainer.train_dataset
    if has_own_train_loader(trainer):
        notes.append("rows: the script makes its own training loader, whose order is kept")
        return dataset
    if dataset is None:  # the training says so in Trainer's words
        return None
    if not has_rows(dataset):
        dataset = buffered(dataset, max(BUFFERED_ROWS, 4 * effective_batch(trainer)), sample)
        notes.append(f"rows: the first {len(dataset)} of an iterable data set")
    if not len(dataset):
        return dataset
    plan = rows.RowPlan(dataset, sample=sample, reader=Reader.of(trainer))
    if plan.told():
        notes.append(f"rows: {plan.told()}")
    return plan.dataset


def pick_evaluation_set(trainer: Any, notes: list[str], sample: int | None = None) -> tuple[str | None, Any]:
    """The evaluation set, its rows to be asked for by index; of several the one with the most rows, and its name.

    None where there is none, or no rows in it. `sample` as for `pick_training_set`. What was chosen or cut, which sizes
    were found, and whether the script has a loader of its own, is said in `notes`. A set that the script's own loader
    runs over is left as it is.
    """
    name, dataset = largest_set(trainer.eval_dataset)
    if name is not None:
        notes.append(f"evaluation: {name}, the largest of {len(trainer.eval_dataset)} sets")
    if dataset is None:
        return name, None
    if has_own_eval_loader(trainer):
        if has_rows(dataset) and not len(dataset):
            return name, None
        notes.append(
            "evaluation: the script makes its own loader, which runs over everything; it is measured, not tuned"
        )
        return name, dataset
    if not has_rows(dataset):
        dataset = buffered(dataset, max(BUFFERED_ROWS, EVAL_STEPS * trainer.args.eval_batch_size), sample)
        notes.append(
            f"evaluation: the first {len(dataset)} rows of an iterable data set; the projection covers only these"
        )
    if not len(dataset):
        return name, None
    plan = rows.RowPlan(dataset, sample=sample, reader=Reader.of(trainer))
    if plan.told():
        notes.append(f"evaluation: {plan.told()}")
    return name, plan.dataset


def has_own_train_loader(trainer: Any) -> bool:
    """Whether the script decides by itself which rows are trained on and in which batches."""
    return _overrides(trainer, "get_train_dataloader")


def has_own_eval_loader(trainer: Any) -> bool:
    """Whether the script decides by itself which rows are evaluated and in which batches."""
    return _overrides(trainer, "get_eval_dataloader")


def has_own_test_loader(trainer: Any) -> bool:
    """Whether the script decides by itself which rows are predicted and in which batches."""
    return _overrides(trainer, "get_test_dataloader")


def effective_batch(trainer: Any) -> int:
    """Rows of one optimizer step."""
    return trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps


def _overrides(trainer: Any, method: str) -> bool:
    """Whether a subclass outside transformers has its own `method`."""
    return not getattr(type(trainer), method).__module__.startswith("transformers.")
