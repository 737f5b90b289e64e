"""A few rows of the workload's own evaluation, whose outputs are given again as often as they are asked for.

The model runs once. After that the Trainer's whole `evaluate` runs again (its loop, containers and concatenation, what
subclasses make of it, the metrics function) on what the model gave, with something changed: a reduction of logits, a
field of the arguments, other scores. So whatever the installed Trainer does with outputs is its own.

The rows are short ones, and as few as keep their outputs small; they make two batches, the second one smaller, of rows
of other lengths where there are any. Nothing of it is left on the Trainer: callbacks of the script do not hear of it, and
random numbers go on as if nothing had been drawn.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import DefaultFlowCallback

from autofit.harness import rows
from autofit.harness.data_sets import pick_evaluation_set
from autofit.harness.divided_batch import restored, seeded
from autofit.harness.evaluation import tensors_in
from autofit.machine import available_host_bytes

ROWS = 15  # in two batches, the second smaller
MOST_BYTES = 64 * 2**20  # that outputs of a batch should come to
HOST_COPIES = 12  # of the outputs of two rows: kept, concatenated, changed, and what metrics make of them
LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")  # of the Accelerator, which evaluation adds to

Change = Callable[[Any, Any], tuple[Any, Any]]  # (logits, labels) of a batch -> others


class CannotRecord(Exception):
    """This workload's evaluation has no outputs that could be given again."""


class NothingKept(CannotRecord):
    """Evaluation keeps nothing of what the model puts out."""


class RecordedEvaluation:
    """The outputs of `prediction_step` for a few rows of the evaluation set, which must have rows."""

    def __init__(self, trainer: Any, dataset: Any, name: str | None, own: Mapping[str, Any]) -> None:
        """Run the model. `dataset` and `name` are those of `pick_evaluation_set`, `own` are fields to set meanwhile.
        Raises CannotRecord, or whatever the script's evaluation raises."""
        self._trainer, self._dataset, self._name, self._own = trainer, dataset, name, own
        self.batches: list[tuple[Any, Any]] = []  # (logits, labels) as the model gave them, on the CPU
        self._losses: list[Any] = []
        order = _shortest_first(dataset)
        with _without_metrics(trainer):
            self._record(order[:1], 1)
        held = self.bytes_per_row()
        available = available_host_bytes()
        if available is not None and HOST_COPIES * 2 * held > available:
            raise CannotRecord("the scores of two rows and what is made of them do not fit into host memory")
        count = min(ROWS, max(2, int(2 * MOST_BYTES / max(held, 1))), len(order))
        if count > 1:
            with _without_metrics(trainer):
                self._record(_spread(order, count), (count + 1) // 2)

    def bytes_per_row(self, reduction: Callable[[Any, Any], Any] | None = None) -> float:
        """Bytes that the Trainer keeps of the model's outputs for each row, labels and losses not counted."""
        size = 0
        for logits, labels in self.batches:
            kept = logits if reduction is None else reduction(logits, labels)
            size += sum(t.numel() * t.element_size() for t in tensors_in(kept))
        return size / self._rows

    def metrics(
        self,
        reduction: Callable[[Any, Any], Any] | None = None,
        change: Change | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What the metrics function gives for the recorded outputs, by the names that `evaluate` gives it.

        `reduction` stands for the workload's own `preprocess_logits_for_metrics`, `change` is made to the outputs
        before, `arguments` are fields to set. Raises whatever the metrics function or the reduction raises.
        """
        given = iter(zip(self.batches, self._losses, strict=True))

        def replay(model: Any, inputs: Any, prediction_loss_only: bool, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
            (logits, labels), loss = next(given)
            if change is not None:
                logits, labels = change(logits, labels)
            logits, labels, loss = (_mapped(part, self._to_device) for part in (logits, labels, loss))
            return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

        reductions = {} if reduction is None else {"preprocess_logits_for_metrics": reduction}
        found = self._evaluate({"prediction_step": replay, **reductions}, arguments or {})
        return {k: v for k, v in found.items() if k not in self._given}

    # ---- running ----

    def _record(self, indices: list[int], batch: int) -> None:
        original = self._trainer.prediction_step
        self.batches, self._losses = [], []
        self._indices, self._batch, self._rows = indices, batch, len(indices)

        def record(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
            loss, logits, labels = original(*args, **kwargs)
            self.batches.append((_mapped(logits, _to_host), _mapped(labels, _to_host)))
            self._losses.append(_mapped(loss, _to_host))
            return loss, logits, labels

        without = self._evaluate({"prediction_step": record}, self._own)
        self._given = {*without, "epoch"}  # what no metrics function has made
        if not self.batches:
            raise CannotRecord("the script's own evaluate() makes no prediction step")
        if any(logits is None for logits, _ in self.batches):
            raise NothingKept("evaluation keeps no outputs")

    def _evaluate(self, attributes: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        chosen = rows.subset(self._dataset, self._indices)
        with _undisturbed(trainer):
            settings = {
                "per_device_eval_batch_size": self._batch,
                "dataloader_num_workers": 0,
                "dataloader_persistent_workers": False,
                "dataloader_prefetch_factor": None,
                "dataloader_drop_last": False,
                **arguments,
            }
            for name, value in settings.items():
                setattr(trainer.args, name, value)
            for name, value in attributes.items():
                setattr(trainer, name, value)
            trainer.eval_dataset = chosen if self._name is None else {self._name: chosen}
            return dict(trainer.evaluate())

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, so that a metrics function that writes into what it is given leaves the record as it is."""
        return tensor.to(self._trainer.args.device, copy=True)


def record_evaluation(trainer: Any, own: Mapping[str, Any] = MappingProxyType({})) -> RecordedEvaluation:
    """Of the set that a probe would evaluate, with the fields of `own`. Raises CannotRecord, or whatever the script's
    evaluation raises."""
    name, dataset = pick_evaluation_set(trainer, [])
    if dataset is None or not len(dataset):
        raise NothingKept("there is no evaluation set")
    return RecordedEvaluation(trainer, dataset, name, own)


def free_memory() -> None:
    from accelerate.utils.memory import clear_device_cache

    gc.collect()
    with contextlib.suppress(RuntimeError):  # it is the device's own state that failed; the next use of it tells
        clear_device_cache()


@contextlib.contextmanager
def _without_metrics(trainer: Any) -> Iterator[None]:
    """Metrics are asked for, so that outputs are kept, and none are computed; nor are outputs reduced."""
    with restored(trainer):
        trainer.compute_metrics = lambda *_, **__: {}
        trainer.preprocess_logits_for_metrics = None
        yield


@contextlib.contextmanager
def _undisturbed(trainer: Any) -> Iterator[None]:
    """Evaluation inside leaves the trainer, its model, its random numbers and its accelerator as they were."""
    lists = [getattr(trainer.accelerator, name) for name in LISTS if hasattr(trainer.accelerator, name)]
    loaders = getattr(trainer.accelerator.gradient_state, "_dataloader_references_ref", None)
    lists += [loaders] if isinstance(loaders, list) else []
    before = [list(entries) for entries in lists]
    with (
        restored(trainer),
        restored(trainer.args),
        restored(trainer.callback_handler),
        restored(trainer.model, but=("training",)),  # autocast is wrapped around `forward`
        torch.compiler.set_stance("force_eager"),
        seeded(trainer, 0),
    ):
        trainer.state, trainer.control = copy.copy(trainer.state), copy.copy(trainer.control)
        trainer.state.log_history = list(trainer.state.log_history)
        trainer.is_in_train = True  # else the weights themselves are cast for `bf16_full_eval`
        trainer.callback_handler.callbacks = [DefaultFlowCallback()]
        try:
            yield
        finally:
            for entries, known in zip(lists, before, strict=True):
                entries[:] = known


def _shortest_first(dataset: Any) -> list[int]:
    """Rows that were looked at, the longer half of them left out where there are many."""
    plan = rows.RowPlan(dataset)
    ordered = list(dict.fromkeys(plan.longest(plan.sampled)))[::-1]
    return ordered[: max(len(ordered) // 2, ROWS)]


def _spread(order: list[int], count: int) -> list[int]:
    """`count` of them evenly, in their order."""
    count = min(count, len(order))
    return [order[(2 * k + 1) * len(order) // (2 * count)] for k in range(count)]


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({key: _mapped(item, change) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
