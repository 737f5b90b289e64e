"""Evaluation in the schedule: the worst-case rows, which decide memory, and timed passes over typical ones.

It runs inside the Trainer's training, on top of its optimizer state, with the workload's own metrics. `predict()` is gone
through by itself where the workload calls it; text is generated to its full length where memory is measured.
"""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import TrainerCallback

from autofit.harness import metrics_memory, rows
from autofit.harness.copy_speed import with_copies
from autofit.harness.data_sets import EVAL_STEPS, has_own_eval_loader, has_own_test_loader, pick_evaluation_set
from autofit.harness.device_meter import DeviceMeter
from autofit.harness.evaluation import AccumulationLog, output_names, project
from autofit.harness.leaks import LeakWatch
from autofit.harness.recorder import Recorder
from autofit.machine import run_delay_seconds, tree_bytes
from autofit.records import EvaluationGrowth, PhaseRecord, Schedule, Speed

EVALUATE = "evaluate"
WORTH_TELLING_BYTES = 16 * 2**20  # that accumulate over the whole set
OURS = ("logits", "predictions", "labels", "losses", "inputs")  # all else is put out by the model beside its scores
NOTABLE = 0.1  # of the scores' size
UNSEEN = (
    "evaluation: nothing that the Trainer keeps was seen, though there are metrics; what a loop of the script's own keeps is "
    "not projected to the whole set"
)
UNKNOWN_METRICS = "metrics: what they take beside their arguments is not known, and not in the projection"
CACHES = (
    "past_key_values",
    "cache",
)  # what Trainer ignores where a configuration says nothing, in one version or another
REPEATED_SECONDS = 5.0  # that an evaluation may take which is made again, to see what it keeps


class EvaluationPhases(TrainerCallback):
    """What `Phases` does of evaluation. It drives the Trainer, keeps phases, and gives the schedule its turns."""

    # What `Phases` gives.
    steps: int
    _phase: str
    _open: Callable[[str], float]
    _close: Callable[[str, float], PhaseRecord]

    def __init__(
        self, trainer: Any, schedule: Schedule, meter: DeviceMeter, recorder: Recorder, eval_rows: int
    ) -> None:
        self.eval_speed: Speed | None = None
        self.growth: EvaluationGrowth | None = None
        self.notes: list[str] = []
        self.leaks = LeakWatch(meter)
        self.measured_seconds = 0.0
        self._trainer, self._schedule, self._meter, self._recorder = trainer, schedule, meter, recorder
        self._eval_rows_timed = eval_rows
        self._first_prediction_peak: int | None = None
        self._accumulated = AccumulationLog(trainer.args.eval_batch_size, self._names)
        self._held: list[int] = []  # bytes in use at the end of each prediction step
        self._output_keys: list[str] | None = None  # of the model's last output
        self._compute_metrics = trainer.compute_metrics
        self._evaluated: Any = None  # the data set of the last evaluation
        self._again: list[tuple[int, Any]] = []  # (rows, data set) that can be evaluated again, the longest first
        self._again_seconds = 0.0
        self._watching = False  # memory is measured
        self._given: Any = None  # what the metrics function was called with last, while it was
        self._given_seconds = 0.0  # that this call took
        self._metrics_seconds = 0.0  # in the metrics function so far
        self._copied: EvaluationGrowth | None = None  # of `evaluate()`, whatever `predict()` takes

    def attach_evaluation(self) -> None:
        """Choose the rows, and listen to what accumulates."""
        import transformers.trainer

        trainer = self._trainer
        self._accumulated.install(transformers.trainer)
        self._eval_name, self._eval_set = pick_evaluation_set(trainer, self.notes, self._schedule.sampled_eval_rows)
        self._own_eval_loader = has_own_eval_loader(trainer)
        if self._eval_set is not None and not self._own_eval_loader:
            self._accumulated.limit(len(self._eval_set))
        if trainer.compute_metrics is not None:
            self._wrap("compute_metrics", self._metrics)
        # The best metric may be that of a set that is not evaluated here, and nothing is chosen by it.
        trainer._determine_best_metric = lambda *args, **kwargs: False

    def _wrap(self, name: str, around: Any) -> None:
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    @property
    def _evaluates(self) -> bool:
        return self._schedule.evaluate and self._eval_set is not None

    # ---- listening ----

    def _metrics(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.at("metrics", self.steps)
        began = time.perf_counter()
        result = original(*args, **kwargs)
        seconds = time.perf_counter() - began
        self._metrics_seconds += seconds
        self._recorder.at(self._phase, self.steps)
        if self._watching and args and not kwargs:  # else nothing of it must stay alive
            self._given, self._given_seconds = args[0], seconds
        return result

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._first_prediction_peak is None:
            self._first_prediction_peak = self._meter.held_peak()
        self._held.append(self._meter.held_bytes())

    def _see_output(self, model: Any, _: Any, output: Any) -> None:
        """What the model calls the parts that Trainer keeps: all but the loss and what its configuration says to ignore."""
        if not isinstance(output, Mapping):
            self._output_keys = None
            return
        config = getattr(self._trainer.model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", CACHES)
        self._output_keys = [key for key in output if key != "loss" and key not in ignored]

    def _names(self, predictions: Any) -> list[str]:
        trainer = self._trainer
        generates = getattr(trainer.args, "predict_with_generate", False)
        untouched = trainer.preprocess_logits_for_metrics is None and not generates
        return output_names(self._output_keys, predictions, untouched)

    # ---- memory ----

    def _worst_case_evaluation(self) -> Iterator[str]:
        trainer = self._trainer
        if self._own_eval_loader:  # what it takes is not known, so it takes everything, and nothing is left to project
            whole = trainer.eval_dataset if self._eval_name is None else trainer.eval_dataset[self._eval_name]
            began = self._open("evaluate")
            yield from self._evaluation(whole)
            self._may_repeat([(1, whole)], self._close("evaluate", began))  # one whole set
            return
        with self._watched():
            base, level = self._level()
            began = self._open("evaluate")
            longest = self._longest_rows()
            yield from self._evaluation(longest)
            record = self._close("evaluate", began)
        if self._first_prediction_peak is None:
            self.notes.append(
                "evaluation: the script's own evaluate() makes no prediction step; it is run, not measured"
            )
            return
        if self._compute_metrics is not None and not set(self._accumulated.bytes_per_row) - {"losses"}:
            self.notes.append(UNSEEN)
        self._may_repeat([(len(longest), longest)], record)
        self.growth = self._copied = self._project(base, level, record)
        if self._schedule.predict:
            self._predict()
        if self.growth.host_bytes_per_row * self.growth.rows_total >= WORTH_TELLING_BYTES:
            self.notes.append(kept_sentence(self.growth))

    def _predict(self) -> None:
        """`predict()` on the same rows: the rows of the test set are not known before it is called."""
        if has_own_test_loader(self._trainer):
            self.notes.append("predict: the script makes its own loader, which is not known here; it is not measured")
            return
        self.notes.append(
            "predict: the script calls it behind its training; it is measured on rows of the evaluation set"
        )
        self._accumulated.forget()
        self._first_prediction_peak = None
        with self._watched():
            base, level = self._level()
            began = self._open("predict")
            self._trainer.predict(self._longest_rows())
            record = self._close("predict", began)
        growth = self._project(base, level, record)
        if growth.projected_process_bytes + growth.projected_host_bytes > (
            self.growth.projected_process_bytes + self.growth.projected_host_bytes
        ):
            self.growth = growth

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """While memory is measured: names of what the model puts out are seen, and generation goes to its full length."""
        self._held.clear()
        self._watching = True
        hook = self._trainer.model.register_forward_hook(self._see_output)
        try:
            with self._full_length():
                yield
        finally:
            hook.remove()
            self._watching = False

    @contextlib.contextmanager
    def _full_length(self) -> Iterator[None]:
        if not getattr(self._trainer.args, "predict_with_generate", False):
            yield
            return
        model = self._trainer.model
        original, own = model.generate, vars(model).get("generate")  # the script may have set one of its own
        bound = getattr(original, "keywords", {})  # of a partial function

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._recorder.at("generate", self.steps)
            result = original(*args, **{**kwargs, **full_length({**bound, **kwargs}, model.generation_config)})
            self._recorder.at(self._phase, self.steps)
            return result

        model.generate = generate
        try:
            yield
        finally:
            if own is None:
                del model.generate
            else:
                model.generate = own

    def _level(self) -> tuple[int, int]:
        """What is in use on the device, and resident of the process tree, before an evaluation."""
        self._meter.settle()
        return self._meter.held_bytes(), tree_bytes(os.getpid())

    def _longest_rows(self) -> Any:
        batch = self._trainer.args.eval_batch_size
        plan = self._plan_rows(self._eval_set)
        return rows.subset(self._eval_set, plan.longest(self._rows_evaluated(batch, plan.total), batch))

    def _project(self, base: int, level: int, record: PhaseRecord) -> EvaluationGrowth:
        arguments = self._trainer.args
        batch, total = arguments.eval_batch_size, self._plan_rows(self._eval_set).total
        return project(
            on_host=self._meter.name == "cpu",
            base_bytes=base,
            first_step_peak=self._first_prediction_peak or base,
            measured_peak=record.process_bytes or 0,
            outputs=self._accumulated.bytes_per_row,
            host_outputs=self._accumulated.host_bytes_per_row,
            rows_measured=self._rows_evaluated(batch, total),
            rows_total=total,
            batch=batch,
            # Trainer's loop moves nothing to the host where metrics are computed batch by batch.
            accumulation_steps=None if arguments.batch_eval_metrics else arguments.eval_accumulation_steps,
            concatenates=arguments.eval_do_concat_batches,
            metrics_bytes_per_row=self._metrics_bytes_per_row(),
            left_bytes=self._left_bytes(base, batch),
            host_level_bytes=level,
            phase=record.name,
        )

    def _left_bytes(self, base: int, batch: int) -> float:
        """What is in use behind the prediction steps beside what was there before and what has accumulated since.

        The variables of the loop hold the last batch, which is another copy from the second step on.
        """
        per_batch = batch * sum(self._accumulated.bytes_per_row.values())
        apart = self._trainer.args.eval_do_concat_batches
        kept = [(step + 1 + (step > 0 and apart)) * per_batch for step in range(len(self._held))]
        left = [held - base - size for held, size in zip(self._held, kept, strict=True)]
        return max((*left, 0))

    def _metrics_bytes_per_row(self) -> float:
        """Looked for when the peak has been read: it takes memory by itself. Zero where it is not known."""
        given, self._given = self._given, None
        if given is None or not self._trainer.args.eval_do_concat_batches:
            return 0.0
        self._recorder.at("metrics", self.steps)
        found = metrics_memory.bytes_per_row(self._compute_metrics, given, self._given_seconds)
        self._recorder.at(self._phase, self.steps)
        if found is None and UNKNOWN_METRICS not in self.notes:
            self.notes.append(UNKNOWN_METRICS)
        return found or 0.0

    def _rows_evaluated(self, batch: int, total: int) -> int:
        return min(EVAL_STEPS * batch, total)

    def _plan_rows(self, dataset: Any) -> rows.RowPlan:
        return rows.RowPlan(dataset, self._schedule.seed)  # read when it was picked

    # ---- what it keeps ----

    def _may_repeat(self, again: list[tuple[int, Any]], record: PhaseRecord) -> None:
        self._again, self._again_seconds = again, record.seconds
        self.leaks.evaluation_ended(again[0][0])

    def _repeated_evaluation(self) -> Iterator[str]:
        """The same rows again, where none have been evaluated twice yet; and once more where each keeps something."""
        if not self._again:
            return
        count, longest = self._again[0]
        total = 1 if self._own_eval_loader else self._plan_rows(self._eval_set).total
        self._watching = not self._own_eval_loader  # as at the first reading, what metrics are given is held
        self._phase = "evaluate"
        self._recorder.at("evaluate", self.steps)
        quick = self._again_seconds <= REPEATED_SECONDS or self._schedule.save
        if not self.leaks.evaluated_twice and quick:
            yield from self._evaluation(longest)
            self.leaks.evaluation_ended(count)
        if self.leaks.suspects_evaluations(total):
            chosen = list(self._again)
            if count > 1:
                chosen.append((count // 2, rows.subset(longest, list(range(count // 2)))))
            turns = [(n, functools.partial(self._evaluation, dataset)) for n, dataset in chosen for _ in range(3)]
            yield from self.leaks.confirm_evaluations(turns, total)
        self._watching, self._given = False, None

    # ---- time ----

    def _timed_evaluation(self) -> Iterator[str]:
        plan = self._plan_rows(self._eval_set)
        order = plan.typical(min(plan.total, self._eval_rows_timed))
        chosen = rows.subset(self._eval_set, plan.cycled(order, self._eval_rows_timed))
        self._phase = "evaluate"
        self._recorder.at("evaluate", self.steps, timed=True)
        delay_before, seconds, metrics_before = run_delay_seconds(), [], self._metrics_seconds
        while len(seconds) < 3 and sum(seconds) < self._schedule.timed_seconds / 2:
            self._meter.synchronize()
            began = time.perf_counter()
            yield from self._evaluation(chosen)
            self._meter.synchronize()
            seconds.append(time.perf_counter() - began)
            self.leaks.evaluation_ended(self._eval_rows_timed)
        delay = delay_share(delay_before, run_delay_seconds(), sum(seconds))
        self.eval_speed = Speed(self._eval_rows_timed, tuple(seconds), delay)
        if self._compute_metrics is not None:
            each = (self._metrics_seconds - metrics_before) / len(seconds)
            self.growth = dataclasses.replace(self.growth, metrics_seconds=each)

    def _measure_copies(self) -> None:
        """What evaluation copies of all its rows, which the timed ones do not show. Takes memory by itself."""
        if self.eval_speed is None or self._copied is None:
            return
        arguments = self._trainer.args
        flush, joined = arguments.eval_accumulation_steps, arguments.eval_do_concat_batches
        copied = with_copies(self._copied, self.eval_speed, flush, joined, arguments.device, self._meter.synchronize)
        names = ("copy_seconds", "timed_copy_seconds", "device_copy_rate", "host_copy_rate")
        self.growth = dataclasses.replace(self.growth, **{name: getattr(copied, name) for name in names})

    def _evaluation(self, dataset: Any) -> Iterator[str]:
        trainer = self._trainer
        whole = trainer.eval_dataset
        trainer.eval_dataset = dataset if self._eval_name is None else {self._eval_name: dataset}
        if dataset is not self._evaluated:
            self._evaluated = dataset
            forget_loaders(trainer)
        began = time.perf_counter()
        yield EVALUATE
        self.measured_seconds += time.perf_counter() - began
        trainer.eval_dataset = whole


def forget_loaders(trainer: Any) -> None:
    """End the evaluation loaders that Trainer keeps for later where workers persist: another data set is to be evaluated."""
    kept = getattr(trainer, "_eval_dataloaders", {})
    for loader in kept.values():
        workers = getattr(loader, "_iterator", None)
        if hasattr(workers, "_shutdown_workers"):
            workers._shutdown_workers()
        prepared = trainer.accelerator._dataloaders
        prepared[:] = [other for other in prepared if other is not loader]
    kept.clear()


def delay_share(before: float | None, after: float | None, seconds: float) -> float | None:
    """Share of `seconds` that threads waited for a processor; None where nobody tells."""
    if before is None or after is None or not seconds or math.isnan(seconds):
        return None
    return (after - before) / seconds


def kept_sentence(growth: EvaluationGrowth) -> str:
    """Everything that accumulates, the most first, by its name."""
    parts = sorted(growth.outputs.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {size:.0f} bytes" for name, size in parts)
    whole = int(growth.host_bytes_per_row * growth.rows_total)
    what = "predict()" if growth.phase == "predict" else "evaluation"
    text = f"{what} keeps {whole} bytes of {growth.rows_total} rows; of each row {listed}"
    taken = int(growth.metrics_bytes_per_row * growth.rows_total)
    if taken >= WORTH_TELLING_BYTES:
        text += f"; metrics take {taken} bytes beside them"
    scores = max((size for name, size in parts if name in ("logits", "predictions")), default=0.0)
    others = [name for name, size in parts if name not in OURS and size > NOTABLE * scores]
    if others:
        text += f"; {', '.join(others)} are not needed where autofit.logits.first keeps the scores alone"
    return text


def full_length(given: Mapping[str, Any], config: Any) -> dict[str, int]:
    """What keeps `generate`, called with `given`, from ending before its longest output. `config`: the model's own."""
    config = given.get("generation_config") or config
    new = given.get("max_new_tokens") or (None if given.get("max_length") else getattr(config, "max_new_tokens", None))
    if new:
        return {"min_new_tokens": new}
    length = given.get("max_length") or getattr(config, "max_length", None)
    return {"min_length": length} if length else {}
