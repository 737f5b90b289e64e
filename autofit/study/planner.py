"""What to probe next, from what was measured and traced.

The same history gives the same next candidate where the same structures have been traced: traces are kept in the run
directory, so runs resume.

Training first: the full effective batch at once, the frontier of the batch size by bisection, then one knob after the
other flipped at the best found so far, until no flip is left that could win. Evaluation next, on top of the chosen
training settings. Estimates order candidates and say what an out-of-memory rules out; only measurements decide.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autofit.knobs import KNOBS, Space, refusal
from autofit.prediction import Predictor, structure
from autofit.records import EVALUATION_PHASES, METRICS_FIELDS, Budget, Candidate, Description, Measurement, Outcome
from autofit.selection import fits_training
from autofit.study.flushing import choose_steps, seconds_with

DEVICE_MEMORY = (Outcome.DEVICE_OOM, Outcome.OVER_BUDGET)
MEMORY = (Outcome.DEVICE_OOM, Outcome.HOST_OOM, Outcome.OVER_BUDGET)
OTHER_STRUCTURE = 1.05  # above one that ran out, by prediction: peaks of two structures compare within their errors
WORTH_CLIMBING = 0.97  # a structure this near to the best is followed to larger batches
IN_CODE = ("logits", *METRICS_FIELDS)  # knobs of evaluation that need code, in the order in which they are tried
EVAL_GAIN = 1.03  # evaluation batches grow until two doublings gain less
FLUSH = "eval_accumulation_steps"
FREE = "free"  # in a setting: as many steps as the fastest of those that fit, for each batch
NEAR = 1.1  # of the budget: where nothing is estimated to fit, what is estimated within this is tried
MOST_RESCUES = 8  # probes spent on finding anything that fits


@dataclass(frozen=True)
class Step:
    candidate: Candidate
    purpose: str
    why: str


class TrainPlan:
    """Candidates for the training phase; evaluation knobs stay at the baseline's values."""

    def __init__(self, space: Space, predictor: Predictor, description: Description, budget: Budget) -> None:
        self._space, self._predictor, self._description, self._budget = space, predictor, description, budget
        self._by_key: dict[str, Measurement] = {}
        self._batches = space.batches

    def next(self, history: Iterable[Measurement], in_code: bool) -> Step | None:
        """The next candidate to probe, or None when none is left that could win. `in_code`: also knobs that only code
        can set."""
        history = list(history)
        self._learn(history)
        self._batches = self._space.batches_for(in_code)
        baseline = self._space.baseline
        if baseline.key not in self._by_key:
            if any(
                m.purpose == "baseline" for m in history
            ):  # its evaluation failed; its training may still be the best
                return Step(baseline, "train", "the user's own training settings, without evaluation")
            return Step(baseline, "baseline", "the user's own settings")
        if not self._batches:
            return None
        full = self._space.with_batch(self._space.start, self._batches[-1])
        # The formula may be far off, so it is tried against it; a shadow run is not.
        foreseen = self._predictor.prediction(full) is not None and self._ruled_out(full) is not None
        if full.key not in self._by_key and not foreseen:
            return self._step(full, "the whole effective batch at once")
        if self.best(in_code) is None:
            return self._rescue(in_code)
        for step in (*self._climb(in_code), *self._flips(in_code)):
            return step
        return None

    def best(self, in_code: bool) -> Candidate | None:
        """The fastest that fits in training so far."""
        rates = {
            k: m
            for k, m in self._by_key.items()
            if self._fits(m) and self._allowed(m.candidate, in_code) and self._space.holds(m.candidate, "train")
        }
        if not rates:
            return None
        return max(rates.values(), key=lambda m: m.train_speed.per_second).candidate

    # ---- what is known ----

    def _learn(self, history: Iterable[Measurement]) -> None:
        """The last word on each training candidate: timed before untimed, clean before contaminated."""
        self._by_key = {}
        for m in history:
            if m.purpose.startswith("confirm"):
                continue  # they judge the winner, they do not look for it
            m = dataclasses.replace(m, candidate=_train_part(m.candidate, self._space.baseline))
            known = self._by_key.get(m.candidate.key)
            if known is not None and known.outcome is Outcome.FITS and m.outcome is Outcome.CONTAMINATED:
                continue
            # An evaluation that failed says nothing of training; a probe that timed training does.
            if m.train_speed is not None or (known is None and _train_verdict_known(m)):
                self._by_key[m.candidate.key] = m

    def _fits(self, m: Measurement) -> bool:
        return fits_training(m, self._budget)

    def _out_of_memory(self, m: Measurement) -> bool:
        return m.outcome in MEMORY and not self._fits(m)

    def _allowed(self, candidate: Candidate, in_code: bool) -> bool:
        baseline = self._space.baseline
        return in_code or all(candidate[n] == baseline[n] for n in candidate.values if KNOBS[n].in_code)

    def _ruled_out(self, candidate: Candidate) -> str | None:
        """Why it is not worth a probe; None when it is.

        An out-of-memory of the device rules out what is predicted to keep no less alive. Where only the formula knows, and
        where the host ran out, everything but the batch has to be equal, and the batch no smaller: under a held effective
        batch a smaller batch accumulates, which keeps one more copy of the gradients, so it can need more.
        """
        known_bad = refusal(candidate, self._description)
        if known_bad:
            return known_bad
        for m in self._by_key.values():
            if self._out_of_memory(m) and self._needs_no_less(candidate, m):
                return f"probe {m.probe} ran out of memory with less"
        if not self._predictor.could_fit(candidate, self._budget.device_bytes):
            return "cannot fit by estimate"
        return None

    def _needs_no_less(self, candidate: Candidate, failed: Measurement) -> bool:
        other = failed.candidate
        same = structure(other) == structure(candidate)
        larger = int(candidate["per_device_train_batch_size"]) >= int(other["per_device_train_batch_size"])
        live, other_live = self._predictor.least_bytes(candidate), self._predictor.least_bytes(other)
        if live is not None and other_live is not None and failed.outcome in DEVICE_MEMORY:
            return live >= (1.0 if same else OTHER_STRUCTURE) * other_live
        return same and larger and self._predictor.train_bytes(candidate) >= self._predictor.train_bytes(other)

    def _open(self, candidate: Candidate) -> bool:
        return candidate.key not in self._by_key and self._ruled_out(candidate) is None

    def _step(self, candidate: Candidate, why: str) -> Step:
        return Step(candidate, "train", why)

    # ---- the batch size ----

    def _climb(self, in_code: bool) -> Iterator[Step]:
        """The batch frontier of the best structure, and the neighbours of its fastest batch."""
        best = self.best(in_code)
        rates, failed = self._curve(best)
        untried = [b for b in self._batches if b not in rates and b not in failed]
        largest = max(rates)
        ceiling = min((b for b in failed if b > largest), default=None)
        fastest = max(rates, key=rates.__getitem__)
        above = [b for b in untried if b > largest and (ceiling is None or b < ceiling)]
        rising = fastest == largest
        if above and rising and self._worth_more(best):
            chosen = self._largest_fitting(best, above)
            if chosen is not None:
                yield self._step(self._space.with_batch(best, chosen), "a larger batch of the fastest structure")
        if structure(best) != structure(self._space.start):
            return
        below = max((b for b in self._batches if b < fastest), default=None)
        if below in untried and self._open(self._space.with_batch(best, below)):
            yield self._step(self._space.with_batch(best, below), "the batch below the fastest one")

    def _worth_more(self, best: Candidate) -> bool:
        """Whether larger batches have paid: false once a curve of this run has its peak below its frontier."""
        rates, _ = self._curve(self._space.start)
        return (
            len(rates) < 2
            or structure(best) == structure(self._space.start)
            or max(rates, key=rates.__getitem__) == max(rates)
        )

    def _curve(self, candidate: Candidate) -> tuple[dict[int, float], set[int]]:
        """Measured rate by batch, and batches that ran out of memory, for the structure of `candidate`."""
        rates: dict[int, float] = {}
        failed: set[int] = set()
        for m in self._by_key.values():
            if structure(m.candidate) == structure(candidate):
                batch = int(m.candidate["per_device_train_batch_size"])
                if self._fits(m):
                    rates[batch] = m.train_speed.per_second
                else:
                    failed.add(batch)
        return rates, failed

    def _largest_fitting(self, candidate: Candidate, batches: list[int]) -> int | None:
        """The largest that is estimated to fit; where none is, the middle one, unless an estimate is far off."""
        sized = {b: self._space.with_batch(candidate, b) for b in batches}
        open_batches = [b for b in batches if self._open(sized[b])]
        fitting = [b for b in open_batches if self._predictor.fits(sized[b], self._budget.device_bytes)]
        if fitting:
            return max(fitting)
        near = [b for b in open_batches if self._predictor.fits(sized[b], self._budget.device_bytes, NEAR)]
        return near[len(near) // 2] if near else None

    # ---- the other knobs ----

    def _flips(self, in_code: bool) -> list[Step]:
        best = self.best(in_code)
        batch = int(best["per_device_train_batch_size"])
        found = []
        for name, flipped in self._space.flips(best, "train", in_code):
            if name == "activation_checkpointing" and flipped[name] and batch == self._batches[-1]:
                continue  # recomputing costs time and nothing larger is left to be gained
            rates, failed = self._curve(flipped)
            if rates:
                if max(rates.values()) < WORTH_CLIMBING * self._rate(best) or not self._worth_more(best):
                    continue
                larger = [b for b in self._batches if b > max(rates) and b not in failed]
                chosen = self._largest_fitting(flipped, larger)
            else:
                sizes = [
                    b
                    for b in self._batches
                    if b not in failed and (b >= batch if flipped.get("activation_checkpointing") else b == batch)
                ]
                chosen = self._largest_fitting(flipped, sizes) or (
                    self._smaller(flipped, batch, failed) if failed else None
                )
            if chosen is not None:
                candidate = self._space.with_batch(flipped, chosen)
                if self._open(candidate):
                    found.append(self._step(candidate, f"{name} changed from the fastest"))
        return sorted(found, key=lambda s: self._predictor.seconds_per_row(s.candidate))

    def _smaller(self, flipped: Candidate, batch: int, failed: set[int]) -> int | None:
        """Half the batch of a structure that ran out of memory at the best batch, where it is expected to be faster."""
        if self._predictor.seconds_per_row(flipped) > 0.9 * self._predictor.seconds_per_row(self.best(True)):
            return None
        return max((b for b in self._batches if b < min(failed) and b >= batch // 2), default=None)

    def _rate(self, candidate: Candidate) -> float:
        return self._by_key[candidate.key].train_speed.per_second

    # ---- nothing fits yet ----

    def _rescue(self, in_code: bool) -> Step | None:
        """The untried candidate with the smallest estimated peak, structures in turn."""
        tried = sum(1 for m in self._by_key.values())
        if tried >= MOST_RESCUES:
            return None
        candidates = [c for c in self._space.train_candidates() if self._allowed(c, in_code)]
        untried = [c for c in candidates if c.key not in self._by_key and refusal(c, self._description) is None]
        fitting = [
            c for c in untried if self._predictor.fits(c, self._budget.device_bytes) and self._ruled_out(c) is None
        ]
        if fitting:
            pick = min(fitting, key=lambda c: self._predictor.seconds_per_row(c))
            return self._step(pick, "the fastest that is estimated to fit")
        if not untried:
            return None
        return self._step(min(untried, key=self._predictor.train_bytes), "the smallest estimated peak")


class EvaluatePlan:
    """Candidates for the evaluation phase on top of chosen training settings."""

    def __init__(
        self, space: Space, chosen: Candidate, budget: Budget, device: str, like: Candidate | None = None
    ) -> None:
        """`like`: where evaluation was fast on other training settings."""
        self._space, self._chosen, self._budget, self._device = space, chosen, budget, device
        self._like = like or space.baseline
        self._by_key: dict[str, Measurement] = {}
        self._elsewhere: list[Measurement] = []  # on whatever training settings

    def next(self, history: Iterable[Measurement], in_code: bool) -> Step | None:
        """The next candidate to probe, or None when evaluation is settled."""
        history = list(history)
        self._by_key = {
            m.candidate.key: m
            for m in history
            if not m.purpose.startswith("confirm")
            and m.candidate.but(_eval_part(self._chosen)) == self._chosen
            and (m.eval_speed is not None or m.failure is not None or m.growth is not None)
        }
        self._elsewhere = [m for m in history if m.growth is not None]
        for setting in self._settings(in_code):
            step = None if self._is_known_to_grow(setting) else self._ladder(setting)
            if step is not None:
                return step
        return None

    def best(self, in_code: bool) -> Candidate | None:
        """The fastest evaluation that fits so far; None when none was measured or none fits."""
        baseline = self._space.baseline
        fitting = [
            m
            for m in self._by_key.values()
            if self._fits(m)
            and self._space.holds(m.candidate, "evaluate")
            and (in_code or all(m.candidate.get(name) == baseline.get(name) for name in IN_CODE))
        ]
        return max(fitting, key=lambda m: m.eval_per_second).candidate if fitting else None

    def _fits(self, m: Measurement) -> bool:
        return m.eval_speed is not None and m.outcome in (Outcome.FITS, Outcome.CONTAMINATED)

    def _settings(self, in_code: bool) -> Iterator[Candidate]:
        """Accumulation and reduction, in the order in which they are tried: the next only where the last is short of memory."""
        own = self._chosen.but(_eval_part(self._space.start))
        yield own
        if self._may_flush(own):
            yield own.but({FLUSH: FREE})
        if in_code:
            yield from self._settings_in_code(own)

    def _settings_in_code(self, setting: Candidate) -> Iterator[Candidate]:
        """What takes less of what accumulates, one thing on top of the other, until little does.

        Values come with the fewest bytes first, so that after one that fits no other of the same knob takes less.
        """
        for name in IN_CODE:
            for value in self._space.values.get(name, ()):
                if value == setting.get(name):
                    continue
                if not (self._short_of_memory(setting) or self._accumulates(setting)):
                    return
                changed = setting.but({name: value})
                yield changed
                if any(self._fits(m) for m in self._of(changed)):
                    setting = changed
                    break

    def _ladder(self, setting: Candidate) -> Step | None:
        """Evaluation batches of one setting: the user's own, then up by four while it pays, or down until one fits."""
        batches = sorted(self._space.values["per_device_eval_batch_size"])
        if setting.get(FLUSH) == FREE and self._of(setting):
            better = self._at(setting, self._batch_of_most(setting))
            if better.key not in self._by_key and not self._host_is_short(setting):
                return Step(better, "evaluate", "moved to the host as rarely as pays and fits")
        measured = {b: self._by_key.get(self._at(setting, b).key) for b in batches}
        if not any(measured.values()):
            best = self.best(in_code=True)
            own = int((best or self._like)["per_device_eval_batch_size"])
            first = min(batches, key=lambda b: abs(b - own))
            return self._step(setting, first, "evaluation on the chosen training settings")
        rates = {b: m.eval_per_second for b, m in measured.items() if m is not None and self._fits(m)}
        failed = [b for b, m in measured.items() if m is not None and not self._fits(m)]
        if not rates:
            if self._grows_too_much(setting) or self._host_is_short(setting):
                return None  # a smaller batch accumulates as much
            below = [b for b in batches if b < min(failed)]
            return self._step(setting, below[len(below) // 2], "a smaller evaluation batch") if below else None
        top = max(rates)
        fastest = max(rates, key=rates.__getitem__)
        others = [r for b, r in rates.items() if b < top]
        above = [b for b in batches if b > top and (not failed or b < min(failed))]
        paid = not others or rates[top] >= EVAL_GAIN * max(others)
        if above and paid and fastest == top:
            return self._step(setting, above[min(1, len(above) - 1)], "a larger evaluation batch")
        return None

    def _step(self, setting: Candidate, batch: int, why: str) -> Step:
        return Step(self._at(setting, batch), "evaluate", why)

    def _of(self, setting: Candidate) -> list[Measurement]:
        """What was measured of it at any batch; where it is free when to flush, at any number of steps too."""
        alike = self._alike(setting)
        if setting.get(FLUSH) == FREE:
            return [m for m in alike if m.candidate[FLUSH] is not None]
        return [m for m in alike if m.candidate.get(FLUSH) == setting.get(FLUSH)]

    def _alike(self, setting: Candidate) -> list[Measurement]:
        """What was measured of all but the batch and when to flush."""
        changes = {"per_device_eval_batch_size": 0, **({FLUSH: 0} if FLUSH in setting.values else {})}
        return [m for m in self._by_key.values() if m.candidate.but(changes) == setting.but(changes)]

    def _short_of_memory(self, setting: Candidate) -> bool:
        return any(m.outcome in MEMORY for m in self._of(setting)) or self._is_known_to_grow(setting)

    def _is_known_to_grow(self, setting: Candidate) -> bool:
        """Whether what accumulates alone is more than the budget, as seen on other training settings: it is the same on all.

        Where device and host are one memory; elsewhere it may be moved.
        """
        changes = {"per_device_eval_batch_size": 0, **({FLUSH: 0} if FLUSH in setting.values else {})}
        wanted = _eval_part(setting.but(changes))
        return self._device == "cpu" and any(
            m.outcome in DEVICE_MEMORY
            and m.growth.device_bytes_per_row * m.growth.rows_total > self._budget.device_bytes
            and _eval_part(m.candidate.but(changes)) == wanted
            for m in self._elsewhere
        )

    def _grows_too_much(self, setting: Candidate) -> bool:
        """Whether what accumulates on the device is what does not fit, twice because of the concatenation."""
        for m in self._of(setting):
            if m.growth is None:
                continue
            rows = m.growth.rows_total
            steps = m.candidate.get("eval_accumulation_steps")
            if steps is not None and self._device != "cpu":
                rows = min(rows, int(steps) * int(m.candidate["per_device_eval_batch_size"]))
            if 2 * m.growth.device_bytes_per_row * rows > 0.5 * self._budget.device_bytes:
                return True
        return False

    def _accumulates(self, setting: Candidate) -> bool:
        """Whether the predictions come to more than 1 % of the budget; less is not worth a line of code."""
        return any(
            m.growth is not None
            and m.growth.prediction_bytes_per_row * m.growth.rows_total > 0.01 * self._budget.device_bytes
            for m in self._of(setting)
        )

    # ---- when to move what accumulates to the host ----

    def _may_flush(self, own: Candidate) -> bool:
        """Whether another number of steps could make what does not fit fit, or what fits faster."""
        if not self._flush_options() or self._host_is_short(own):
            return False
        if self._device != "cpu" and any(m.outcome in DEVICE_MEMORY for m in self._of(own)):
            return True
        fitting = [m for m in self._of(own) if self._fits(m)]
        if not fitting or FLUSH not in self._space.integers:
            return False
        fastest = max(fitting, key=lambda m: m.eval_per_second)
        return self._pays(fastest, self._wanted(own, int(fastest.candidate["per_device_eval_batch_size"])))

    def _at(self, setting: Candidate, batch: int) -> Candidate:
        """`setting` at this batch. Where it is free when to flush: the fastest that was measured, unless another number of
        steps promises more; after one that did not fit at most half as many."""
        candidate = setting.but(per_device_eval_batch_size=batch)
        if setting.get(FLUSH) != FREE:
            return candidate
        tried = [m for m in self._of(setting) if m.candidate["per_device_eval_batch_size"] == batch]
        fitting = [m for m in tried if self._fits(m)]
        wanted = self._wanted(setting, batch)
        failed = [int(m.candidate[FLUSH]) for m in tried if not self._fits(m)]
        if failed:
            options = [min(wanted, min(failed) // 2)] if FLUSH in self._space.integers else self._flush_options()
            wanted = max((n for n in options if 0 < n < min(failed)), default=min(failed))
        if fitting:
            fastest = max(fitting, key=lambda m: m.eval_per_second)
            if any(m.candidate[FLUSH] == wanted for m in tried) or not self._pays(fastest, wanted):
                return fastest.candidate
        return candidate.but({FLUSH: wanted})

    def _wanted(self, setting: Candidate, batch: int) -> int:
        """The number of steps that is fastest and fits, by what was measured nearest to this batch; 1 where nothing was."""
        told = [m for m in self._alike(setting) if m.growth is not None]
        nearest = min(told, key=lambda m: abs(int(m.candidate["per_device_eval_batch_size"]) - batch), default=None)
        options = self._flush_options()
        if nearest is None:
            return min(options)
        limit = None if self._device == "cpu" else self._budget.device_bytes
        return choose_steps(nearest, batch, limit, () if FLUSH in self._space.integers else options)

    def _flush_options(self) -> list[int]:
        return [int(v) for v in self._space.values.get(FLUSH, ()) if v is not None]

    def _pays(self, m: Measurement, steps: int) -> bool:
        """Whether flushing after `steps` promises a faster evaluation than `m` had: by its copies, or, where those come to
        little, by flushing half as often, each time the device waits."""
        seconds = seconds_with(m, steps)
        if seconds is not None:
            return min(m.eval_seconds) >= EVAL_GAIN * seconds
        now = m.candidate[FLUSH]
        return self._device != "cpu" and now is not None and steps >= 2 * int(now)

    def _batch_of_most(self, setting: Candidate) -> int:
        """Of the fastest that fits, else of the last that was tried."""
        tried = self._of(setting)
        fitting = [m for m in tried if self._fits(m)]
        chosen = max(fitting, key=lambda m: m.eval_per_second) if fitting else tried[-1]
        return int(chosen.candidate["per_device_eval_batch_size"])

    def _host_is_short(self, setting: Candidate) -> bool:
        """Whether what accumulates does not fit on the host, where every flush moves it sooner or later."""
        failed = [m.failure for m in self._alike(setting) if m.outcome is Outcome.HOST_OOM and m.failure is not None]
        apart = self._device != "cpu"  # else a smaller batch takes less of the same memory
        return any(f.kind == "host_growth" or (apart and f.phase in EVALUATION_PHASES) for f in failed)


def _eval_part(candidate: Candidate) -> dict:
    return {n: v for n, v in candidate.values.items() if KNOBS[n].phase == "evaluate"}


def _train_part(candidate: Candidate, baseline: Candidate) -> Candidate:
    """`candidate` with the baseline's evaluation knobs: what training depends on."""
    return candidate.but(_eval_part(baseline))


def _train_verdict_known(m: Measurement) -> bool:
    """Whether a probe without training speed says something of training: one that failed before evaluation does."""
    return m.failure is not None and m.failure.phase not in EVALUATION_PHASES
