"""`search`, `plan`, `predict` and `load`: what the command line and a notebook call.

A search goes through preflight, description, probes and confirmation, and leaves a run directory; see `study.driver` for the
probes and `emission` for the files. A prediction measures nothing and leaves nothing; see `forecast`.
"""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit import codec
from autofit.errors import Interrupted, NothingFitsError, RunDirectoryError, UsageError
from autofit.forecast import Forecast, Forecasts, predict
from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.knobs import needs_code, parse_knob
from autofit.launch import Launcher
from autofit.machine import available_device_bytes, read_machine
from autofit.prediction import ShadowRuns, make_target
from autofit.records import (
    Budget,
    Candidate,
    Choice,
    Description,
    Machine,
    Measurement,
    Outcome,
    Prediction,
    Selection,
    Task,
)
from autofit.report.advice import nothing_fits
from autofit.report.outlook import CONFIRM_PROBES, PlannedStep, plan_seconds, plan_steps, reply_seconds
from autofit.schedule import plan_run
from autofit.selection import front, reasons
from autofit.store import (
    PROVISIONAL,
    SHADOWS,
    RunDirectory,
    earlier_budget,
    identity,
    read_run,
    read_selection,
    run_name,
)
from autofit.study import preflight
from autofit.study.listener import Listener
from autofit.units import parse_seconds
from autofit.workloads.script_task import command_line, redact

if TYPE_CHECKING:
    import pandas

__all__ = ["Forecast", "Forecasts", "Options", "Plan", "Result", "load", "plan", "predict", "search"]

RUNS_FOLDER = Path("autofit-runs")
OBJECTIVES = ("throughput", "wallclock")
LEAST_PROBES = 8  # the baseline, two alternatives, one evaluation, and the confirmation in two turns
DISTURBED = (
    "somebody else used the machine in every turn of the confirmation, so no gain is told; search again when it is "
    "quiet, with --out and another folder"
)


@dataclass(frozen=True)
class Options(preflight.WorkloadOptions):
    """Everything that a search can be told. Exactly one of `model` and `command`."""

    budget: str | None = None  # 24GB, 24GiB or a card's name; None: what the device has, less the headroom
    headroom: float = 0.05  # share of the device that is left free
    host_budget: str | None = None
    device: str | None = None  # cpu, cuda or cuda:N; None: the first GPU, else the CPU
    out: str | Path | None = None
    max_probes: int = 30
    max_time: str | None = None  # 90s, 15m, 1h
    min_gain: float = 0.01  # differences below this are no reason to prefer one candidate
    objective: str = "throughput"  # of training; or wallclock: training and evaluation by the user's own schedule
    seed: int = 0
    knobs: tuple[str, ...] = ()  # name=v1,v2
    allow: tuple[str, ...] = ()  # training, code
    snapshot: bool | None = None  # whether probes branch off a script at its Trainer; None: on the CPU only


@dataclass(frozen=True)
class Plan:
    """What a search would do, before anything is probed. Estimates are by formula; see `report.outlook`."""

    folder: Path | None
    budget: Budget
    machine: Machine
    description: Description
    baseline: Candidate
    candidates: list[PlannedStep]  # in the order of trial, after what the folder already holds
    estimated_seconds: float | None  # of those and the confirmation; see `plan_seconds`


@dataclass(frozen=True)
class Result:
    """A finished search. `timing` is in seconds: total, import, measured, contention, overhead."""

    folder: Path
    selection: Selection
    budget: Budget
    machine: Machine
    description: Description
    measurements: list[Measurement]
    timing: dict[str, float] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)  # of shadow runs, for candidates that were probed
    task: Task | None = None  # without its secrets

    def frame(self) -> "pandas.DataFrame":
        """One row per probe: its knobs, outcome, rows per second, and peaks in bytes, measured and predicted.

        Predicted peaks are those of a shadow run before any correction: on the CPU live bytes, which a process exceeds.
        """
        import pandas

        predicted = {(p.candidate.key, p.machine): p for p in self.predictions}
        return pandas.DataFrame([_row(m, predicted.get((m.candidate.key, m.device))) for m in self.measurements])


def search(*, listener: Listener | None = None, **options: Any) -> Result:
    """Find the fastest settings that fit, by measuring. `options` are the fields of `Options`.

    Raises UsageError, WorkloadError, NothingFitsError, RunDirectoryError, DeviceError, and Interrupted on Ctrl-C; after
    the last, and after any crash, the same call goes on where it stopped.
    """
    chosen = Options(**options)
    listener = listener or Listener()
    began = time.monotonic()
    try:
        with _prepared(chosen, listener, began) as prepared:
            try:
                return prepared.run()
            except KeyboardInterrupt:
                raise prepared.interrupted() from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunDirectoryError(
                f"the disk is full ({error.filename or 'while writing'}); free some space and run the same command "
                "again, it resumes"
            ) from error
        raise


def plan(*, listener: Listener | None = None, **options: Any) -> Plan:
    """Describe the workload and list the candidates in the order in which they would be tried; probe nothing."""
    chosen = Options(**options)
    with _prepared(chosen, listener or Listener(), time.monotonic()) as prepared:
        return prepared.plan()


def load(folder: str | Path) -> Result:
    """A run directory as `search` returned it. Raises RunDirectoryError."""
    path = Path(folder)
    run, measurements, predictions = read_run(path)
    where = path / "run.json"
    if "description" not in run:
        raise RunDirectoryError(
            f"{path} holds a search that was stopped before its workload was described; run it again"
        )
    selection = read_selection(path) or Selection(None, None, None, None)
    return Result(
        path,
        selection,
        codec.build(run["budget"], Budget, where),
        codec.build(run["machine"], Machine, where),
        codec.build(run["description"], Description, where),
        measurements,
        predictions=predictions,
        task=codec.build(run["task"], Task, where),
    )


class _Prepared:
    """A search whose workload has been described, holding its run directory and its launcher."""

    def __init__(
        self,
        options: Options,
        listener: Listener,
        began: float,
        task: Task,
        machine: Machine,
        budget: Budget,
        directory: RunDirectory,
        launcher: Launcher,
    ) -> None:
        self._options, self._listener, self._began = options, listener, began
        self._task, self._machine, self._budget = task, machine, budget
        self._directory, self._launcher = directory, launcher
        where = directory.path / "probes" / "describe"
        self.description = preflight.describe(
            task,
            machine,
            launcher,
            where,
            listener.said,
            snapshot=options.snapshot,
            check_forms="code" in options.allow,
        )
        self._space = preflight.space_of(self.description, machine, task, options.knobs, options.allow)
        preflight.check_weights(self.description, budget)
        listener.described(self.description, self._space.baseline, self._space.size)
        self._resumed = len([m for m in directory.measurements if m.device == machine.key])

    def facts(self) -> dict[str, Any]:
        """What `run.json` says of the workload and of what may vary."""
        return {"description": codec.to_json_value(self.description), "knobs": codec.to_json_value(self._space.values)}

    def plan(self) -> Plan:
        """The probes that a search would go on with, in order, each answered by an estimate."""
        history = [m for m in self._directory.measurements if m.device == self._machine.key]
        most = max(self._options.max_probes - CONFIRM_PROBES - len(history), 0)
        shadows = ShadowRuns(
            self._task,
            self.description,
            make_target(machine=self._machine),
            self._launcher,
            self._directory.path / SHADOWS,
            self._machine.versions,
            on_run=self._before_shadow_run,
        )
        steps = plan_steps(self._space, self.description, self._machine, self._budget, history, most, shadows)
        described = self._directory.path / "probes" / "describe"
        seconds = plan_seconds(len(steps), history, reply_seconds(described), self._launcher.import_seconds)
        baseline = self._space.baseline
        return Plan(self._directory.path, self._budget, self._machine, self.description, baseline, steps, seconds)

    def _before_shadow_run(self, _: str) -> None:
        if self._launcher.way == "fork":
            self._launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS))

    def run(self) -> Result:
        # Optuna is imported here: a plan does without it.
        from autofit.study.decision import Decision
        from autofit.study.driver import Limits, Search

        options = self._options
        max_seconds = None if options.max_time is None else parse_seconds(options.max_time)
        run = plan_run(self.description)
        by_run = options.objective == "wallclock" and run.is_known
        if options.objective == "wallclock" and run.told:
            fallback = "" if by_run else "; --objective wallclock has nothing to weigh, and training throughput decides"
            self._listener.said(run.told + fallback)
        search = Search(
            task=self._task,
            machine=self._machine,
            budget=self._budget,
            description=self.description,
            space=self._space,
            directory=self._directory,
            launcher=self._launcher,
            limits=Limits(options.max_probes, max_seconds, options.min_gain, options.seed),
            listener=self._listener,
            began=self._began,
        )
        try:
            decision = Decision(
                search,
                self._directory.path,
                self.description,
                self._machine,
                options.min_gain,
                self._task,
                run if by_run else None,
            )
            best, with_code = decision.run()
            history = search.history()
            if best is None and with_code is None:
                self._directory.forget_answer()
                raise NothingFitsError(nothing_fits(history, self._budget, self.description, self._task))
            baseline = search.baseline_measurement()
            compared = baseline is not None and baseline.outcome in (Outcome.FITS, Outcome.CONTAMINATED)

            def undisturbed(choice: Choice | None) -> bool:
                own = choice is not None and choice.candidate == self._space.baseline
                return choice is None or own or not compared or choice.gain is not None

        finally:
            search.close()
        selection = Selection(
            best=best,
            best_with_code=with_code,
            baseline=self._space.baseline,
            baseline_outcome=baseline.outcome if baseline else None,
            front=front(history),
            reasons=self._reasons(history, best, with_code, decision.by_run),
            notes=(*decision.notes(), *(() if undisturbed(best) and undisturbed(with_code) else (DISTURBED,))),
        )
        selection = replace(selection, objective="wallclock" if decision.by_run else "throughput", run=run)
        self._directory.write_selection(selection)
        return Result(
            self._directory.path,
            selection,
            self._budget,
            self._machine,
            self.description,
            history,
            self._timing(history),
            list(self._directory.predictions),
            redact(self._task),
        )

    def _reasons(
        self, history: list[Measurement], best: Choice | None, with_code: Choice | None, by_run: bool
    ) -> dict[str, str]:
        chosen, also = (best, with_code) if best is not None else (with_code, None)
        in_code = {m.candidate.key for m in history if needs_code(m.candidate, self._space.baseline)}
        return reasons(history, chosen, also, in_code, by_run)

    def _timing(self, history: list[Measurement]) -> dict[str, float]:
        """Seconds of this call: `measured` and `contention` are of the probes that it ran, not of those it resumed."""
        total = time.monotonic() - self._began
        ran = history[self._resumed :]
        measured = sum(m.measured_seconds for m in ran)
        return {
            "total": total,
            "import": self._launcher.import_seconds,
            "probes": sum(m.seconds for m in ran),
            "measured": measured,
            "contention": sum(m.delay_seconds or 0.0 for m in ran),
            "overhead": max(total - measured, 0.0),
        }

    def interrupted(self) -> Interrupted:
        """What was found until Ctrl-C."""
        count = len(self._directory.measurements)
        provisional = self._directory.path / PROVISIONAL
        in_code = [
            m
            for m in self._directory.measurements
            if m.outcome is Outcome.FITS and m.eval_speed is not None and needs_code(m.candidate, self._space.baseline)
        ]
        if not provisional.exists() and in_code:
            return Interrupted(
                f"stopped after {count} probes; settings that need code were seen to fit, in probe {in_code[-1].probe}, and "
                "none without; the same command resumes"
            )
        if not provisional.exists():
            return Interrupted(
                f"stopped after {count} probes, before any settings were seen to fit in training and evaluation; "
                "the same command resumes"
            )
        return Interrupted(
            f"stopped after {count} probes; the best so far, measured but not confirmed, is in {provisional}; "
            "the same command resumes"
        )


@contextmanager
def _prepared(options: Options, listener: Listener, began: float) -> Iterator[_Prepared]:
    """Preflight, the run directory, the launcher, and the description of the workload."""
    _check(options)
    machine = read_machine(options.device)
    facts: list[str] = []
    arguments = preflight.read_arguments(options.args) if options.command is None else {}
    task = preflight.make_task(options, arguments, machine.versions.get("transformers", ""), facts.append)
    budget = preflight.make_budget(options.budget, options.host_budget, options.headroom, machine, facts.append)
    path = Path(options.out) if options.out is not None else RUNS_FOLDER / run_name(redact(task), budget, machine)
    shown = redact(task)
    earlier = earlier_budget(path, identity(shown, budget, machine))
    free = available_device_bytes(machine)
    if earlier is not None and (free is None or earlier.device_bytes <= free):
        budget = earlier  # a default or clamped budget moves with what is free; what was measured does not
    run = {
        "identity": identity(shown, budget, machine),
        "command": command_line(shown.script) if shown.script else f"--model {options.model}",
        "task": codec.to_json_value(shown),
        "machine": codec.to_json_value(machine),
        "budget": codec.to_json_value(budget),
    }
    with RunDirectory.open(path, run) as directory, Launcher(machine, listener.probe_progressed) as launcher:
        listener.prepared(shown, machine, budget, str(path), len(directory.measurements))
        for fact in facts:
            listener.said(fact)
        try:
            prepared = _Prepared(options, listener, began, task, machine, budget, directory, launcher)
            directory.write_run({**run, **prepared.facts()})
            yield prepared
        except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            if not str(error.filename or "").startswith(str(path)):
                raise
            raise RunDirectoryError(
                f"{error.filename} is in the way ({error.strerror}); move it, and run the same command again"
            ) from error


def _check(options: Options) -> None:
    """Refuse what no machine and no workload could make sense of. Raises UsageError."""
    if (options.model is None) == (options.command is None):
        raise UsageError(
            "give either --model NAME, or your own script after --: autofit search --budget 24GB -- python train.py"
        )
    for text in options.knobs:
        parse_knob(text)
    if options.out is not None and not str(options.out).strip():
        raise UsageError("--out is empty; give a folder, or leave it out")
    if options.max_probes < LEAST_PROBES:
        raise UsageError(
            f"--max-probes {options.max_probes} is too few; at least {LEAST_PROBES} are needed with the confirmation"
        )
    if not 0 <= options.headroom < 0.9:
        raise UsageError(
            f"--headroom {options.headroom} is no share of the device; give one from 0 to 0.9, such as 0.05"
        )
    if options.objective not in OBJECTIVES:
        raise UsageError(f"--objective {options.objective!r} is not known; use {' or '.join(OBJECTIVES)}")
    if not 0 <= options.min_gain < 1:
        raise UsageError(f"--min-gain {options.min_gain} is no share; give one from 0 to 1, such as 0.01 for 1 %")
    if options.max_time is not None and parse_seconds(options.max_time) <= 0:
        raise UsageError(f"--max-time {options.max_time} leaves no time at all; give one such as 15m")


def _row(m: Measurement, predicted: Prediction | None) -> dict[str, Any]:
    return {
        "probe": m.probe,
        "purpose": m.purpose,
        "outcome": m.outcome.value,
        **m.candidate.values,
        "train_per_second": m.train_speed.per_second if m.train_speed else None,
        "eval_per_second": m.eval_per_second,
        "train_bytes": m.train_bytes,
        "eval_bytes": m.eval_bytes,
        "peak_bytes": m.peak_bytes,
        "predicted_train_bytes": predicted.train_bytes if predicted else None,
        "predicted_eval_bytes": predicted.eval_bytes if predicted else None,
        "host_bytes": m.host_bytes,
        "seconds": m.seconds,
        "failure": f"{m.failure.phase}: {m.failure.kind}" if m.failure else None,
    }
