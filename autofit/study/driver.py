"""The search: describe, baseline, train knobs, evaluation knobs, race, confirm; every step a probe in a child.

It asks the plan, has the candidate measured, writes the journal, tells the mirror. It decides nothing that the journal
does not show, so a search that was killed goes on where it stopped.
"""

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from autofit.emission import write_files
from autofit.errors import RunDirectoryError, WorkloadError
from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.knobs import KNOBS, Space, needs_code, switches_of
from autofit.launch import Launcher
from autofit.leak_words import leak_sentences
from autofit.prediction import Predictor, ShadowRuns, make_target
from autofit.prediction.predictor import SHADOW_SECONDS
from autofit.records import (
    EVALUATION_PHASES,
    Budget,
    Candidate,
    Description,
    Machine,
    Measurement,
    Outcome,
    Request,
    Schedule,
    Task,
)
from autofit.selection import (
    Scored,
    decided,
    fits_training,
    leaders,
    score,
    usable,
    winner,
)
from autofit.store import PROVISIONAL, SHADOWS, RunDirectory
from autofit.study.confirmation import CONFIRM_RUNS, Confirmed, Turn, confirmed_in, turns_of
from autofit.study.judgement import SPEED_KNOWN, UNMENDABLE, judge, measurement_of
from autofit.study.listener import Listener
from autofit.study.mirror import Mirror
from autofit.study.planner import EvaluatePlan, TrainPlan
from autofit.study.snapshot_watch import CANARY, SnapshotWatch
from autofit.trainer_args import arguments_of

SHADOW_SHARE = 0.25  # of the time of probes, that shadow runs may take beyond `SHADOW_SECONDS`
LEAST_SHADOW_LIMIT, MOST_SHADOW_LIMIT = 10.0, 600.0  # seconds that one shadow run may take
MOST_REPEATS = 2  # of disturbed probes in one search: on a machine that is never quiet the answer must come anyway
FIRST_LIMIT_SECONDS = 1800.0  # until a probe has run: nothing is known
LIMIT_FACTOR, LEAST_LIMIT_SECONDS = 6.0, 120.0  # a candidate this much slower than the slowest so far cannot win
RUN_AGAIN = "run the same command again, it resumes"
DISK_FULL = ("No space left on device", "Disk quota exceeded", "exit 74")  # 74: the child could not write its reply
RACE_ROUNDS = 2


@dataclass(frozen=True)
class Limits:
    max_probes: int
    max_seconds: float | None
    min_gain: float
    seed: int


class Search:
    """One search over a described workload, in one run directory."""

    def __init__(
        self,
        *,
        task: Task,
        machine: Machine,
        budget: Budget,
        description: Description,
        space: Space,
        directory: RunDirectory,
        launcher: Launcher,
        limits: Limits,
        listener: Listener,
        began: float,
    ) -> None:
        """`began` is when the whole search did, by the monotonic clock: `--max-time` counts the description too."""
        self._task, self._machine, self._budget = task, machine, budget
        self._description, self.space = description, space
        self._directory, self._launcher, self._limits, self._listener = directory, launcher, limits, listener
        self._began = began
        self._shadows = ShadowRuns(
            task,
            description,
            make_target(machine=machine),
            launcher,
            directory.path / SHADOWS,
            machine.versions,
            on_run=self._before_shadow_run,
            limit=self._shadow_limit,
        )
        self._predictor = Predictor(description, machine.device, self._shadows)
        self._snapshot = SnapshotWatch(launcher, listener.said)
        self._mirror = Mirror(directory.path / "study.db", space, self.history(), budget, listener.said)
        self._repeats = 0
        self._said_limit = self._said_leaks = False
        for m in self.history():
            self._predictor.learn(m)
        largest = max((int(b) for b in space.values.get("per_device_eval_batch_size", (0,))), default=0)
        # Every batch size is full at least once; small ones several times.
        self._timed_eval_rows = max(largest, min(2 * largest, 256)) if description.eval_rows else 0

    # ---- what is known ----

    def history(self) -> list[Measurement]:
        """Measurements that count here, in order, judged by the present budgets.

        Not those of other libraries or machines, of a workload with other knobs, nor of a probe that somebody killed.
        """
        known = [m for m in self._measured() if m.purpose != CANARY and m.outcome is not Outcome.KILLED]
        return [m for m in known if not (self._snapshot.rejected and m.start == "snapshot")]

    def _measured(self) -> list[Measurement]:
        knobs = self.space.baseline.values.keys()
        mine = [m for m in self._directory.measurements if m.device == self._machine.key]
        return [judge(m, self._budget) for m in mine if m.candidate.values.keys() == knobs]

    def baseline_measurement(self) -> Measurement | None:
        """The last word on the user's own settings: undisturbed where there is one."""
        own = [m for m in self.history() if m.purpose == "baseline"]
        return next((m for m in own if m.outcome is not Outcome.CONTAMINATED), own[0] if own else None)

    def close(self) -> None:
        self._mirror.close()

    def say(self, text: str) -> None:
        self._listener.said(text)

    def out_of_time(self, also_kept: int = 0) -> str | None:
        """Why the search stops before its plan ends; None while it may go on.

        The confirmation's probes are kept back, and `also_kept` of the stages that are still to come.
        """
        if len(self.history()) >= self._limits.max_probes - 2 * CONFIRM_RUNS - also_kept:
            return f"--max-probes {self._limits.max_probes} is reached, the confirmation's {2 * CONFIRM_RUNS} kept back"
        if self._limits.max_seconds is not None:
            used = time.monotonic() - self._began
            if used + self._confirm_seconds() > self._limits.max_seconds:
                return f"--max-time is reached after {used:.0f} s, the time of the confirmation kept back"
        return None

    def _confirm_seconds(self) -> float:
        longest = max((m.seconds for m in self.history() if m.ran), default=0.0)
        return 2 * CONFIRM_RUNS * (longest + 4.0)  # they start a fresh interpreter

    def seconds_left(self) -> float | None:
        """A guess for the rest: what probes took so far, for a typical search, and the confirmation."""
        done = [m.seconds for m in self.history()]
        if not done:
            return None
        expected = max(min(self._limits.max_probes - 2 * CONFIRM_RUNS, 14) - len(done), 0) * sum(done) / len(done)
        left = expected + self._confirm_seconds()
        if self._limits.max_seconds is not None:
            left = min(left, max(self._limits.max_seconds - (time.monotonic() - self._began), 0.0))
        return left

    # ---- the stages ----

    def run_train(self, in_code: bool) -> None:
        """Probe training candidates until the plan ends or the limits do."""
        self._check_snapshot()
        plan = TrainPlan(self.space, self._predictor, self._description, self._budget)
        while True:
            step = plan.next(self.history(), in_code)
            if step is None:
                break
            if step.purpose != "baseline" and self._stopped(also_kept=1 if self._description.eval_rows else 0):
                break
            # A script's own preparation may take minutes, so that its first probe comes before its first shadow run.
            may_trace = step.purpose != "baseline" or self._task.script is None
            if may_trace and (self._trace(self.space.baseline) or self._trace(step.candidate)):
                for m in self.history():
                    self._keep_prediction(m.candidate)
                continue  # what is known now may speak for another candidate
            timed = step.purpose == "baseline"
            self.measure(step.candidate, step.purpose, step.why, evaluate=timed)
            if timed:
                self._check_snapshot()
                self._say_broken_evaluation()

    def _check_snapshot(self) -> None:
        """Once the baseline has run; it counts for no limit."""

        def measured() -> list[Measurement]:
            own = [m for m in self._measured() if m.purpose in ("baseline", CANARY)]
            return [m for m in own if m.candidate == self.space.baseline]

        def canary(way: str) -> Measurement:
            why = "the same settings started in the other way, to measure alike"
            return self._probe(self.space.baseline, CANARY, why, True, False, False, way, None)

        if measured():
            self._snapshot.check(measured, canary, hurried=self.out_of_time() is not None)

    def _say_broken_evaluation(self) -> None:
        own = self.baseline_measurement()
        if own is not None and own.outcome in UNMENDABLE and own.failure.phase in EVALUATION_PHASES:
            self.say(
                f"your own settings train, and their evaluation fails ({own.failure.kind}: {own.failure.message}): it is tried "
                "once more on the best training settings"
            )

    def _trace(self, candidate: Candidate) -> bool:
        """Make the shadow runs of a structure that has none, while there is time. Returns whether there are new ones.

        They never run beside a probe. Where probes are short they are not worth their time, so they may take a share of
        what probes have taken so far.
        """
        if self.out_of_time():
            return False
        had_failed = self._predictor.untraceable
        most = SHADOW_SECONDS + SHADOW_SHARE * sum(m.seconds for m in self.history())
        traced = self._predictor.trace(candidate, most)
        failure = self._predictor.untraceable
        if failure is not None and had_failed is None:
            self.say(
                f"no shadow runs: {failure.phase} cannot be traced ({failure.kind}: {failure.message}); estimates are by formula"
            )
        return traced

    def _shadow_limit(self) -> float:
        """Seconds that the next shadow run may take: what is left of `--max-time`, less the confirmation."""
        if self._limits.max_seconds is None:
            return MOST_SHADOW_LIMIT
        left = self._limits.max_seconds - (time.monotonic() - self._began) - self._confirm_seconds()
        return min(max(left, LEAST_SHADOW_LIMIT), MOST_SHADOW_LIMIT)

    def _before_shadow_run(self, _: str) -> None:
        """Import once what fake tensors bring along; again after that costs nothing."""
        if self._launcher.way == "fork":
            self._launcher.warm((*FIRST_IMPORTS, *SHADOW_IMPORTS))

    def run_evaluate(self, chosen: Candidate, in_code: bool, like: Candidate | None = None) -> Candidate | None:
        """Probe evaluation candidates on top of `chosen`, beginning with the batch of `like`. Returns the best that fits;
        None when none does."""
        own = self.baseline_measurement()
        if not self._description.eval_rows or (own is not None and own.ran and own.eval_speed is None):
            return chosen  # there is none, or one that the script makes by itself
        plan = EvaluatePlan(self.space, chosen, self._budget, self._machine.device, like)
        while self.broken_evaluation() is None:
            step = plan.next(self.history(), in_code)
            if step is None or self._stopped():
                break
            self.measure(step.candidate, step.purpose, step.why, train=False)
        return plan.best(in_code)

    def broken_evaluation(self) -> Measurement | None:
        """The user's own settings where their evaluation fails by itself, and so does that of others; None elsewhere.

        Such a workload is tuned for its training alone: what its evaluation takes nobody can measure.
        """
        own = self.baseline_measurement()
        if own is None or own.outcome not in UNMENDABLE or own.failure.phase not in EVALUATION_PHASES:
            return None
        if not self._description.eval_rows:  # by a loader of its own: there are no evaluations beside
            return own
        others = [m for m in self.history() if m.purpose == "evaluate"]
        return own if others and all(m.outcome in UNMENDABLE for m in others) else None

    def race(self, in_code: bool) -> None:
        """Measure the leaders again in turn until their order is settled."""
        while True:
            close = leaders(self._scored(in_code), self._limits.min_gain)
            undecided = [other for other in close[1:] if not decided(close[0], other, self._limits.min_gain)]
            raced = [m.candidate for m in self.history() if m.purpose == "race"]
            contenders = [s.candidate for s in (*close[:1], *undecided) if raced.count(s.candidate) < RACE_ROUNDS]
            kept = len(contenders) - 1 + (1 if self._description.eval_rows else 0)
            if not undecided or not contenders or self._stopped(also_kept=kept):
                break
            for contender in contenders:
                self.measure(contender, "race", "nearly as fast as the best", evaluate=False)

    def ranked(self, in_code: bool) -> list[Scored]:
        """Training candidates that fit, the winner first: what the confirmation goes through."""
        scored = self._scored(in_code)
        first = winner(scored, self._limits.min_gain)
        return [] if first is None else [first, *(s for s in scored if s.candidate != first.candidate)]

    def _scored(self, in_code: bool) -> list[Scored]:
        """Candidates whose training fits, by its speed; what became of their evaluation is another stage's matter."""
        kept = []
        for m in self.history():
            if m.purpose.startswith("confirm") or not fits_training(m, self._budget):
                continue
            if not self.space.holds(m.candidate, "train"):
                continue
            if in_code or not needs_code(m.candidate, self.space.baseline):
                outcome = m.outcome if m.outcome is Outcome.CONTAMINATED else Outcome.FITS
                kept.append(dataclasses.replace(m, outcome=outcome))
        return score(kept, "train")

    def confirm(self, candidate: Candidate, files: Path) -> Confirmed | None:
        """Run `candidate` from its emitted files alone, in fresh processes, in turn with the baseline.

        A turn in which somebody else used the machine is run again, once in all. Turns that an earlier run of this
        search has left count. Returns None when a run does not fit.
        """
        compare = self._baseline_ran() and candidate != self.space.baseline
        while True:
            turns = turns_of(candidate, self.history())
            if any(run.outcome not in SPEED_KNOWN for _, run in turns):
                return None
            clean = [turn for turn in turns if all(m is None or m.outcome is Outcome.FITS for m in turn)]
            if len(clean) >= CONFIRM_RUNS or (len(turns) > CONFIRM_RUNS - 1 and not self._may_turn_again(turns)):
                return Confirmed(candidate, tuple(turns))
            if compare:
                why = "the user's own settings, in turn with the winner"
                self._probe_whole(self.space.baseline, "confirm-baseline", why, None)
            why = f"run {len(turns) + 1} from the emitted files"
            self._probe_whole(candidate, "confirm", why, files)

    def _may_turn_again(self, turns: list[Turn]) -> bool:
        return len(turns) == CONFIRM_RUNS and len(self.history()) + 2 <= self._limits.max_probes

    def confirmed(self) -> list[Candidate]:
        """Candidates whose confirmation is in the journal whole, all runs fitting."""
        return confirmed_in(self.history())

    def may_confirm(self) -> bool:
        """Whether the probes of one more confirmation are left."""
        return len(self.history()) + 2 * CONFIRM_RUNS <= self._limits.max_probes

    def _baseline_ran(self) -> bool:
        if self.broken_evaluation() is not None:  # its training runs
            return any(m.candidate == self.space.baseline for m in usable(self.history()))
        baseline = self.baseline_measurement()
        return baseline is not None and baseline.outcome in (Outcome.FITS, Outcome.CONTAMINATED)

    # ---- one measurement ----

    def measure(
        self,
        candidate: Candidate,
        purpose: str,
        why: str,
        *,
        train: bool = True,
        evaluate: bool = True,
        save: bool = False,
        how: str | None = None,
        files: Path | None = None,
    ) -> Measurement:
        """Probe `candidate`, again where somebody else used the machine or killed it. The last attempt is returned."""
        while True:
            measurement = self._probe(candidate, purpose, why, train, evaluate, save, how, files)
            disturbed = measurement.outcome in (Outcome.CONTAMINATED, Outcome.KILLED)
            if not disturbed or self._repeats >= MOST_REPEATS or self.out_of_time():
                return measurement
            self._repeats += 1
            why = f"again: {measurement.notes[-1] if measurement.notes else measurement.outcome.value}"

    def _probe_whole(self, candidate: Candidate, purpose: str, why: str, files: Path | None) -> None:
        """One run of a confirmation, once more where it was killed from outside."""
        evaluate = self.broken_evaluation() is None
        for _ in range(2):
            if self._probe(candidate, purpose, why, True, evaluate, True, "fresh", files).outcome is not Outcome.KILLED:
                return
        raise WorkloadError(f"two runs of the confirmation in a row were killed from outside; {RUN_AGAIN}")

    def _probe(
        self,
        candidate: Candidate,
        purpose: str,
        why: str,
        train: bool,
        evaluate: bool,
        save: bool,
        how: str | None,
        files: Path | None,
    ) -> Measurement:
        folder = self._directory.new_probe()
        arguments = arguments_of(candidate, self._description.fields, self._machine.device, self._description.resolved)
        kwargs = {}
        if candidate.get("attention") is not None:
            kwargs["attn_implementation"] = candidate["attention"]
        request = Request(
            probe=folder.name,
            folder=str(folder),
            task=self._task,
            device=self._machine.device,
            schedule=Schedule(
                timed_steps=10 if train else 0,
                evaluate=evaluate,
                predict=evaluate and self._description.predicts,
                save=save,
                seed=self._limits.seed,
                sampled_rows=self._description.sampled_rows,
                sampled_eval_rows=self._description.sampled_eval_rows,
            ),
            arguments=arguments,
            model_kwargs={} if files else kwargs,
            logits=None if files else candidate.get("logits"),
            switches=switches_of(candidate, self._description),
            files=str(files.resolve()) if files else None,
            budget_bytes=self._budget.device_bytes,
            timed_eval_rows=self._timed_eval_rows if evaluate else 0,
        )
        how = how or self._launcher.way
        self._listener.probe_started(folder.name, purpose, candidate, why, self.seconds_left())
        if purpose != CANARY:
            self._mirror.ask(candidate, purpose)
        ended = self._launcher.probe(
            request,
            how=how,
            time_limit=self._time_limit(),
            host_budget=self._budget.host_bytes,
            options=self._task.script.interpreter_options if self._task.script else (),
            expected=arguments,
        )
        self._snapshot.tell(request, how, ended.how)
        measurement = measurement_of(
            ended, request, candidate, purpose, self._budget, self._machine, self._predictor.prediction(candidate)
        )
        self._keep_prediction(candidate)
        if measurement.failure is not None and any(sign in measurement.failure.message for sign in DISK_FULL):
            raise RunDirectoryError(
                f"probe {folder.name} could not write ({measurement.failure.message}); free some space and run the same "
                "command again, it resumes"
            )
        self._directory.record(measurement)
        if purpose != CANARY:
            self._mirror.tell(measurement)
            self._predictor.learn(measurement)
            self._keep_provisional(measurement)
        self._listener.probe_ended(measurement, self._best_so_far())
        self._say_leaks(measurement)
        return measurement

    def _say_leaks(self, measurement: Measurement) -> None:
        """What a probe was seen to keep, once in a search. The baseline's notes, where it is too, are shown by themselves."""
        sentences = leak_sentences(measurement.leaks)
        if not self._said_leaks and measurement.purpose != "baseline":
            for sentence in sentences:
                self.say(sentence)
        self._said_leaks |= bool(sentences)

    def _keep_prediction(self, candidate: Candidate) -> None:
        """What was predicted of a candidate goes to the journal beside what is measured of it."""
        machine = self._machine.key
        if any(p.machine == machine and p.candidate == candidate for p in self._directory.predictions):
            return
        prediction = self._predictor.prediction(candidate)
        if prediction is not None:
            self._directory.record_prediction(dataclasses.replace(prediction, machine=machine))

    def _time_limit(self) -> float:
        longest = max((m.seconds for m in self.history() if m.ran), default=None)
        return FIRST_LIMIT_SECONDS if longest is None else max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * longest)

    def _best_so_far(self) -> Measurement | None:
        """The fastest that fits and needs no code."""
        fitting = [
            m
            for m in usable(self.history())
            if m.train_speed is not None and not needs_code(m.candidate, self.space.baseline)
        ]
        return max(fitting, key=lambda m: m.train_speed.per_second, default=None)

    def _keep_provisional(self, measurement: Measurement) -> None:
        """Write the files of a new best at once, so that a search that is stopped leaves something to use."""
        best = self._best_so_far()
        if best is not measurement or measurement.purpose.startswith("confirm") or not self._evaluation_fits(best):
            return
        # A full disk is told of by the journal, which the search cannot do without.
        with contextlib.suppress(OSError):
            folder = self._directory.path / PROVISIONAL
            write_files(
                folder, best.candidate, self.space.baseline, self._description, self._machine.device, task=self._task
            )

    def _evaluation_fits(self, best: Measurement) -> bool:
        """Whether evaluation with its knobs was seen to fit, if only beside other training settings."""
        if not self._description.eval_rows or self.broken_evaluation() is not None:
            return True
        names = [n for n in best.candidate.values if KNOBS[n].phase == "evaluate"]
        return any(
            m.outcome in SPEED_KNOWN
            and m.phase("evaluate") is not None
            and all(m.candidate[n] == best.candidate[n] for n in names)
            for m in self.history()
        )

    def _stopped(self, also_kept: int = 0) -> bool:
        """Whether a limit ends the search here; said once."""
        why = self.out_of_time(also_kept)
        if why is not None and not self._said_limit:
            self._said_limit = True
            self.say(why)
        return why is not None
