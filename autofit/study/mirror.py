"""Optuna's view of a search: every probe is a trial that was asked for and told, in a storage that its tools open.

The journal is the truth and the study its mirror: it is rebuilt when it is missing, behind, damaged or holds a trial
that never ended. Training and evaluation are two studies, since rows per second of the two are not one objective. An
out-of-memory is told as a value with a violated constraint, so that no sampler retries it as if it were unlucky.

`eval_accumulation_steps` is an integer, of which 0 says that nothing is moved before the end (None).
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from autofit.knobs import KNOBS, Space
from autofit.records import Budget, Candidate, Measurement, Outcome

PHASES = {"baseline": "train", "train": "train", "evaluate": "evaluate"}
STORAGE_ERRORS = (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError, OSError)


class PlanSampler(optuna.samplers.BaseSampler):
    """Suggests the candidate that the plan has decided on; the plan holds what Optuna's samplers cannot know (memory)."""

    def __init__(self, distributions: dict[str, BaseDistribution], decided: Callable[[], dict[str, Any]]) -> None:
        self._distributions, self._decided = distributions, decided

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: optuna.Study, trial: Any, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        decided = self._decided()
        return {name: decided[name] for name in search_space}

    def sample_independent(self, study: optuna.Study, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._decided()[param_name]


class Mirror:
    """The two studies of one search."""

    def __init__(
        self, path: Path, space: Space, history: Iterable[Measurement], budget: Budget, say: Callable[[str], None]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._path, self._budget, self._say = path, budget, say
        self._decided: dict[str, Any] = {}
        self._trial: optuna.trial.Trial | None = None
        history = [m for m in history if m.purpose in PHASES]
        self._distributions = _distributions(space, history)
        self._studies: dict[str, optuna.Study] = {}
        try:
            self._open(history)
        except STORAGE_ERRORS as error:
            self._give_up(error)

    def _open(self, history: list[Measurement]) -> None:
        try:
            self._studies = self._load()
            if self._is_current(history):
                return
        except (*STORAGE_ERRORS, KeyError, ValueError):
            self._studies = {}
        for leftover in (self._path, *self._path.parent.glob(f"{self._path.name}-*")):
            leftover.unlink(missing_ok=True)
        self._studies = self._load()
        for m in history:
            phase = PHASES[m.purpose]
            self._studies[phase].add_trial(
                create_trial(
                    state=TrialState.COMPLETE,
                    value=value(m, phase),
                    params=_parameters(m.candidate, self._distributions),
                    distributions=self._distributions,
                    user_attrs=attributes(m),
                    constraints=constraints(m, self._budget),
                )
            )

    def _load(self) -> dict[str, optuna.Study]:
        storage = optuna.storages.RDBStorage(f"sqlite:///{self._path.resolve()}")
        sampler = PlanSampler(self._distributions, lambda: self._decided)
        return {
            phase: optuna.create_study(
                storage=storage, study_name=phase, direction="maximize", sampler=sampler, load_if_exists=True
            )
            for phase in ("train", "evaluate")
        }

    def _is_current(self, history: list[Measurement]) -> bool:
        told = {}
        for study in self._studies.values():
            for trial in study.get_trials(deepcopy=False):
                if not trial.state.is_finished() or trial.distributions != self._distributions:
                    return False
                told[trial.user_attrs.get("probe")] = trial
        return set(told) == {m.probe for m in history}

    def ask(self, candidate: Candidate, purpose: str) -> None:
        """Begin the trial of a probe that is about to start."""
        if not self._studies or purpose not in PHASES:
            return
        self._decided = _parameters(candidate, self._distributions)
        try:
            self._trial = self._studies[PHASES[purpose]].ask(fixed_distributions=self._distributions)
        except STORAGE_ERRORS as error:
            self._give_up(error)

    def tell(self, measurement: Measurement) -> None:
        """End that trial with what was measured."""
        if self._trial is None or measurement.purpose not in PHASES:
            return
        trial, self._trial = self._trial, None
        phase = PHASES[measurement.purpose]
        try:
            for name, bound in constraints(measurement, self._budget).items():
                trial.set_constraint(name, bound)
            for name, fact in attributes(measurement).items():
                trial.set_user_attr(name, fact)
            self._studies[phase].tell(trial, value(measurement, phase))
        except STORAGE_ERRORS as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._studies, self._trial = {}, None
        first = next(iter(str(error).splitlines()), type(error).__name__)
        self._say(f"study.db cannot be written ({first}); the journal goes on, and the next run makes it again")

    def close(self) -> None:
        """End a trial whose probe was interrupted, so that none stays running."""
        if self._trial is not None:
            trial, self._trial = self._trial, None
            with contextlib.suppress(*STORAGE_ERRORS):
                trial.study.tell(trial, state=TrialState.FAIL)


def value(measurement: Measurement, phase: str) -> float:
    """Rows per second in the phase; 0 where there is none. Whether it counts is said by the constraints."""
    if phase == "evaluate":
        return measurement.eval_per_second or 0.0
    return measurement.train_speed.per_second if measurement.train_speed is not None else 0.0


def constraints(measurement: Measurement, budget: Budget) -> dict[str, float]:
    """Feasible where all are ≤ 0. `memory`: peak over budget less one; 1 where it ran out and the peak is unknown."""
    peak = measurement.peak_bytes
    out_of_memory = measurement.outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM)
    memory = 1.0 if out_of_memory or peak is None else peak / budget.device_bytes - 1
    runs = 0.0 if measurement.ran or out_of_memory else 1.0
    return {"memory": memory, "runs": runs}


def attributes(measurement: Measurement) -> dict[str, Any]:
    """What optuna-dashboard shows beside the values."""
    return {
        "probe": measurement.probe,
        "outcome": measurement.outcome.value,
        "peak_bytes": measurement.peak_bytes,
        "accumulation": measurement.candidate.get("gradient_accumulation_steps"),
        "seconds": round(measurement.seconds, 3),
    }


def _distributions(space: Space, history: list[Measurement]) -> dict[str, BaseDistribution]:
    """One categorical per knob that varies, over the space's values and those that an earlier run has measured; integers
    where the space takes any."""
    found: dict[str, BaseDistribution] = {}
    for name, values in space.values.items():
        if name == "gradient_accumulation_steps" or name not in KNOBS:
            continue
        if name in space.integers:
            known = [space.baseline[name], *(m.candidate.get(name) for m in history)]
            found[name] = IntDistribution(0, max(space.integers[name], *(int(v or 0) for v in known)))
            continue
        choices = list(
            dict.fromkeys(
                [
                    *values,
                    space.baseline[name],
                    *(m.candidate.values[name] for m in history if name in m.candidate.values),
                ]
            )
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = CategoricalDistribution(choices)
    return found


def _parameters(candidate: Candidate, distributions: dict[str, BaseDistribution]) -> dict[str, Any]:
    """Its values as Optuna takes them."""
    whole = {n for n, d in distributions.items() if isinstance(d, IntDistribution)}
    return {n: int(candidate.values[n] or 0) if n in whole else candidate.values[n] for n in distributions}
