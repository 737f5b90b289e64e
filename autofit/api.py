"""`search`, `plan` and `load`: what the command line and a notebook call.

A search goes through preflight, description, probes and confirmation, and leaves a run directory; see `study.driver` for the
probes and `emission` for the files.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit import codec
from autofit.catalog import parse_budget
from autofit.emission import write_files
from autofit.errors import DeviceError, Interrupted, NothingFitsError, UsageError, WorkloadError
from autofit.knobs import Space, make_space, needs_code, parse_knob
from autofit.launch import Launcher, log_tail
from autofit.machine import available_device_bytes, available_host_bytes, read_machine
from autofit.prediction import Predictor
from autofit.records import (
    Budget,
    Candidate,
    Choice,
    Description,
    Machine,
    Measurement,
    Outcome,
    Request,
    Schedule,
    Selection,
    Task,
    digest,
)
from autofit.report.advice import nothing_fits
from autofit.selection import front, nearest_fitting, reason, score, winner
from autofit.store import RunDirectory, read_run, run_name
from autofit.study.listener import Listener
from autofit.trainer_args import candidate_values, check_single_process
from autofit.units import format_bytes, parse_seconds, unit_of
from autofit.workloads.model_task import make_model_task
from autofit.workloads.script_task import make_script_task

if TYPE_CHECKING:
    import pandas

RUNS_FOLDER = Path("autofit-runs")
SELECTION_FILE = "selection.json"
LEAST_PROBES = 6  # the baseline, one alternative, and the confirmation of both
DESCRIBE_SECONDS = 1800.0
BUSY_SHARE = 0.05  # of the device held by others: no measurement is possible beside them
HOST_SHARE = 0.9  # of available host memory, when no --host-budget is given
TYPICAL_PROBES = 12


@dataclass(frozen=True)
class Options:
    """Everything that a search can be told. Exactly one of `model` and `command`."""

    model: str | None = None  # a local folder, a hub id or a name of the catalog
    command: tuple[str, ...] | None = None  # the user's own: ("python", "train.py", …)
    budget: str | None = None  # 24GB, 24GiB or a card's name; None: what the device has, less the headroom
    task: str | None = None
    seq_len: int | None = None  # tokens
    image_size: int | None = None  # pixels per side
    effective_batch: int | None = None  # rows per optimizer step
    dtype: str | None = None  # of the weights
    lora_rank: int | None = None
    args: str | Path | dict | None = None  # the user's own TrainingArguments, as JSON
    eval_rows: int | None = None  # rows of the evaluation set that memory is projected to
    headroom: float = 0.05  # share of the device that is left free
    host_budget: str | None = None
    device: str | None = None  # cpu, cuda or cuda:N; None: the first GPU, else the CPU
    out: str | Path | None = None
    max_probes: int = 30
    max_time: str | None = None  # 90s, 15m, 1h
    min_gain: float = 0.01  # differences below this are no reason to prefer one candidate
    seed: int = 0
    knobs: tuple[str, ...] = ()  # name=v1,v2
    allow: tuple[str, ...] = ()  # training, code


@dataclass(frozen=True)
class Plan:
    """What a search would do, before anything is probed. Estimates are by formula."""

    folder: Path | None
    budget: Budget
    machine: Machine
    description: Description
    baseline: Candidate
    candidates: list[
        tuple[Candidate, int, float]
    ]  # in order of trial: candidate, train bytes, relative seconds per row
    estimated_seconds: float | None


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

    def frame(self) -> "pandas.DataFrame":
        """One row per probe: its knobs, outcome, rows per second, and peaks in bytes."""
        import pandas

        return pandas.DataFrame([_row(m) for m in self.measurements])


def search(*, listener: Listener | None = None, **options: Any) -> Result:
    """Find the fastest settings that fit, by measuring. `options` are the fields of `Options`.

    Raises UsageError, WorkloadError, NothingFitsError, RunDirectoryError, DeviceError, and Interrupted on Ctrl-C; after
    the last, and after any crash, the same call goes on where it stopped.
    """
    chosen = Options(**options)
    listener = listener or Listener()
    began = time.monotonic()
    with _prepared(chosen, listener, began) as prepared, _terminable():
        try:
            return prepared.run()
        except KeyboardInterrupt:
            raise prepared.interrupted() from None


def plan(*, listener: Listener | None = None, **options: Any) -> Plan:
    """Describe the workload and list the candidates in the order in which they would be tried; probe nothing."""
    chosen = Options(**options)
    with _prepared(chosen, listener or Listener(), time.monotonic()) as prepared:
        return prepared.plan()


def load(folder: str | Path) -> Result:
    """A run directory as `search` returned it. Raises RunDirectoryError."""
    path = Path(folder)
    run, measurements = read_run(path)
    where = path / "run.json"
    selection = Selection(None, None, None, None)
    if (path / SELECTION_FILE).exists():
        selection = codec.decode((path / SELECTION_FILE).read_bytes(), Selection, path / SELECTION_FILE)
    return Result(
        path,
        selection,
        codec.build(run["budget"], Budget, where),
        codec.build(run["machine"], Machine, where),
        codec.build(run["description"], Description, where),
        measurements,
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
        self._description = self._describe()
        check_single_process(self._description.resolved)
        self._baseline = baseline_of(self._description)
        narrowed = dict(parse_knob(text) for text in options.knobs)
        self._space = make_space(self._description, machine, self._baseline, narrowed, self._allowed())
        self._check_weights()
        listener.described(self._description, self._baseline, self._space.size)
        self._search: Any = None

    def _allowed(self) -> frozenset[str]:
        for word in self._options.allow:
            if word not in ("training", "code"):
                raise UsageError(f"--allow {word!r} is not known; use training or code")
        return frozenset(self._options.allow)

    # ---- before the first probe ----

    def _describe(self) -> Description:
        """Run the workload once up to its training. Raises UsageError or WorkloadError where it does not get there."""
        folder = self._directory.path / "probes" / "describe"
        _empty(folder)
        request = Request("describe", str(folder), self._task, self._machine.device, Schedule(describe_only=True))
        fork = self._task.script is None
        if fork:
            self._launcher.warm()
            if self._machine.device != "cpu" and not self._launcher.trust(request):
                self._listener.said(
                    "forked children cannot use the device here; every probe starts a fresh interpreter"
                )
        _empty(folder)
        ended = self._launcher.probe(
            request,
            how="fork" if fork else "fresh",
            time_limit=DESCRIBE_SECONDS,
            options=self._task.script.interpreter_options if self._task.script else (),
        )
        description = ended.reply.description
        if description is None:
            raise _workload_error(self._task, ended.reply, folder)
        if fork and self._launcher.can_fork:
            self._launcher.warm(description.modules)
        for note in description.notes:
            self._listener.said(note)
        return description

    def _check_weights(self) -> None:
        least = self._description.parameter_bytes
        if least > self._budget.device_bytes:
            raise UsageError(
                f"the weights alone take {format_bytes(least, self._budget.unit)} and the budget is "
                f"{format_bytes(self._budget.device_bytes, self._budget.unit)}; raise --budget, or take a smaller model or dtype"
            )

    def plan(self) -> Plan:
        """Every training candidate by estimated speed, those first that are estimated to fit; the baseline before all."""
        predictor = Predictor(self._description, self._machine.device)
        listed = [(c, predictor.train_bytes(c), predictor.seconds_per_row(c)) for c in _train_candidates(self._space)]
        fits = self._budget.device_bytes
        listed.sort(key=lambda entry: (entry[0] != self._baseline, entry[1] > fits, entry[2]))
        return Plan(
            self._directory.path,
            self._budget,
            self._machine,
            self._description,
            self._baseline,
            listed,
            self._estimated_seconds(),
        )

    def _estimated_seconds(self) -> float | None:
        """From the probes of an earlier run; without one, nothing is known of the speed of this machine."""
        done = [m.seconds for m in self._directory.measurements]
        return None if not done else TYPICAL_PROBES * sum(done) / len(done)

    # ---- the search ----

    def run(self) -> Result:
        from autofit.study.driver import Limits, Search

        search = self._search = Search(
            task=self._task,
            machine=self._machine,
            budget=self._budget,
            description=self._description,
            space=self._space,
            directory=self._directory,
            launcher=self._launcher,
            limits=Limits(
                self._options.max_probes, _seconds(self._options.max_time), self._options.min_gain, self._options.seed
            ),
            listener=self._listener,
        )
        try:
            plain = self._settle(search, in_code=False)
            self._check_baseline(search)
            best = self._confirm(search, plain, in_code=False)
            with_code = self._settle(search, in_code=True) if self._code_may_pay(best) else None
            best_with_code = self._confirm_with_code(search, with_code, best)
            return self._finish(search, best, best_with_code)
        finally:
            search.close()

    def _settle(self, search: Any, in_code: bool) -> list[Candidate]:
        """Candidates that fit in training and evaluation, the best first. Empty when none does."""
        search.run_train(in_code)
        search.race(in_code)
        ranked = search.ranked(in_code)
        found: list[Candidate] = []
        for scored in ranked[:3]:
            whole = search.run_evaluate(scored.candidate, in_code)
            if whole is not None:
                found.append(whole)
                break
        return found

    def _check_baseline(self, search: Any) -> None:
        """A workload whose own settings crash for another reason than memory is the user's to mend."""
        m = search.baseline_measurement()
        if (
            m is not None
            and m.outcome in (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.KILLED, Outcome.INVALID)
            and m.failure
        ):
            fitting = [x for x in search.history() if x.outcome is Outcome.FITS]
            if not fitting:
                where = f"in step {m.failure.step}" if m.failure.step else f"in {m.failure.phase}"
                raise WorkloadError(
                    f"your own settings fail {where} ({m.failure.kind}: {m.failure.message}); mend this first, "
                    f"the whole output is in {self._directory.path / 'probes' / m.probe}",
                    m.failure.traceback,
                )

    def _confirm(self, search: Any, candidates: list[Candidate], in_code: bool) -> Choice | None:
        from autofit.study.driver import MOST_FALLBACKS, choice_of

        folder = self._directory.path / ("best-with-code" if in_code else "best")
        draft = self._directory.path / ("confirm-with-code" if in_code else "confirm")
        tried: set[str] = set()
        for _ in range(MOST_FALLBACKS):
            candidate = next((c for c in candidates if c.key not in tried), None)
            if candidate is None:
                break
            tried.add(candidate.key)
            confirmed = search.confirm(candidate, draft, lambda where, c=candidate: self._emit(where, c))
            if confirmed is not None:
                self._emit(folder, candidate)
                _remove(draft)
                return choice_of(confirmed, folder)
            self._listener.said("the winner failed its confirmation; the next best is confirmed")
            candidates = [*candidates, *(self._with_evaluation(s.candidate, candidate) for s in search.ranked(in_code))]
        _remove(draft)
        _remove(folder)
        return None

    @staticmethod
    def _with_evaluation(train: Candidate, source: Candidate) -> Candidate:
        from autofit.knobs import KNOBS

        return train.but({n: v for n, v in source.values.items() if KNOBS[n].phase == "evaluate"})

    def _emit(self, folder: Path, candidate: Candidate) -> None:
        try:
            write_files(folder, candidate, self._baseline, self._description, self._machine.device)
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be written ({error.strerror}); free some space, the same command resumes"
            ) from error

    def _code_may_pay(self, best: Choice | None) -> bool:
        from autofit.knobs import KNOBS

        varies = any(KNOBS[n].in_code and len(v) > 1 for n, v in self._space.values.items())
        return varies or best is None

    def _confirm_with_code(self, search: Any, candidates: list[Candidate] | None, best: Choice | None) -> Choice | None:
        """The best that needs code, confirmed where it is needed to fit or gained more than the least gain in its probes."""
        folder = self._directory.path / "best-with-code"
        candidate = next((c for c in candidates or () if needs_code(c, self._baseline)), None)
        if candidate is None or (best is not None and not self._gains(search, candidate, best.candidate)):
            _remove(folder)
            return None
        choice = self._confirm(search, [candidate], in_code=True)
        if choice is not None and best is not None:
            train = choice.train_per_second / best.train_per_second - 1
            evaluate = (choice.eval_per_second or 0) / best.eval_per_second - 1 if best.eval_per_second else 0
            if max(train, evaluate) <= self._options.min_gain:
                _remove(folder)
                return None
        return choice

    def _gains(self, search: Any, candidate: Candidate, best: Candidate) -> bool:
        from autofit.knobs import KNOBS

        for phase in ("train", "evaluate"):
            ours = {n: v for n, v in candidate.values.items() if KNOBS[n].phase == phase}
            theirs = {n: v for n, v in best.values.items() if KNOBS[n].phase == phase}
            if ours == theirs:
                continue
            rates = {s.candidate.key: s.rate for s in score(search.history(), phase)}
            mine = [r for k, r in rates.items() if _matches(search.history(), k, ours)]
            other = [r for k, r in rates.items() if _matches(search.history(), k, theirs)]
            if mine and other and max(mine) > max(other) * (1 + self._options.min_gain):
                return True
        return False

    def _finish(self, search: Any, best: Choice | None, best_with_code: Choice | None) -> Result:
        history = search.history()
        baseline = search.baseline_measurement()
        if best is None and best_with_code is None:
            raise NothingFitsError(
                nothing_fits(history, self._budget, self._description, self._task, self._options.seq_len)
            )
        chosen = winner(score(history, "train"), self._options.min_gain)
        notes = []
        if baseline is not None and not baseline.ran:
            near = nearest_fitting(self._baseline, history)
            if near is not None:
                notes.append(f"nearest that fits: {near.key}")
        selection = Selection(
            best=best,
            best_with_code=best_with_code,
            baseline=self._baseline,
            baseline_outcome=baseline.outcome if baseline else None,
            front=front(history),
            reasons={m.candidate.key: reason(m, self._budget, chosen) for m in history},
            notes=tuple(notes),
        )
        from autofit.store import write_atomically

        write_atomically(self._directory.path / SELECTION_FILE, codec.encode(selection))
        _remove(self._directory.path / "provisional")
        return Result(
            self._directory.path,
            selection,
            self._budget,
            self._machine,
            self._description,
            history,
            self._timing(history),
        )

    def _timing(self, history: list[Measurement]) -> dict[str, float]:
        total = time.monotonic() - self._began
        measured = sum(m.measured_seconds for m in history)
        return {
            "total": total,
            "import": self._launcher.import_seconds,
            "probes": sum(m.seconds for m in history),
            "measured": measured,
            "contention": sum(m.delay_seconds or 0.0 for m in history),
            "overhead": max(total - measured, 0.0),
        }

    def interrupted(self) -> Interrupted:
        """The best so far, written as provisional: measured, not confirmed."""
        history = self._directory.measurements
        best = winner(
            score([m for m in history if not needs_code(m.candidate, self._baseline)], "train"), self._options.min_gain
        )
        again = "the same command resumes"
        if best is None:
            return Interrupted(f"stopped after {len(history)} probes, none of which fits yet; {again}")
        folder = self._directory.path / "provisional"
        self._emit(folder, best.candidate)
        return Interrupted(
            f"stopped after {len(history)} probes; best so far {best.rate:.3g} samples/s, not confirmed, in {folder}; {again}"
        )


@contextmanager
def _prepared(options: Options, listener: Listener, began: float) -> Iterator[_Prepared]:
    """Preflight: refuse what cannot work before anything is started, then open the directory and describe."""
    if (options.model is None) == (options.command is None):
        raise UsageError(
            "give either --model NAME, or your own script after --: autofit search --budget 24GB -- python train.py"
        )
    for text in options.knobs:
        parse_knob(text)
    if options.max_probes < LEAST_PROBES:
        raise UsageError(
            f"--max-probes {options.max_probes} is too few; at least {LEAST_PROBES} are needed with the confirmation"
        )
    if not 0 <= options.headroom < 0.9:
        raise UsageError(
            f"--headroom {options.headroom} is no share of the device; give one from 0 to 0.9, such as 0.05"
        )
    if not 0 <= options.min_gain < 1:
        raise UsageError(f"--min-gain {options.min_gain} is no share; give one from 0 to 1, such as 0.01 for 1 %")
    _seconds(options.max_time)
    machine = read_machine(options.device)
    task, facts = _make_task(options, machine)
    budget = make_budget(options, machine, facts)
    path = Path(options.out) if options.out is not None else RUNS_FOLDER / run_name(task, budget, machine)
    run = {
        "identity": digest(
            [codec.to_json_value(task), budget.device_bytes if options.budget else "default", machine.device]
        ),
        "command": " ".join(options.command) if options.command else f"--model {options.model}",
        "task": codec.to_json_value(task),
        "machine": codec.to_json_value(machine),
        "budget": codec.to_json_value(budget),
    }
    with RunDirectory.open(path, run) as directory, Launcher(machine, listener.probe_progressed) as launcher:
        listener.prepared(task, machine, budget, str(path), len(directory.measurements))
        for fact in facts:
            listener.said(fact)
        prepared = _Prepared(options, listener, began, task, machine, budget, directory, launcher)
        directory.write_run({**run, "description": codec.to_json_value(prepared._description)})
        yield prepared


def _make_task(options: Options, machine: Machine) -> tuple[Task, list[str]]:
    if options.command is not None:
        given = {
            "--task": options.task,
            "--seq-len": options.seq_len,
            "--image-size": options.image_size,
            "--effective-batch": options.effective_batch,
            "--dtype": options.dtype,
            "--lora": options.lora_rank,
            "--args": options.args,
            "--eval-rows": options.eval_rows,
        }
        used = [name for name, value in given.items() if value is not None]
        if used:
            raise UsageError(
                f"{', '.join(used)} belongs to --model; with a script, set it in the script or its own arguments"
            )
        script, facts = make_script_task(tuple(options.command))
        return Task(script=script), facts
    model, facts = make_model_task(
        options.model,
        transformers_version=machine.versions.get("transformers", ""),
        task=options.task,
        seq_len=options.seq_len,
        image_size=options.image_size,
        effective_batch=options.effective_batch,
        dtype=options.dtype,
        lora_rank=options.lora_rank,
        eval_rows=options.eval_rows,
        base_args=read_base_args(options.args),
    )
    return Task(model=model), ["assumed: " + "; ".join(facts)] if facts else []


def read_base_args(args: str | Path | dict | None) -> dict[str, Any]:
    """The user's TrainingArguments fields. Raises UsageError."""
    if args is None or isinstance(args, dict):
        return dict(args or {})
    try:
        value = json.loads(Path(args).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--args {args} cannot be read ({error.strerror}); give a JSON file with TrainingArguments fields"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"--args {args} is no JSON ({error}); give a JSON file with TrainingArguments fields"
        ) from error
    if not isinstance(value, dict):
        raise UsageError(f"--args {args} holds no JSON object; give TrainingArguments fields by name")
    return value


def make_budget(options: Options, machine: Machine, facts: list[str]) -> Budget:
    """The device budget, clamped to what the device has less the headroom, and the host budget. Raises DeviceError."""
    available = available_device_bytes(machine)
    if available is None:
        available = machine.device_bytes
    if machine.device != "cpu" and machine.device_bytes - available > BUSY_SHARE * machine.device_bytes:
        raise DeviceError(
            f"{machine.device_name} is busy: {format_bytes(machine.device_bytes - available)} of "
            f"{format_bytes(machine.device_bytes)} are held by other processes (nvidia-smi shows them); end them, or give --device"
        )
    usable = int(available * (1 - options.headroom))
    text = options.budget or ""
    wanted = parse_budget(text) if text else usable
    unit = unit_of(text) if text else "GiB"
    if wanted > usable:
        facts.append(
            f"budget {text} is more than {machine.device_name} can use; taken as {format_bytes(usable, unit)} ({options.headroom:.0%} headroom)"
        )
        wanted = usable
    host_available = available_host_bytes()
    host = parse_budget(options.host_budget) if options.host_budget else int(host_available * HOST_SHARE)
    return Budget(wanted, min(host, host_available), unit, text)


def baseline_of(description: Description) -> Candidate:
    """The user's own settings as a candidate; knobs that mean nothing for the workload are left out."""
    values = candidate_values(description.resolved)
    if description.attention is not None:
        values["attention"] = description.attention
    if not description.eval_rows:
        del values["per_device_eval_batch_size"], values["eval_accumulation_steps"]
    elif description.has_metrics and not description.has_logits_reduction:
        values["logits"] = "full"
    return Candidate(values)


def _train_candidates(space: Space) -> list[Candidate]:
    from autofit.knobs import KNOBS

    listed = [space.baseline]
    for name, values in space.values.items():
        if KNOBS[name].phase == "train" and "batch_size" not in name and name != "gradient_accumulation_steps":
            listed = [c.but({name: v}) for c in listed for v in values]
    return [space.with_batch(c, b) for c in listed for b in space.batches]


def _workload_error(task: Task, reply: Any, folder: Path) -> Exception:
    """What went wrong before training, in the user's words."""
    failure = reply.failure
    if failure.kind == "UsageError":
        return UsageError(failure.message)
    who = "the script" if task.script else "the model"
    excerpt = failure.traceback or log_tail(folder)
    if failure.kind == "no_trainer":
        return WorkloadError(
            f"{failure.message}; autofit needs a script that ends by calling the train() of a transformers Trainer",
            excerpt,
        )
    if failure.kind == "no_training":
        return WorkloadError(f"{failure.message}; the whole output is in {folder}", excerpt)
    return WorkloadError(f"{who} failed before training started ({failure.kind}: {failure.message})", excerpt)


def _matches(history: list[Measurement], key: str, values: dict[str, Any]) -> bool:
    candidate = next(m.candidate for m in history if m.candidate.key == key)
    return all(candidate.get(n) == v for n, v in values.items())


def _row(m: Measurement) -> dict[str, Any]:
    return {
        "probe": m.probe,
        "purpose": m.purpose,
        "outcome": m.outcome.value,
        **m.candidate.values,
        "train_per_second": m.train_speed.per_second if m.train_speed else None,
        "eval_per_second": m.eval_speed.per_second if m.eval_speed else None,
        "train_bytes": m.train_bytes,
        "eval_bytes": m.eval_bytes,
        "peak_bytes": m.peak_bytes,
        "host_bytes": m.host_bytes,
        "seconds": m.seconds,
        "failure": f"{m.failure.phase}: {m.failure.kind}" if m.failure else None,
    }


def _seconds(text: str | None) -> float | None:
    return None if text is None else parse_seconds(text)


def _empty(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a search as Ctrl-C does. Only the main thread may listen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
