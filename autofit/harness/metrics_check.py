"""Whether metrics stay as they are under a logits reduction, or when the metrics function receives something else.

Shown on the workload's own metrics function, with the workload's own evaluation.

Metrics of an untrained model on a few rows are poor evidence: where nothing is right, nothing changes. So they are
compared on what the model gave and on scores that are made up: drawn at random, two labels of three the most likely
class in place or one place ahead (as causal models have it), and labels of whole rows going through all classes.

Where a function takes the highest score by itself, no reduction leaves it alone; whether that is all that it takes is
seen by giving it scores of 1 and 0 that have the same class on top.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autofit.failure import classify_exception, exception_chain
from autofit.harness.recorded_evaluation import (
    CannotRecord,
    NothingKept,
    RecordedEvaluation,
    free_memory,
    record_evaluation,
)
from autofit.harness.rules import InvalidProbe
from autofit.logits import REDUCTIONS, SHAPES, CannotReduceError, find_scores
from autofit.records import METRICS_FIELDS, KnobValue, Outcome
from autofit.trainer_args import metrics_field, metrics_values
from autofit.units import format_bytes

WORTH_TELLING_BYTES = 2**20  # of the whole set's outputs: below, nothing is gained by any reduction
MOST_CHANGED_BYTES = 2**28  # of scores that are made up for a batch
PLANTED = 2 / 3  # of labels have the highest score where scores are made up
TOLERANCE = 1e-4  # of sums in another order


@dataclasses.dataclass(frozen=True)
class MetricsCheck:
    """What may be done about the outputs of an evaluation."""

    reductions: tuple[str, ...]  # "full" first, then those that leave metrics as they are, the fewest bytes first
    forms: dict[str, tuple[KnobValue, ...]] = dataclasses.field(default_factory=dict)  # as `Description.metrics_forms`
    notes: tuple[str, ...] = ()


class _Changed(Exception):
    """Metrics are others, or cannot be computed."""


def check_metrics(trainer: Any, eval_rows: int | None, forms: bool = False) -> MetricsCheck:
    """Try every reduction, and with `forms` every other value of the fields that change what a metrics function receives.

    Nothing is left changed on the trainer, and nothing is raised: what the script's own code raises, or for want of
    memory, is told in a note. `eval_rows`: of the whole evaluation set; None: not known.
    """
    args = trainer.args
    fields = {name: getattr(args, name) for name in METRICS_FIELDS if hasattr(args, name)} if forms else {}
    own = {name: (value,) for name, value in metrics_values(fields).items()}
    if args.prediction_loss_only or getattr(args, "batch_eval_metrics", False):
        return MetricsCheck(("full",), own)  # nothing accumulates
    notes: list[str] = []
    reduces = trainer.preprocess_logits_for_metrics is None
    if reduces and getattr(args, "predict_with_generate", False):
        reduces = False
        notes.append("logits reductions do not apply: predictions are generated tokens already")
    reductions = ("full",)
    if reduces or forms:
        try:
            recorded = record_evaluation(trainer)
            before = _Before(recorded)
            if reduces:
                reductions, told = _check_reductions(recorded, before, eval_rows)
                notes += told
            if forms:
                own, told = _check_forms(trainer, before, own)
                notes += told
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code runs here, and its fault is the answer
            what = "logits reductions" if reduces else "--allow code: other things to give to compute_metrics"
            notes.append(f"{what} are not offered: {_explain(error, args.device.type)}")
        recorded = before = None
        free_memory()
    return MetricsCheck(reductions, own, tuple(notes))


def check_same_metrics(
    trainer: Any, reduction: Callable[[Any, Any], Any] | None, own: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """The same for one reduction and the fields as they are set now, `own` being what the script has them at.

    Raises InvalidProbe, or what metrics raise on what the model itself gives.
    """
    if trainer.compute_metrics is None:
        return
    try:
        recorded = record_evaluation(trainer, own)
    except NothingKept:
        return  # there is nothing to reduce
    except CannotRecord as error:
        raise InvalidProbe("not_shown", f"whether metrics stay the same was not seen: {error}") from error
    try:
        _Before(recorded, own).compare(reduction)
    except CannotReduceError as error:
        raise InvalidProbe("cannot_reduce", str(error).removeprefix("cannot_reduce: ")) from error
    except _Changed as error:
        raise InvalidProbe("metrics_changed", str(error)) from error
    finally:
        del recorded
        free_memory()


REDUCED = ("on full logits", "on reduced ones", "on reduced logits")  # as sentences say before, after, and after alone


SURE = 20.0  # times the scores: a softmax over 500 classes is then above 0.99 for most rows


class _Before:
    """Metrics of the workload as it is, of what the model gave and of planted labels."""

    def __init__(self, recorded: RecordedEvaluation, own: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`own`: fields that are set to something else now."""
        self._recorded, self._own = recorded, own
        self._changes: list[Callable[[Any, Any], tuple[Any, Any]] | None] = [None]
        with contextlib.suppress(CannotReduceError):
            for logits, labels in recorded.batches:
                plant(logits, labels, 0)
            self._changes += [functools.partial(plant, seed=0), functools.partial(plant, seed=1, ahead=True)]
            self._changes.append(functools.partial(plant, seed=2, sharp=SURE))
        self.names: tuple[str, ...] = ()  # of all metrics
        self._known = [self._steady(change) for change in self._changes]

    def _steady(self, change: Any) -> dict[str, Any]:
        """Metrics that are the same when they are computed again; all of one that cannot be computed are none."""
        try:
            first, second = (self._recorded.metrics(change=change, arguments=self._own) for _ in range(2))
        except Exception:
            if change is None:
                raise
            return {}  # made-up labels, which the function need not take
        self.names = self.names or tuple(map(_plain, first))
        return {k: v for k, v in first.items() if k in second and is_same(v, second[k])}

    def compare(
        self,
        reduction: Callable[[Any, Any], Any] | None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        words: tuple[str, str, str] = REDUCED,
    ) -> None:
        """Raises CannotReduceError, or _Changed where metrics are others, with the reason in the user's words."""
        shown = not self.names  # where there are no metrics, none is lost
        before, after, alone = words
        for change, known in zip(self._changes, self._known, strict=True):
            if not known and self.names:
                continue
            try:
                found = self._recorded.metrics(reduction, change, arguments)
            except CannotReduceError:
                raise
            except (Exception, SystemExit) as error:  # of the metrics function, on what it does not know
                raise _Changed(f"{alone} compute_metrics raises {_in_a_line(error)}") from error
            for name, value in known.items():
                if name not in found:
                    raise _Changed(f"{_plain(name)} is {_number(value)} {before} and missing {after}")
                if not is_same(value, found[name]):
                    raise _Changed(f"{_plain(name)} is {_number(value)} {before} and {_number(found[name])} {after}")
                shown = shown or not _is_nan(value)
        if not shown:
            raise _Changed("none of its metrics is a number twice on these rows, so that nothing is shown")


def _check_reductions(
    recorded: RecordedEvaluation, before: _Before, eval_rows: int | None
) -> tuple[tuple[str, ...], list[str]]:
    """(reductions as in `MetricsCheck`, notes).

    Not spoken of are those that keep more than one that was accepted, or that could be with a word less in the script.
    """
    full = recorded.bytes_per_row()
    kept: dict[str, float] = {}
    refused: dict[str, tuple[float, str]] = {}
    structure = ""
    for name, reduction in REDUCTIONS.items():
        try:
            size = recorded.bytes_per_row(reduction)
            if size < full:
                before.compare(reduction)
                kept[name] = size
        except CannotReduceError as error:
            structure = structure or str(error)
        except _Changed as error:
            refused[name] = size, str(error)
        except Exception as error:  # noqa: BLE001 - of the workload's metrics on this form; told, and the others are tried
            refused[name] = full, f"{type(error).__name__}: {error}"
    reductions = ("full", *sorted(kept, key=kept.__getitem__))
    notes: list[str] = []
    if eval_rows is not None and full * eval_rows < WORTH_TELLING_BYTES:
        return reductions, notes
    if not kept and not refused and structure:
        notes.append(f"logits reductions are not offered: {structure}")
    for name in ("argmax", "dense_argmax"):
        if name in refused and _takes_highest(recorded, before, name):
            size, why = refused[name]
            return reductions, [
                *notes,
                f"logits reduction {name} is not offered: {why}",
                _tell_option(name, full, size, eval_rows),
            ]
    reasons: dict[str, list[str]] = {}
    for name, (size, why) in refused.items():
        if size < min(kept.values(), default=math.inf):
            reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        what = f"reduction {names[0]} is" if len(names) == 1 else f"reductions {', '.join(names)} are"
        notes.append(f"logits {what} not offered: {why}")
    return reductions, notes


def _check_forms(
    trainer: Any, before: _Before, own: dict[str, tuple[KnobValue, ...]]
) -> tuple[dict[str, tuple], list[str]]:
    """(values as in `MetricsCheck`, notes) of each field whose own value may be changed to something that takes less."""
    found, notes = {}, []
    for name, (value,) in own.items():
        kept = [value]
        for other in _lesser(name, value):
            field = metrics_field(name, other)
            words = ("as it is", f"with {name}={field!r}", "with it")
            try:
                if name == "batch_eval_metrics" and not _takes_batches(trainer.compute_metrics):
                    raise _Changed("compute_metrics takes no compute_result, by which it is told of the last batch")
                before.compare(None, {name: field}, words)
                kept.append(other)
            except _Changed as error:
                if name == "prediction_loss_only":
                    notes.append(f"{name} is never offered: evaluation would give no {', '.join(before.names)}")
                else:
                    notes.append(f"{name}={field!r} is not offered: {error}")
        found[name] = tuple(kept)
    return found, notes


def _takes_batches(function: Any) -> bool:
    """What the Trainer itself asks of a function that is given one batch after the other."""
    try:
        return "compute_result" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has none
        return False


def _lesser(name: str, value: KnobValue) -> list[KnobValue]:
    """Other values with which evaluation keeps less, the least first."""
    if name == "include_for_metrics":
        names = str(value).split("+")
        return [None, *(dict.fromkeys("+".join(n for n in names if n != left) for left in names) if names[1:] else ())]
    least = name != "eval_do_concat_batches"
    return [] if value is least else [least]


def _tell_option(name: str, full: float, reduced: float, rows: int | None) -> str:
    whole = (
        ""
        if rows is None
        else f", {format_bytes(round(full * rows))} of {rows} rows down to {format_bytes(round(reduced * rows))}"
    )
    return (
        f"logits: compute_metrics takes nothing but the class with the highest score (seen on your rows). Have it take "
        f"predictions as they are, without its argmax, and give the Trainer preprocess_logits_for_metrics=autofit.logits.{name}: "
        f"evaluation then keeps {format_bytes(round(reduced))} per row in place of {format_bytes(round(full))}{whole}"
    )


def _takes_highest(recorded: RecordedEvaluation, before: _Before, name: str) -> bool:
    """Whether metrics are the same where all but the class on top is taken from the scores."""

    def on_top(logits: Any, labels: Any) -> Any:
        dense = name == "dense_argmax"
        path, scores = find_scores(logits, labels, SHAPES["pixels" if dense else "classes"])
        classes = REDUCTIONS[name](logits, labels).long()
        count = scores.shape[1 if dense else -1]
        if classes.numel() * count * scores.element_size() > MOST_CHANGED_BYTES:
            raise CannotReduceError("too large to be made up")
        ones = torch.nn.functional.one_hot(classes, count).to(scores.dtype)
        return _with_part(logits, path, ones.movedim(-1, 1) if dense else ones)

    try:
        before.compare(on_top)
    except (CannotReduceError, _Changed):
        return False
    return True


# ---- scores that are made up ----


def plant(logits: Any, labels: Any, seed: int, ahead: bool = False, sharp: float = 1.0) -> tuple[Any, Any]:
    """The outputs with scores drawn at random, of which two labels of three have the highest, and labels that go through
    the classes where each row has one. `ahead`: a label's is the position before it, as in causal models. `sharp`: times
    which scores are larger, as those of a model that is sure of itself. Raises CannotReduceError where it is not known which part of the outputs is the scores."""
    try:
        path, scores = find_scores(logits, labels, SHAPES["classes"])
        axis = scores.dim() - 1
    except CannotReduceError:
        path, scores = find_scores(logits, labels, SHAPES["pixels"])
        axis = 1
    chance = torch.Generator().manual_seed(seed)
    classes = scores.shape[axis]
    if labels.dim() == 1:
        labels = (torch.arange(len(labels)) % classes).to(labels.dtype)
    targets = labels.long()
    if axis == 1 and scores.dim() > 2:
        targets = torch.nn.functional.interpolate(targets[:, None].float(), size=scores.shape[2:])[:, 0].long()
    elif ahead and labels.dim() > 1:
        targets = targets.roll(-1, dims=-1)
    drawn = torch.randn(scores.shape, generator=chance)
    counted = (targets >= 0) & (targets < classes) & (torch.rand(targets.shape, generator=chance) < PLANTED)
    index = torch.where(counted, targets, 0).unsqueeze(axis)
    highest = drawn.amax(dim=axis, keepdim=True) + 0.5 + torch.rand(index.shape, generator=chance)
    raised = torch.where(counted.unsqueeze(axis), highest, drawn.gather(axis, index))
    return _with_part(logits, path, (sharp * drawn.scatter(axis, index, raised)).to(scores.dtype)), labels


def _with_part(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """The same structure with another tensor at `path`."""
    if not path:
        return part
    key, rest = path[0], path[1:]
    if isinstance(value, (list, tuple)):
        items = [_with_part(item, rest, part) if index == key else item for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return type(value)({k: _with_part(item, rest, part) if k == key else item for k, item in value.items()})


# ---- comparing and telling ----


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a metric are, up to the order of summation. What is no number twice is."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if hasattr(a, "tolist") and hasattr(b, "tolist"):
        a, b = a.tolist(), b.tolist()
        return is_same(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _plain(name: str) -> str:
    return name.removeprefix("eval_")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def _in_a_line(error: BaseException) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


def _explain(error: BaseException, device: str) -> str:
    if isinstance(error, CannotRecord):
        return str(error)
    verdict = classify_exception(exception_chain(error), device=device, free_share=None, capped=False)
    if verdict.outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM):
        return f"evaluating a few rows ran out of memory ({_in_a_line(error)})"
    return f"evaluation of a few rows fails ({_in_a_line(error)})"
