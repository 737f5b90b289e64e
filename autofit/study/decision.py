"""From the stages of a search to what is emitted: the best that arguments alone can say, and the best with code.

Nothing is chosen that was not confirmed: the winner runs again from its files, and where that fails the next best does.
"""

import shutil
from pathlib import Path

from autofit.emission import write_files
from autofit.errors import RunDirectoryError, WorkloadError
from autofit.extrapolation import WholeRun
from autofit.knobs import KNOBS, needs_code
from autofit.records import EVALUATION_PHASES, Candidate, Choice, Description, Machine, Measurement, Task
from autofit.selection import Scored, beats, score, score_run, usable, winner
from autofit.study.confirmation import choice_of
from autofit.study.driver import Search
from autofit.study.judgement import UNMENDABLE
from autofit.study.planner import MEMORY

BEST, WITH_CODE = "best", "best-with-code"
MOST_FALLBACKS = 3  # winners that may fail their confirmation before the search gives up
TRAIN_FALLBACKS = 3  # training settings on top of which evaluation is tried
RUN_SETTINGS = 4  # the same where the time of the whole run decides
EVAL_NOISE = 0.05  # a timed evaluation is one to three passes, too few for a spread
# Phase of a failure -> where it was; the others are steps of the training.
PLACES = {
    "load": "before the first step",
    "evaluate": "in evaluation",
    "generate": "in generating text for evaluation",
    "predict": "in predict()",
    "metrics": "in computing the metrics",
    "save": "in saving a checkpoint",
}


def failure_text(m: Measurement) -> str:
    """Where it failed, and how: `in step 2 (KeyError: a column)`."""
    step = f"in step {m.failure.step}" if m.failure.step else f"in {m.failure.phase}"
    return f"{PLACES.get(m.failure.phase, step)} ({m.failure.kind}: {m.failure.message})"


class Decision:
    """Runs the stages of `search` and writes the files of what it decides on into `folder`."""

    def __init__(
        self,
        search: Search,
        folder: Path,
        description: Description,
        machine: Machine,
        min_gain: float,
        task: Task,
        run: WholeRun | None = None,
    ) -> None:
        """`run`: by whose time candidates are chosen; None: by the speed of training."""
        self._run, self._wholes = run, []  # candidates by the time of the whole run, the fastest first
        self._search, self._folder, self._min_gain, self._task = search, folder, min_gain, task
        self._description, self._machine = description, machine
        self._baseline = search.space.baseline

    def run(self) -> tuple[Choice | None, Choice | None]:
        """(the best that `TrainingArguments` alone can say, the best that needs code), each None where there is none.

        Raises WorkloadError when the user's own settings fail for another reason than memory and nothing else runs.
        """
        whole = self._settle(in_code=False)
        best = self._confirm(BEST, whole, in_code=False)
        with_code = None
        if best is None or self._code_varies():
            whole = self._settle(in_code=True)
            if (
                whole is not None
                and needs_code(whole, self._baseline)
                and (best is None or (self._search.may_confirm() and self._measured_gain(whole, best.candidate)))
            ):
                with_code = self._confirm(WITH_CODE, whole, in_code=True)
        if with_code is not None and best is not None and not self._gains(with_code, best):
            with_code = None
        if with_code is None:
            shutil.rmtree(self._folder / WITH_CODE, ignore_errors=True)
        if best is None:
            shutil.rmtree(self._folder / BEST, ignore_errors=True)
        if best is None and with_code is None:
            self._check_confirmations()
        return best, with_code

    def _settle(self, in_code: bool) -> Candidate | None:
        """The fastest training settings on which evaluation fits too, with the fastest evaluation; None when none does."""
        self._search.run_train(in_code)
        self._check_own_settings()
        self._search.race(in_code)
        if self._run is not None:
            return self._settle_run(self._run, in_code)
        for scored in self._search.ranked(in_code)[:TRAIN_FALLBACKS]:
            whole = self._search.run_evaluate(scored.candidate, in_code)
            if whole is not None:
                return whole
            if self._search.broken_evaluation() is not None:
                return scored.candidate
            if self._host_is_short(scored.candidate):
                break
        return None

    def _host_is_short(self, train: Candidate) -> bool:
        """Whether what evaluation accumulates was too much for the host, whose memory other training settings leave as it
        is."""
        part = _phase_part(train, "train")
        failed = [m for m in self._search.history() if m.failure is not None and m.failure.kind == "host_growth"]
        return any(_phase_part(m.candidate, "train") == part for m in failed)

    @property
    def by_run(self) -> bool:
        """Whether the time of the whole run decides."""
        return self._run is not None

    def _settle_run(self, run: WholeRun, in_code: bool) -> Candidate | None:
        """The candidate whose whole run is the shortest: evaluation is tuned on each of the fastest training settings.

        They share the memory, so that slower training may leave room for a faster evaluation. Left out is what could not
        win: settings whose training alone takes longer than the best whole run so far, and those whose evaluation is
        another one in nothing.
        """
        found: list[Scored] = []
        tried: list[Scored] = []
        for scored in self._search.ranked(in_code):
            if len(tried) == RUN_SETTINGS:
                break
            alone = run.seconds(scored.rate, 0.0)
            if found and alone is not None and alone.total * max(s.rate for s in found) >= 1:
                continue
            if tried and not self._evaluates_otherwise(scored, tried):
                continue
            tried.append(scored)
            best = winner(found, self._min_gain)
            whole = self._search.run_evaluate(scored.candidate, in_code, None if best is None else best.candidate)
            if whole is None and self._search.broken_evaluation() is None:
                if self._host_is_short(scored.candidate):
                    break
                continue
            of_run = score_run(scored, [m for m in self._search.history() if m.candidate == whole], run)
            if of_run is None and not found:
                self._search.say("no evaluation can be timed, so that training throughput decides")
                self._run = None
                return whole or scored.candidate
            found += [] if of_run is None else [of_run]
        best = winner(found, self._min_gain)
        self._wholes = [s.candidate for s in sorted(found, key=lambda s: (s is not best, -s.rate))]
        return None if best is None else best.candidate

    def _evaluates_otherwise(self, scored: Scored, tried: list[Scored]) -> bool:
        """Whether evaluation may be faster on it than on those: by another kernel or precision, or, where memory was what
        bounded it, by a smaller peak."""
        traits = lambda s: [s.candidate.get(name) for name in ("precision", "attention")]  # noqa: E731
        if all(traits(scored) != traits(other) for other in tried):
            return True
        parts = [_phase_part(other.candidate, "train") for other in tried]
        bounded = any(
            m.outcome in MEMORY and m.purpose == "evaluate" and _phase_part(m.candidate, "train") in parts
            for m in self._search.history()
        )
        return bounded and scored.peak_bytes < min(other.peak_bytes for other in tried)

    def _check_own_settings(self) -> None:
        m = self._search.baseline_measurement()
        if m is None or m.outcome not in UNMENDABLE or usable(self._search.history()):
            return
        others = any(x.candidate != m.candidate for x in self._search.history())
        raise self._workload_error(
            "your own settings fail", m, " and so does everything tried instead" if others else ""
        )

    def _workload_error(self, what: str, m: Measurement, more: str = "") -> WorkloadError:
        where = failure_text(m)
        return WorkloadError(
            f"{what} {where}{more}; the whole output is in {self._folder / 'probes' / m.probe}", m.failure.traceback
        )

    def notes(self) -> tuple[str, ...]:
        """What has to be known of the answer."""
        m = self._search.broken_evaluation()
        if m is None:
            return ()
        return (
            f"evaluation fails by itself, {failure_text(m)}, so this holds for training alone; the whole output is in "
            f"{self._folder / 'probes' / m.probe}",
        )

    def _check_confirmations(self) -> None:
        """Where every confirmation failed for another reason than memory, that reason is the answer."""
        failed = [m for m in self._search.history() if m.purpose.startswith("confirm") and m.failure is not None]
        if failed and all(m.outcome in UNMENDABLE for m in failed):
            raise self._workload_error("the search found settings that fit, but whole runs fail", failed[-1])

    def _confirm(self, name: str, candidate: Candidate | None, in_code: bool) -> Choice | None:
        """Confirm `candidate` from draft files, then the next best ones; what is confirmed becomes folder `name`."""
        draft = self._folder / f"unconfirmed-{name}"
        tried: set[str] = set()
        while candidate is not None and len(tried) < MOST_FALLBACKS:
            if tried and candidate not in self._search.confirmed() and not self._search.may_confirm():
                self._search.say("no probes are left to confirm the next best; raise --max-probes")
                break
            tried.add(candidate.key)
            try:
                self._emit(draft, candidate)
                confirmed = self._search.confirm(candidate, draft)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            if confirmed is None:
                self._search.say("the winner failed its confirmation; the next best is confirmed instead")
                candidate = self._next_best(candidate, tried, in_code)
                continue
            choice = choice_of(confirmed, self._folder / name, self._run)
            if not in_code and self._baseline.key not in tried and self._is_slower(choice):
                self._search.say(
                    "the winner was slower than your own settings in its confirmation; yours are confirmed"
                )
                candidate = self._baseline
                continue
            self._emit(self._folder / name, candidate)
            return choice
        return None

    def _is_slower(self, choice: Choice) -> bool:
        """Whether other training settings than the user's own lost to them in turn, and there is room to confirm those."""
        trains_alike = _phase_part(choice.candidate, "train") == _phase_part(self._baseline, "train")
        if choice.gain is None or (trains_alike and self._run is None):
            return False
        room = self._baseline in self._search.confirmed() or self._search.may_confirm()
        return room and choice.gain < 1 - self._min_gain and self._search.space.holds(self._baseline, "train")

    def _next_best(self, failed: Candidate, tried: set[str], in_code: bool) -> Candidate | None:
        """One that an earlier run of this search has confirmed already, else the next by speed."""
        evaluation = _phase_part(failed, "evaluate")
        if self._failed_in_evaluation(failed):
            evaluation = _phase_part(self._search.space.start, "evaluate")
        ranked = [s.candidate.but(evaluation) for s in self._search.ranked(in_code)]
        candidates = [*self._search.confirmed(), *self._wholes, *ranked]
        return next((c for c in candidates if c.key not in tried and needs_code(c, self._baseline) == in_code), None)

    def _failed_in_evaluation(self, candidate: Candidate) -> bool:
        failures = [m.failure for m in self._search.history() if m.purpose == "confirm" and m.candidate == candidate]
        return bool(failures) and failures[-1] is not None and failures[-1].phase in EVALUATION_PHASES

    def _emit(self, folder: Path, candidate: Candidate) -> None:
        try:
            write_files(folder, candidate, self._baseline, self._description, self._machine.device, task=self._task)
        except OSError as error:
            raise RunDirectoryError(
                f"{folder} cannot be written ({error.strerror}); make room for it and run the same command again, it resumes"
            ) from error

    def _code_varies(self) -> bool:
        return any(KNOBS[name].in_code and len(values) > 1 for name, values in self._search.space.values.items())

    def _measured_gain(self, candidate: Candidate, best: Candidate) -> bool:
        """Whether its probes were faster in a phase in which it differs: only then is it worth a confirmation."""
        for phase in ("train", "evaluate"):
            part, other = _phase_part(candidate, phase), _phase_part(best, phase)
            if part != other:
                history = self._search.history()
                mine, theirs = _fastest(history, part, phase), _fastest(history, other, phase)
                if mine is not None and theirs is not None and beats(mine, theirs, self._min_gain):
                    return True
        return False

    def _gains(self, with_code: Choice, best: Choice) -> bool:
        """Whether code paid in training, or in evaluation without a loss in training, beyond the noise; where the whole
        run decides, whether that is shorter."""
        noise = (with_code.train_spread**2 + best.train_spread**2) ** 0.5
        if self._run is not None:
            mine, theirs = (self._run.seconds(c.train_per_second, c.eval_seconds) for c in (with_code, best))
            if mine is not None and theirs is not None:
                return theirs.total / mine.total - 1 > max(self._min_gain, noise * (1 - mine.eval_share))
        train = with_code.train_per_second / best.train_per_second - 1
        if train > max(self._min_gain, noise):
            return True
        evaluate = (with_code.eval_per_second or 0.0) / best.eval_per_second - 1 if best.eval_per_second else 0.0
        return train > -noise and evaluate > max(self._min_gain, EVAL_NOISE)


def _phase_part(candidate: Candidate, phase: str) -> dict:
    return {name: value for name, value in candidate.values.items() if KNOBS[name].phase == phase}


def _fastest(history: list[Measurement], part: dict, phase: str) -> Scored | None:
    """The fastest candidate that has these values."""
    return next((s for s in score(history, phase) if all(s.candidate.get(n) == v for n, v in part.items())), None)
