"""From the stages of a search to what is emitted: the best that arguments alone can say, and the best with code.

Nothing is chosen that was not confirmed: the winner runs again from its files, and where that fails the next best does.
"""

import shutil
from pathlib import Path

from autofit.emission import write_files
from autofit.errors import RunDirectoryError, WorkloadError
from autofit.knobs import KNOBS, needs_code
from autofit.records import EVALUATION_PHASES, Candidate, Choice, Description, Machine, Measurement, Task
from autofit.selection import Scored, beats, score, usable
from autofit.study.confirmation import choice_of
from autofit.study.driver import Search
from autofit.study.judgement import UNMENDABLE

BEST, WITH_CODE = "best", "best-with-code"
MOST_FALLBACKS = 3  # winners that may fail their confirmation before the search gives up
TRAIN_FALLBACKS = 3  # training settings on top of which evaluation is tried
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
    ) -> None:
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
        for scored in self._search.ranked(in_code)[:TRAIN_FALLBACKS]:
            whole = self._search.run_evaluate(scored.candidate, in_code)
            if whole is not None:
                return whole
            if self._search.broken_evaluation() is not None:
                return scored.candidate
        return None

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
            choice = choice_of(confirmed, self._folder / name)
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
        if choice.gain is None or _phase_part(choice.candidate, "train") == _phase_part(self._baseline, "train"):
            return False
        room = self._baseline in self._search.confirmed() or self._search.may_confirm()
        return room and choice.gain < 1 - self._min_gain and self._search.space.holds(self._baseline, "train")

    def _next_best(self, failed: Candidate, tried: set[str], in_code: bool) -> Candidate | None:
        """One that an earlier run of this search has confirmed already, else the next by speed."""
        evaluation = _phase_part(failed, "evaluate")
        if self._failed_in_evaluation(failed):
            evaluation = _phase_part(self._search.space.start, "evaluate")
        candidates = [*self._search.confirmed(), *(s.candidate.but(evaluation) for s in self._search.ranked(in_code))]
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
        """Whether code paid in training, or in evaluation without a loss in training, beyond the noise."""
        noise = (with_code.train_spread**2 + best.train_spread**2) ** 0.5
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
