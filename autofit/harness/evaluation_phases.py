"""Evaluation in the schedule: the worst-case rows, which decide memory, and timed passes over typical ones.

It runs inside the Trainer's training, on top of its optimizer state, with the workload's own metrics.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from autofit.harness import rows
from autofit.harness.data_sets import EVAL_STEPS, has_own_eval_loader, pick_evaluation_set
from autofit.harness.device_meter import DeviceMeter
from autofit.harness.evaluation import AccumulationLog, project
from autofit.harness.recorder import Recorder
from autofit.machine import run_delay_seconds
from autofit.records import EvaluationGrowth, PhaseRecord, Schedule, Speed

EVALUATE = "evaluate"


class EvaluationPhases(TrainerCallback):
    """What `Phases` does of evaluation. It drives the Trainer, keeps phases, and gives the schedule its turns."""

    steps: int
    _phase: str

    def __init__(
        self, trainer: Any, schedule: Schedule, meter: DeviceMeter, recorder: Recorder, eval_rows: int
    ) -> None:
        self.eval_speed: Speed | None = None
        self.growth: EvaluationGrowth | None = None
        self.notes: list[str] = []
        self.measured_seconds = 0.0
        self._trainer, self._schedule, self._meter, self._recorder = trainer, schedule, meter, recorder
        self._eval_rows_timed = eval_rows
        self._first_prediction_peak: int | None = None
        self._accumulated = AccumulationLog(trainer.args.eval_batch_size)

    def attach_evaluation(self) -> None:
        """Choose the rows, and listen to what accumulates."""
        import transformers.trainer

        trainer = self._trainer
        self._accumulated.install(transformers.trainer)
        self._eval_name, self._eval_set = pick_evaluation_set(trainer, self.notes, self._schedule.sampled_eval_rows)
        self._own_eval_loader = has_own_eval_loader(trainer)
        if trainer.compute_metrics is not None:
            self._wrap("compute_metrics", self._metrics)
        # The best metric may be that of a set that is not evaluated here, and nothing is chosen by it.
        trainer._determine_best_metric = lambda *args, **kwargs: False

    def _wrap(self, name: str, around: Any) -> None:
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _open(self, phase: str) -> float:
        raise NotImplementedError

    def _close(self, phase: str, began: float) -> PhaseRecord:
        raise NotImplementedError

    @property
    def _evaluates(self) -> bool:
        return self._schedule.evaluate and self._eval_set is not None

    def _metrics(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.at("metrics", self.steps)
        result = original(*args, **kwargs)
        self._recorder.at("evaluate", self.steps)
        return result

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._first_prediction_peak is None:
            self._first_prediction_peak = self._meter.held_peak()

    def _worst_case_evaluation(self) -> Iterator[str]:
        trainer, dataset = self._trainer, self._eval_set
        if self._own_eval_loader:  # what it takes is not known, so it takes everything, and nothing is left to project
            began = self._open("evaluate")
            yield from self._evaluation(
                trainer.eval_dataset if self._eval_name is None else trainer.eval_dataset[self._eval_name]
            )
            self._close("evaluate", began)
            return
        batch = trainer.args.eval_batch_size
        plan = self._plan_rows(dataset)
        count = self._rows_evaluated(batch, plan.total)
        base = self._meter.held_bytes()
        began = self._open("evaluate")
        yield from self._evaluation(rows.subset(dataset, plan.longest(count, batch)))
        record = self._close("evaluate", began)
        if self._first_prediction_peak is None:
            self.notes.append(
                "evaluation: the script's own evaluate() makes no prediction step; it is run, not measured"
            )
            return
        self.growth = project(
            on_host=self._meter.name == "cpu",
            base_bytes=base,
            first_step_peak=self._first_prediction_peak or base,
            measured_peak=record.process_bytes or 0,
            outputs=self._accumulated.bytes_per_row,
            host_outputs=self._accumulated.host_bytes_per_row,
            rows_measured=count,
            rows_total=plan.total,
            batch=batch,
            accumulation_steps=trainer.args.eval_accumulation_steps,
            concatenates=trainer.args.eval_do_concat_batches,
        )

    def _rows_evaluated(self, batch: int, total: int) -> int:
        return min(EVAL_STEPS * batch, total)

    def _plan_rows(self, dataset: Any) -> rows.RowPlan:
        return rows.RowPlan(dataset, self._schedule.seed)  # read when it was picked

    def _timed_evaluation(self) -> Iterator[str]:
        plan = self._plan_rows(self._eval_set)
        order = plan.typical(min(plan.total, self._eval_rows_timed))
        chosen = rows.subset(self._eval_set, plan.cycled(order, self._eval_rows_timed))
        self._phase = "evaluate"
        self._recorder.at("evaluate", self.steps, timed=True)
        delay_before, seconds = run_delay_seconds(), []
        while len(seconds) < 3 and sum(seconds) < self._schedule.timed_seconds / 2:
            self._meter.synchronize()
            began = time.perf_counter()
            yield from self._evaluation(chosen)
            self._meter.synchronize()
            seconds.append(time.perf_counter() - began)
        delay = delay_share(delay_before, run_delay_seconds(), sum(seconds))
        self.eval_speed = Speed(self._eval_rows_timed, tuple(seconds), delay)

    def _evaluation(self, dataset: Any) -> Iterator[str]:
        trainer = self._trainer
        whole = trainer.eval_dataset
        trainer.eval_dataset = dataset if self._eval_name is None else {self._eval_name: dataset}
        getattr(trainer, "_eval_dataloaders", {}).clear()  # kept where workers persist
        began = time.perf_counter()
        yield EVALUATE
        self.measured_seconds += time.perf_counter() - began
        trainer.eval_dataset = whole


def delay_share(before: float | None, after: float | None, seconds: float) -> float | None:
    """Share of `seconds` that threads waited for a processor; None where nobody tells."""
    if before is None or after is None or not seconds or math.isnan(seconds):
        return None
    return (after - before) / seconds
