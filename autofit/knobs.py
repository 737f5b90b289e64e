"""The knobs and their rules, as data: what may vary, in which phase it matters, and what it may change.

A `Space` is what is left of them for one workload on one machine. Not here: in which order a space is searched
(`study`), nor how a value is said in `TrainingArguments` (`trainer_args`).
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.errors import UsageError
from autofit.records import METRICS_FIELDS, Candidate, Description, Effect, KnobValue, Machine

ADAMW = ("adamw_torch_fused", "adamw_torch")  # the same update; fused keeps no temporary copy of the parameters
OTHER_OPTIMIZERS = ("adafactor", "sgd")  # another training; only with --allow training


@dataclass(frozen=True)
class Knob:
    name: str  # the TrainingArguments field where there is one
    phase: str  # train or evaluate: the phase whose speed and memory it changes
    effect: Effect
    in_code: bool = False  # the user has to write or to look at code: no TrainingArguments field, or what metrics get


KNOBS = {
    knob.name: knob
    for knob in (
        Knob("per_device_train_batch_size", "train", Effect.EXACT),
        Knob("gradient_accumulation_steps", "train", Effect.EXACT),
        Knob("activation_checkpointing", "train", Effect.EXACT),
        Knob("precision", "train", Effect.NUMERICS),
        Knob("attention", "train", Effect.NUMERICS, in_code=True),
        Knob("loss", "train", Effect.EXACT, in_code=True),
        Knob("optim", "train", Effect.EXACT),
        Knob("per_device_eval_batch_size", "evaluate", Effect.EXACT),
        Knob("eval_accumulation_steps", "evaluate", Effect.EXACT),
        Knob("logits", "evaluate", Effect.EXACT, in_code=True),
        *(Knob(name, "evaluate", Effect.EXACT, in_code=True) for name in METRICS_FIELDS),
    )
}


@dataclass(frozen=True)
class Space:
    """The values that each knob may take here, the baseline's first. Accumulation follows from the batch.

    So does `loss`, which is there only where the workload's own loss gives other gradients at another accumulation: there
    it has to be `scaled`, by a line of code.
    """

    values: dict[str, tuple[KnobValue, ...]]
    baseline: Candidate
    effective_batch: int
    integers: dict[str, int] = field(default_factory=dict)  # knob that may be any integer up to this, beside its values

    @property
    def start(self) -> Candidate:
        """The baseline, each knob that the user narrowed to other values at the first of those."""
        moved = {
            n: v[0]
            for n, v in self.values.items()
            if n not in (*_BATCH[:2], *_DERIVED) and not _among(self.baseline[n], v)
        }
        start = self.baseline.but(moved)
        if not _among(start["per_device_train_batch_size"], self.batches):
            start = self.with_batch(start, self.batches[0])
        return start

    def holds(self, candidate: Candidate, phase: str) -> bool:
        """Whether every knob of `phase` has a value of this space; the baseline itself may lie outside."""
        return all(self._holds(n, candidate[n]) for n in self.values if KNOBS[n].phase == phase)

    def _holds(self, name: str, value: KnobValue) -> bool:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return _among(value, self.values[name]) or (is_number and 1 <= value <= self.integers.get(name, 0))

    def with_batch(self, candidate: Candidate, batch: int) -> Candidate:
        """`candidate` at another per-device batch, the effective batch held."""
        steps = self.effective_batch // batch
        sized = candidate.but(per_device_train_batch_size=batch, gradient_accumulation_steps=steps)
        if "loss" not in self.values:
            return sized
        return sized.but(loss="own" if steps == self.baseline["gradient_accumulation_steps"] else "scaled")

    @property
    def batches(self) -> tuple[int, ...]:
        """Per-device train batches, ascending."""
        return tuple(sorted(self.values["per_device_train_batch_size"]))

    def batches_for(self, in_code: bool) -> tuple[int, ...]:
        """Those that need no code, where `in_code` is not set; none where `--knob` leaves only others."""
        if in_code or "loss" not in self.values:
            return self.batches
        own = self.baseline["gradient_accumulation_steps"]
        return tuple(b for b in self.batches if self.effective_batch // b == own)

    def flips(self, candidate: Candidate, phase: str, in_code: bool) -> list[tuple[str, Candidate]]:
        """Candidates that differ in one knob of `phase` other than the batch; knobs in code only when `in_code`."""
        found = []
        for name, options in self.values.items():
            knob = KNOBS[name]
            if knob.phase != phase or name in (*_BATCH, *_DERIVED) or (knob.in_code and not in_code):
                continue
            found += [(name, candidate.but({name: value})) for value in options if value != candidate[name]]
        return found

    def train_candidates(self) -> list[Candidate]:
        """Every combination of the knobs of training, evaluation knobs as the baseline has them."""
        listed = [self.baseline]
        for name, options in self.values.items():
            if KNOBS[name].phase == "train" and name not in (*_BATCH, *_DERIVED):
                listed = [c.but({name: value}) for c in listed for value in options]
        return [self.with_batch(c, batch) for c in listed for batch in self.batches]

    @property
    def size(self) -> int:
        """How many candidates the whole space holds; a number that follows from what is free counts with its ends."""
        total = 1
        for name, options in self.values.items():
            if name not in _DERIVED:
                total *= len(options)
        return total


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size")
_DERIVED = ("gradient_accumulation_steps", "loss")


def trades_in_code(description: Description) -> bool:
    """Whether batch may be traded for accumulation with a line of code only."""
    check = description.accumulation
    return check is not None and not check.holds and bool(check.switch)


def switches_of(candidate: Candidate, description: Description) -> dict[str, bool]:
    """What of the candidate is said in attributes of the Trainer."""
    check = description.accumulation
    return {check.switch: check.switch_value} if candidate.get("loss") == "scaled" and check is not None else {}


def _batches(effective: int, baseline: Candidate, description: Description) -> tuple[int, ...]:
    """Where the workload gives other gradients at another accumulation, its own batch alone."""
    check = description.accumulation
    if check is None or check.holds or "loss" in baseline.values:
        return _divisors(effective)
    return (int(baseline["per_device_train_batch_size"]),)


def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _among(value: KnobValue, options: tuple[KnobValue, ...]) -> bool:
    """Membership that tells True from 1."""
    return any(value is o or (value == o and type(value) is type(o)) for o in options)


def make_space(
    description: Description,
    machine: Machine,
    baseline: Candidate,
    narrowed: Mapping[str, tuple[KnobValue, ...]],
    allow: frozenset[str],
) -> Space:
    """What may vary for this workload on this machine.

    `narrowed` holds the user's `--knob` values; `allow` may hold "training" and "code". Raises UsageError for a knob or
    a value that cannot be used here.
    """
    effective = int(baseline["per_device_train_batch_size"]) * int(baseline["gradient_accumulation_steps"])
    values: dict[str, tuple[KnobValue, ...]] = {
        "per_device_train_batch_size": _batches(effective, baseline, description),
        "activation_checkpointing": (False, True) if description.can_checkpoint else (),
        "precision": _precisions(description, machine),
        "attention": description.attentions,
        "optim": (ADAMW if baseline["optim"] in ADAMW else ()) + (OTHER_OPTIMIZERS if "training" in allow else ()),
    }
    if description.eval_rows:
        values |= {
            "per_device_eval_batch_size": _eval_batches(effective, description.eval_rows),
            "eval_accumulation_steps": (None, 1) if description.has_metrics else (),
            "logits": description.reductions if "logits" in baseline.values else (),
        }
        values |= {n: v for n, v in description.metrics_forms.items() if n in baseline.values}
    for name, options in narrowed.items():
        if name in METRICS_FIELDS and "code" not in allow:
            raise UsageError(f"--knob {name}: it changes what the metrics function receives; add --allow code")
        values[name] = _narrow(name, options, values)
    chosen = {}
    for name in baseline.values:
        if name in _DERIVED:
            continue
        options = values.get(name, ())
        # The baseline's own value always stays, unless the user narrowed the knob to others.
        first = () if name in narrowed else (baseline[name],)
        chosen[name] = tuple(dict.fromkeys((*first, *options))) or (baseline[name],)
    batches = chosen["per_device_train_batch_size"]
    chosen["gradient_accumulation_steps"] = tuple(effective // b for b in batches)
    if "loss" in baseline.values:
        chosen["loss"] = ("own", "scaled") if len(batches) > 1 else ("own",)
    open_ended = len(values.get("eval_accumulation_steps", ())) > 1 and "eval_accumulation_steps" not in narrowed
    # After so many steps the evaluation has ended, whatever the batch.
    return Space(
        chosen, baseline, effective, {"eval_accumulation_steps": int(description.eval_rows)} if open_ended else {}
    )


def needs_code(candidate: Candidate, baseline: Candidate) -> bool:
    """Whether it differs from the user's own settings in something that `TrainingArguments` cannot say."""
    return any(knob.in_code and candidate.get(name) != baseline.get(name) for name, knob in KNOBS.items())


def refusal(candidate: Candidate, description: Description) -> str | None:
    """Why `candidate` is known to be no training before it is tried; None when nothing is known against it."""
    if candidate.get("precision") == "fp16" and "float16" in description.dtypes:
        return (
            "fp16_weights: mixed precision with fp16 needs float32 weights; load them with dtype float32, or use bf16"
        )
    return None


def parse_knob(text: str) -> tuple[str, tuple[KnobValue, ...]]:
    """`name=v1,v2` -> the knob and its values. Raises UsageError."""
    name, _, listed = text.partition("=")
    name = name.strip()
    if name not in KNOBS or name in _DERIVED:
        known = [k for k in KNOBS if k not in _DERIVED]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"knobs are {', '.join(known)}"
        if name in _DERIVED:
            hint = "it follows from per_device_train_batch_size and the effective batch"
        raise UsageError(f"--knob {text!r}: no knob {name!r}; {hint}")
    values = tuple(_parse_value(v.strip()) for v in listed.split(",") if v.strip())
    if not values:
        raise UsageError(f"--knob {text!r} lists no value; write {name}=v1,v2")
    return name, values


def _parse_value(text: str) -> KnobValue:
    words = {"true": True, "on": True, "false": False, "off": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if text.isdigit() else text


def _narrow(name: str, options: tuple[KnobValue, ...], values: Mapping[str, tuple]) -> tuple[KnobValue, ...]:
    possible = values.get(name, ())
    if name == "per_device_eval_batch_size":
        bad = [v for v in options if not isinstance(v, int) or isinstance(v, bool) or v < 1]
    elif name == "eval_accumulation_steps":
        bad = [v for v in options if v is not None and (not isinstance(v, int) or isinstance(v, bool) or v < 1)]
    else:
        bad = [v for v in options if v not in possible]
    if bad:
        listed = ", ".join(str(v) for v in possible) or "nothing for this workload"
        raise UsageError(f"--knob {name}: {', '.join(map(str, bad))} cannot be used here; possible: {listed}")
    return options


def _precisions(description: Description, machine: Machine) -> tuple[str, ...]:
    """Precisions that the hardware computes natively; an emulated one is only slower.

    fp16 autocast on the CPU is silently fp32 in Trainer, so it is none there.
    """
    if machine.device == "cpu":
        return ("fp32", "bf16") if description.device_facts.get("bf16") else ("fp32",)
    ampere = machine.capability is not None and machine.capability >= (8, 0)
    return ("fp32", "tf32", "bf16", "fp16") if ampere else ("fp32", "fp16")


def _eval_batches(effective: int, rows: int) -> tuple[int, ...]:
    most = min(max(64, 4 * effective), rows)
    return tuple(2**k for k in range(2, most.bit_length()) if 2**k <= most) or (1,)
