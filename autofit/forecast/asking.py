"""`predict`: describe the workload, run what shadow runs it takes, and put the answers together."""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.errors import WorkloadError
from autofit.forecast.options import (
    ACCUMULATION,
    ALL_GPUS,
    BATCH,
    Place,
    PredictOptions,
    allocator_of,
    candidate_of,
    check_options,
    place_notes,
    places_of,
    precision_refusal,
    process_notes,
    task_and_knobs,
    traced_task,
    with_lean_evaluation,
)
from autofit.forecast.rows import Forecast, Forecasts, rows_per_step, structure_words
from autofit.forecast.trace_cache import TraceCache
from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.harness.shadow.allocator import AllocatorSettings
from autofit.launch import Launcher
from autofit.machine import read_machine
from autofit.prediction import ShadowRuns, judge, largest_batch
from autofit.prediction.verdict import MOST_BATCH
from autofit.records import Candidate, Description, Failure, ShadowDevice, Task
from autofit.study import preflight
from autofit.workloads.script_task import redact

# Optimizers that are compared beside the user's own; both train otherwise, in less memory.
SMALL_OPTIMIZERS = ("adafactor", "adamw_bnb_8bit")
LEAN_EVALUATION = (
    "assumed: an evaluation that takes little, since training is compared here; --eval-batch, --eval-accumulation and "
    "--logits set another"
)
MOST_ROWS = f"looked at batches up to {MOST_BATCH} rows only, and that many fit"
NO_FAMILY = (
    "it runs otherwise at every batch size, so that each takes a shadow run of its own; ask for one with --batch"
)


def predict(*, say: Callable[[str], None] = lambda text: None, **options: Any) -> Forecasts:
    """Predict without a device. `options` are the fields of `PredictOptions`; `say` hears what is going on.

    Raises UsageError, and WorkloadError where the workload does not come to its training or cannot be traced.
    """
    chosen = PredictOptions(**options)
    check_options(chosen)
    places = places_of(chosen)
    allocator, allocator_notes = allocator_of(places)
    machine = read_machine("cpu")
    notes: list[str] = []
    task, wanted = task_and_knobs(chosen, machine, notes.append)
    ran = traced_task(task)
    kept = TraceCache.of(ran, machine.versions)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autofit-")))
        launcher = stack.enter_context(Launcher(machine))
        runs = scratch / "shadow"
        description = kept.description()
        if description is None:
            loads = "the script loads what it loads" if ran.script is not None else "no weights are loaded"
            say(f"describing the workload: torch and transformers are imported, {loads}")
            shadow = ShadowDevice("cpu")
            description = preflight.describe(ran, machine, launcher, scratch / "describe", notes.append, shadow)
            kept.keep_description(description)
        else:
            notes += description.notes
        candidate = candidate_of(description, wanted, None if chosen.gpu == ALL_GPUS else places[0])
        kept.lay_out(runs)
        stack.callback(kept.take_in, runs)
        tracer = _Tracer(ran, description, launcher, runs, machine.versions, allocator, say)
        asked = _Asked(chosen, task, description, tracer)
        notes += [*place_notes(places), *process_notes(chosen.processes), *allocator_notes]
        if chosen.gpu != ALL_GPUS and not chosen.max_batch:
            return asked.one(places[0], candidate, notes)
        lean = with_lean_evaluation(candidate, description, wanted)
        if lean != candidate:
            notes.append(LEAN_EVALUATION)
        if chosen.max_batch:
            return asked.largest_batches(places[0], lean, notes)
        return asked.best_by_gpu(places, lean, notes)


class _Tracer:
    """`ShadowRuns` by target. All share one folder, so that cards share traces."""

    def __init__(
        self,
        task: Task,
        description: Description,
        launcher: Launcher,
        folder: Path,
        versions: dict[str, str],
        settings: AllocatorSettings,
        say: Callable[[str], None],
    ) -> None:
        self._task, self._description, self._launcher = task, description, launcher
        self._folder, self._versions, self._settings, self._say = folder, versions, settings, say
        self._runs: dict[str, ShadowRuns] = {}
        self._warm = False

    def on(self, place: Place) -> ShadowRuns:
        name = place.target.name
        if name not in self._runs:
            self._runs[name] = ShadowRuns(
                self._task,
                self._description,
                place.target,
                self._launcher,
                self._folder,
                self._versions,
                settings=self._settings,
                on_run=self._before_run,
            )
        return self._runs[name]

    def _before_run(self, text: str) -> None:
        """After a description that was kept no server runs yet."""
        if not self._warm and self._description.forkable:
            self._launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS, *self._description.modules))
            self._warm = True
        self._say(text)


class _Asked:
    """One described workload, asked about candidates and cards."""

    def __init__(self, options: PredictOptions, task: Task, description: Description, tracer: _Tracer) -> None:
        self._options, self._task, self._description, self._tracer = options, task, description, tracer

    def one(self, place: Place, candidate: Candidate, notes: list[str]) -> Forecasts:
        row = self._forecast(place, candidate)
        runs = self._tracer.on(place)
        traced = runs.trace(candidate)
        if isinstance(traced, Failure):
            raise _untraceable(traced)
        if candidate.get("logits") == "full" and self._description.eval_rows and self._task.model is not None:
            notes.append(
                "assumed: evaluation keeps the scores of every row for its metrics, as with a compute_metrics and without "
                "preprocess_logits_for_metrics (--logits argmax, --eval-rows)"
            )
        if self._options.verify:
            row = replace(row, verified=runs.verify(candidate))
        return self._answer("one", [row], notes, trace=traced[0])

    def largest_batches(self, place: Place, candidate: Candidate, notes: list[str]) -> Forecasts:
        """For each structure the largest batch that fits, at the candidate's own accumulation; at 1 row where none does."""
        rows, failed = [], {}
        runs = self._tracer.on(place)
        own = str(candidate["optim"])
        optimizers = (own,) if self._options.optim is not None else tuple(dict.fromkeys((own, *SMALL_OPTIMIZERS)))
        for structure in self._structures(candidate, place, optimizers):
            known = runs.family(structure)
            if isinstance(known, Failure):
                failed[structure_words(structure)] = f"{known.kind}: {known.message}"
                continue
            if known is None:
                failed[structure_words(structure)] = NO_FAMILY
                continue
            batch = largest_batch(runs, structure, place.budget_bytes)
            rows.append(self._forecast(place, structure.but({BATCH: batch or 1})))
            if batch == MOST_BATCH:
                notes.append(MOST_ROWS)
        rows.sort(key=lambda row: (not row.fits, -(row.rows_per_second or 0.0)))
        return self._answer("max-batch", rows, notes, failed)

    def best_by_gpu(self, places: list[Place], candidate: Candidate, notes: list[str]) -> Forecasts:
        """For each card the candidate of the highest estimated speed that fits, the effective batch held; else the smallest.

        32 bits are looked at only where nothing fits in 16: that is what people train with, and shadow runs cost time.
        """
        rows: list[Forecast] = []
        failed: dict[str, str] = {}
        for place in places:
            found: list[Forecast] = []
            for precision in self._precisions(str(candidate["precision"]), place)[:2]:
                refused = precision_refusal(precision, place)
                if refused is not None:
                    failed[place.label] = f"it {refused}"
                    continue
                found += self._best_in(place, candidate.but(precision=precision), failed)
                if any(row.fits for row in found):
                    break
            fitting = [row for row in found if row.fits]
            if fitting:
                rows.append(max(fitting, key=lambda row: row.rows_per_second or 0.0))
            elif found:
                rows.append(min(found, key=lambda row: row.prediction.peak_bytes or 0))
        return self._answer("gpus", rows, notes, failed)

    def _best_in(self, place: Place, candidate: Candidate, failed: dict[str, str]) -> list[Forecast]:
        """Without recomputation, and with it where it may win: the same batch is slower with it."""
        found: list[Forecast] = []
        for recompute in self._checkpointing():
            structure = candidate.but(activation_checkpointing=recompute)
            if found and found[0].fits and not _accumulates(found[0]):
                break
            row = self._largest_that_fits(place, structure, rows_per_step(candidate))
            if row.prediction.failure is not None:
                failed[structure_words(structure)] = row.prediction.failure.message
            else:
                found.append(row)
        return found

    def _largest_that_fits(self, place: Place, structure: Candidate, effective: int) -> Forecast:
        """The structure at the largest divisor of the effective batch that fits; at 1 row where none does.

        The whole batch is tried first, since without accumulation it may peak lower than its half; from there on memory
        does not fall with the batch.
        """
        whole = self._forecast(place, self._sized(structure, effective))
        if whole.prediction.failure is not None or whole.fits or effective == 1:
            return whole
        batches = [batch for batch in _divisors(effective) if batch < effective]
        best = None
        low, high = 0, len(batches)  # batches from `high` on are too large
        if len(batches) > 1:
            low = 1  # one row takes a shadow run of its own, and is looked at last
        while low < high:
            middle = (low + high) // 2
            row = self._forecast(place, self._sized(structure, effective, batches[middle]))
            if row.fits:
                best, low = row, middle + 1
            else:
                high = middle
        return best or self._forecast(place, self._sized(structure, effective, batches[0]))

    def _sized(self, structure: Candidate, effective: int, batch: int | None = None) -> Candidate:
        batch = batch or effective
        return structure.but({BATCH: batch, ACCUMULATION: effective // batch})

    def _forecast(self, place: Place, candidate: Candidate) -> Forecast:
        runs = self._tracer.on(place)
        prediction = runs.predict(candidate)
        verdict = judge(runs, prediction, place.budget_bytes)
        return Forecast(place.target, place.label, candidate, prediction, verdict, place.budget_bytes)

    def _structures(self, candidate: Candidate, place: Place, optimizers: tuple[str, ...]) -> Iterator[Candidate]:
        """Precision × checkpointing × optimizer, as far as the card, the weights and the user's own flags allow."""
        for precision in self._precisions(str(candidate["precision"]), place):
            for recompute in self._checkpointing():
                for optim in optimizers:
                    yield candidate.but(precision=precision, activation_checkpointing=recompute, optim=optim)

    def _checkpointing(self) -> tuple[bool, ...]:
        if self._options.checkpointing is not None:
            return (self._options.checkpointing,)
        return (False, True) if self._description.can_checkpoint else (False,)

    def _precisions(self, own: str, place: Place) -> tuple[str, ...]:
        if self._options.precision is not None:
            return (self._options.precision,)
        if "float32" not in self._description.dtypes:
            return (own,)  # nothing is left to cast: the weights decide
        half = "bf16" if place.native_bf16 else "fp16"
        full = "tf32" if own == "tf32" and place.native_tf32 else "fp32"
        return tuple(dict.fromkeys((half, full, *([own] if own == "fp16" else []))))

    def _answer(
        self, kind: str, rows: list[Forecast], notes: list[str], failed: dict[str, str] | None = None, **more: Any
    ) -> Forecasts:
        if not rows:
            why = "\n".join(f"{name}: {text}" for name, text in (failed or {}).items())
            raise WorkloadError("the workload could not be traced; a search measures it instead", why)
        unique = tuple(dict.fromkeys(notes))
        return Forecasts(kind, redact(self._task), self._description, tuple(rows), unique, failed or {}, **more)


def _accumulates(row: Forecast) -> bool:
    return int(row.candidate.get(ACCUMULATION) or 1) > 1


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _untraceable(failure: Failure) -> WorkloadError:
    return WorkloadError(
        f"the workload could not be traced, in {failure.phase} ({failure.kind}: {failure.message}); "
        "a search measures it instead",
        failure.traceback,
    )
