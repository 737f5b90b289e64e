"""The short schedule that stands for a whole training: load, train, evaluate, train again, save.

It runs inside the Trainer's own loop: a callback at the end of each optimizer step drives a generator, which asks for
the next step, for an evaluation or a checkpoint through the Trainer's own control flags, or for the end. Worst-case
rows decide memory; windows over the same typical rows decide speed, the device synchronised at their edges only.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers.trainer_pt_utils import find_batch_size

from autofit.harness import rows
from autofit.harness.data_sets import (
    effective_batch,
    has_own_train_loader,
    pick_training_set,
)
from autofit.harness.device_meter import DeviceMeter, Peaks, watch_training
from autofit.harness.evaluation_phases import EVALUATE, EvaluationPhases, delay_share
from autofit.harness.recorder import Recorder
from autofit.harness.rules import InvalidProbe
from autofit.machine import run_delay_seconds
from autofit.records import PhaseRecord, Schedule, Speed

STEP, SAVE, STOP = "step", "save", "stop"

MIN_STEPS, MAX_STEPS = (
    3,
    8,
)  # worst-case steps: optimizer state appears at the first, so the peak is that of the second or later
AGREEMENT = 0.005  # two steps' peaks agree
MAX_SKIPPED = (
    12  # the fp16 scaler starts at 2**16 and halves; more skips than bits to lose means that it never finds a scale
)
PLANNED_STEPS = 4000  # bound of a probe; a timed window ends far earlier
MIN_WINDOW_SECONDS = 1.0  # ten steps of a few milliseconds are no measurement


class Phases(EvaluationPhases):
    """Drives one Trainer through the schedule and keeps what was measured."""

    def __init__(
        self, trainer: Any, schedule: Schedule, meter: DeviceMeter, recorder: Recorder, eval_rows: int
    ) -> None:
        super().__init__(trainer, schedule, meter, recorder, eval_rows)
        self.records: list[PhaseRecord] = []
        self.train_speed: Speed | None = None
        self.first_step_seconds: float | None = None
        self.rows_per_step: int | None = None
        self.micro_batches: set[int] = set()
        self.steps = self.skipped = 0
        self.longest_row: int | None = None
        self._losses: list[torch.Tensor] = []
        self._rows_now = self._most_rows = 0
        self._skipped_before = 0  # of the steps whose losses have been looked at
        self._watch_gradients, self._gradient_seen = True, False
        self._command = STEP
        self._step_began = 0.0
        self._sampler: rows.BlockSampler | None = None
        self._uniform = False
        self._generator = self._schedule_steps()

    # ---- taking hold of the trainer ----

    def attach(self) -> None:
        """Replace the rows and listen to the steps. Called right before the real `train`."""
        trainer = self._trainer
        self._prepare_training_rows()
        self.attach_evaluation()
        trainer.add_callback(self)
        self._wrap("training_step", self._training_step)
        self._wrap("_maybe_log_save_evaluate", self._log_save_evaluate)
        backward = trainer.accelerator.backward
        trainer.accelerator.backward = lambda *args, **kwargs: self._backward(backward, *args, **kwargs)

    def begin_training(self, load_began: float, budget_bytes: int | None) -> None:
        """Close the loading and set the meter for the training. `load_began` is a time of `perf_counter`."""
        self._keep("load", load_began, self._meter.enter_training(self._trainer.model, budget_bytes))

    def _prepare_training_rows(self) -> None:
        trainer = self._trainer
        sample = self._schedule.sampled_rows
        dataset = trainer.train_dataset = pick_training_set(trainer, self.notes, sample)
        if dataset is None or has_own_train_loader(trainer):
            return
        plan = self._plan_rows(dataset)
        self.longest_row, self._uniform = plan.longest_row, plan.uniform
        self._sampler = rows.BlockSampler(plan, effective_batch(trainer), PLANNED_STEPS, trainer.args.train_batch_size)
        trainer._get_train_sampler = lambda *_: self._sampler

    # ---- listening ----

    def _training_step(self, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        count = find_batch_size(inputs)
        if count is not None:
            self._rows_now += count
            self.micro_batches.add(count)
        loss = original(model, inputs, *args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> None:
        self._recorder.phase = "backward"
        original(*args, **kwargs)
        self._recorder.phase = self._phase

    def _log_save_evaluate(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Runs at the end of each step, after the callbacks: evaluations and checkpoints that were asked for happen here."""
        original(*args, **kwargs)
        while self._command in (EVALUATE, SAVE):
            self._advance()
            if self._command in (EVALUATE, SAVE):
                original(*args, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first_step_seconds is None:
            watch_training(self._trainer.model, self._trainer.optimizer)
        self._step_began = time.perf_counter()
        self._rows_now = 0
        self._recorder.at(self._phase, self.steps + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.phase = "optimizer"
        if self._watch_gradients and not self._gradient_seen:
            gradients = (p.grad for p in self._trainer.model.parameters() if p.grad is not None)
            dense = (g._values() if g.is_sparse else g for g in gradients)
            # The norm looks for a value that is not zero without a copy; `any` makes one, of a byte for each element.
            self._gradient_seen = any(g.numel() and bool(torch.linalg.vector_norm(g, ord=math.inf)) for g in dense)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.measured_seconds += time.perf_counter() - self._step_began
        self._recorder.phase = self._phase
        if self.first_step_seconds is None:
            self._meter.synchronize()
            self.first_step_seconds = time.time() - self._recorder.requested_at
        if self._trainer.accelerator.optimizer_step_was_skipped:
            self.skipped += 1
            if self.skipped > MAX_SKIPPED:
                raise InvalidProbe("scaler_never_settles", f"the fp16 scaler skipped {self.skipped} steps")
        else:
            self.steps += 1
        self.rows_per_step = self._rows_now or None
        self._most_rows = max(self._most_rows, self._rows_now)
        control.should_evaluate = control.should_save = control.should_training_stop = False
        if self._command != STOP:
            self._advance()
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_evaluate = control.should_save = False
        return control

    def _advance(self) -> None:
        self._command = next(self._generator, STOP)
        control = self._trainer.control
        control.should_evaluate = self._command == EVALUATE
        control.should_save = self._command == SAVE
        control.should_training_stop = self._command == STOP

    # ---- the schedule: each `yield` hands control to the Trainer until what was asked for has happened ----

    def _schedule_steps(self) -> Iterator[str]:
        """Starts at the end of the first optimizer step."""
        began = time.perf_counter()
        yield from self._worst_case_steps()
        self._watch_gradients = False
        self._check_batch()
        if not self._gradient_seen:
            raise InvalidProbe("no_gradient", "no gradient reaches a trainable parameter")
        self._check_losses()
        evaluating = self._evaluates
        if evaluating:
            self._close("train", began)
            yield from self._worst_case_evaluation()
            self._meter.settle()  # what malloc has kept of the evaluation is free for training
            began = self._open("train-again")
            yield STEP
        if self._schedule.timed_steps:
            yield from self._timed_windows()
        self._check_losses()
        self._close("train-again" if evaluating else "train", began)
        if evaluating and self.growth is not None and self._eval_rows_timed and not self._own_eval_loader:
            yield from self._timed_evaluation()
        yield from self._repeated_evaluation()
        if self._schedule.save:
            began = self._open("save")
            yield SAVE
            self._close("save", began)
        self._check_parameters()
        yield from self._live_step()
        yield STOP

    _phase = "train"

    def _open(self, phase: str) -> float:
        self._phase = phase
        self._recorder.at(phase, self.steps)
        self._meter.begin_phase()
        return time.perf_counter()

    def _close(self, phase: str, began: float) -> PhaseRecord:
        return self._keep(phase, began, self._meter.peaks())

    def _keep(self, phase: str, began: float, peaks: Peaks) -> PhaseRecord:
        record = PhaseRecord(
            phase,
            time.perf_counter() - began,
            peaks.allocated_bytes,
            peaks.reserved_bytes,
            peaks.process_bytes,
            peaks.retries,
        )
        self.records.append(record)
        return record

    def _worst_case_steps(self) -> Iterator[str]:
        last = self._meter.peaks().process_bytes
        while self.steps < MAX_STEPS:  # those that the fp16 scaler skips are bounded by themselves
            yield STEP
            self.leaks.step_ended(self.steps + self.skipped)
            peak = self._meter.peaks().process_bytes
            settled = last is not None and peak is not None and abs(peak - last) <= AGREEMENT * peak
            if self.steps >= MIN_STEPS and settled:
                return
            last = peak

    def _live_step(self) -> Iterator[str]:
        """One step in which live bytes are counted, where that is not done all the time.

        Counting takes memory of its own (a fifth of a small model's), so it comes last, when every peak has been read and
        the cap is no longer needed.
        """
        self._meter.release()
        self._measure_copies()
        self._phase = "train"
        if self._sampler is not None and not self._uniform:
            self._sampler.kind = "worst"
            while self._sampler.kinds[self.steps + self.skipped :][:1] not in (["worst"], []):
                yield STEP
        if self.leaks.suspects_steps():
            yield from self.leaks.confirm_steps(STEP, lambda: self.steps + self.skipped)
        with self._meter.live_window() as live_bytes:
            yield STEP
        peak = live_bytes()
        if peak is not None:
            self.records = [
                dataclasses.replace(r, allocated_bytes=peak) if r.name == "train" else r for r in self.records
            ]

    def _timed_windows(self) -> Iterator[str]:
        if self._sampler is not None:
            self._sampler.kind = "typical"
            if not self._uniform:
                # Loaders fetch ahead; the first whole pass over the typical rows also warms their shapes.
                while self._sampler.kinds[self.steps + self.skipped - 1] != f"typical-{rows.TYPICAL_BLOCKS - 1}":
                    yield STEP
        windows: list[float] = []
        delay_before = run_delay_seconds()
        self._meter.synchronize()
        self.leaks.begin_steps()
        self.leaks.step_ended(self.steps + self.skipped)
        edge = time.perf_counter()
        while True:
            for _ in range(rows.TYPICAL_BLOCKS):
                yield STEP
            self._meter.synchronize()
            now = time.perf_counter()
            windows.append(now - edge)
            self.leaks.step_ended(self.steps + self.skipped)
            edge = time.perf_counter()
            total = sum(windows)
            enough_steps = len(windows) * rows.TYPICAL_BLOCKS >= self._schedule.timed_steps
            if len(windows) >= 2 and (
                (enough_steps and total >= MIN_WINDOW_SECONDS) or total >= self._schedule.timed_seconds
            ):
                break
        delay = delay_share(delay_before, run_delay_seconds(), sum(windows))
        self.train_speed = Speed(effective_batch(self._trainer) * rows.TYPICAL_BLOCKS, tuple(windows), delay)

    # ---- what makes a run no training ----

    def _check_batch(self) -> None:
        """Hold the rows that reached the model against those that were asked for.

        Collators that lay a batch out as one row (packing without padding) or a row out as two (pairs) are let be: the
        harness's own sampler has given them the right number.
        """
        asked = effective_batch(self._trainer)
        took = self._most_rows  # a script's own loader may end in a smaller batch
        if self._sampler is not None:
            in_one_row = took == self._trainer.args.gradient_accumulation_steps
            wrong = 0 < took < asked and not in_one_row
        else:
            wrong = took not in (0, asked)
        if wrong:
            raise InvalidProbe("wrong_batch", f"an optimizer step took {took} rows instead of {asked}")

    def _check_losses(self) -> None:
        if not self._losses:
            return
        finite = torch.isfinite(torch.stack([loss.float().reshape(()) for loss in self._losses]))
        bad = int((~finite).sum())
        skipped, self._skipped_before = self.skipped - self._skipped_before, self.skipped
        if bad > skipped * self._trainer.args.gradient_accumulation_steps:
            raise InvalidProbe(
                "nonfinite_loss", f"{bad} of {len(self._losses)} micro-batches had a loss that is no number"
            )
        self._losses.clear()

    def _check_parameters(self) -> None:
        trainable = [(name, p.detach()) for name, p in self._trainer.model.named_parameters() if p.requires_grad]
        # The norm passes on what is no number, and makes no copy as `isfinite` does.
        largest = [(name, torch.linalg.vector_norm(p, ord=math.inf)) for name, p in trainable if p.numel()]
        for name, value in largest:
            if not math.isfinite(value.item()):
                raise InvalidProbe(
                    "nonfinite_parameters", f"{name} holds values that are no numbers after {self.steps} steps"
                )
