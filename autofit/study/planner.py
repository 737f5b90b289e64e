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

DEVICE_MEMORY = (Outcome.DEVICE_OOM, Outcome.OVER_BUDGET)
MEMORY = (Outcome.DEVICE_OOM, Outcome.HOST_OOM, Outcome.OVER_BUDGET)
OTHER_STRUCTURE = 1.05  # above one that ran out, by prediction: peaks of two structures compare within their errors
WORTH_CLIMBING = 0.97  # a structure this near to the best is followed to larger batches
IN_CODE = ("logits", *METRICS_FIELDS)  # knobs of evaluation that need code, in the order in which they are tried
EVAL_GAIN = 1.03  # evaluation batches grow until two doublings gain less
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

    def __init__(self, space: Space, chosen: Candidate, budget: Budget, device: str) -> None:
        self._space, self._chosen, self._budget, self._device = space, chosen, budget, device
        self._by_key: dict[str, Measurement] = {}

    def next(self, history: Iterable[Measurement], in_code: bool) -> Step | None:
        """The next candidate to probe, or None when evaluation is settled."""
        self._by_key = {
            m.candidate.key: m
            for m in history
            if not m.purpose.startswith("confirm")
            and m.candidate.but(_eval_part(self._chosen)) == self._chosen
            and (m.eval_speed is not None or m.failure is not None or m.growth is not None)
        }
        for setting in self._settings(in_code):
            step = self._ladder(setting)
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
        return max(fitting, key=lambda m: m.eval_speed.per_second).candidate if fitting else None

    def _fits(self, m: Measurement) -> bool:
        return m.eval_speed is not None and m.outcome in (Outcome.FITS, Outcome.CONTAMINATED)

    def _settings(self, in_code: bool) -> Iterator[Candidate]:
        """Accumulation and reduction, in the order in which they are tried: the next only where the last is short of memory."""
        own = self._chosen.but(_eval_part(self._space.start))
        yield own
        if self._short_of_memory(own) and self._device != "cpu":
            steps = self._flush_steps(own)
            if steps is not None:
                yield own.but(eval_accumulation_steps=steps)
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
        measured = {b: self._by_key.get(setting.but(per_device_eval_batch_size=b).key) for b in batches}
        if not any(measured.values()):
            best = self.best(in_code=True)
            own = int((best or self._space.baseline)["per_device_eval_batch_size"])
            first = min(batches, key=lambda b: abs(b - own))
            return self._step(setting, first, "evaluation on the chosen training settings")
        rates = {b: m.eval_speed.per_second for b, m in measured.items() if m is not None and self._fits(m)}
        failed = [b for b, m in measured.items() if m is not None and not self._fits(m)]
        if not rates:
            if self._grows_too_much(setting):
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
        return Step(setting.but(per_device_eval_batch_size=batch), "evaluate", why)

    def _of(self, setting: Candidate) -> list[Measurement]:
        return [
            m
            for m in self._by_key.values()
            if m.candidate.but(per_device_eval_batch_size=0) == setting.but(per_device_eval_batch_size=0)
        ]

    def _short_of_memory(self, setting: Candidate) -> bool:
        return any(m.outcome in MEMORY for m in self._of(setting))

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

    def _flush_steps(self, setting: Candidate) -> int | None:
        """The largest offered number of steps whose arrays, held twice, fit beside the rest of evaluation."""
        for m in self._of(setting):
            if m.growth is None or m.phase("evaluate") is None:
                continue
            free = self._budget.device_bytes - (m.phase("evaluate").process_bytes or 0)
            batch = int(m.candidate["per_device_eval_batch_size"])
            per_step = 2 * m.growth.device_bytes_per_row * batch
            options = [v for v in self._space.values.get("eval_accumulation_steps", ()) if isinstance(v, int)]
            return max((v for v in options if v * per_step <= free), default=min(options, default=None))
        return 1 if 1 in self._space.values.get("eval_accumulation_steps", ()) else None


def _eval_part(candidate: Candidate) -> dict:
    return {n: v for n, v in candidate.values.items() if KNOBS[n].phase == "evaluate"}


def _train_part(candidate: Candidate, baseline: Candidate) -> Candidate:
    """`candidate` with the baseline's evaluation knobs: what training depends on."""
    return candidate.but(_eval_part(baseline))


def _train_verdict_known(m: Measurement) -> bool:
    """Whether a probe without training speed says something of training: one that failed before evaluation does."""
    return m.failure is not None and m.failure.phase not in EVALUATION_PHASES
