"""The short words of tables and progress lines: a knob, a candidate, an outcome, a number.

One place, so that a knob is called the same in a progress line, in the table and in the answer. Everything that comes
from users or from a child's output goes through `plain` before it is drawn.
"""

import re

from autofit.records import Candidate, Failure, KnobValue, Measurement, Outcome
from autofit.units import format_bytes

# TrainingArguments field or knob -> the head of its column. Accumulation stands beside the batch.
COLUMNS = {
    "per_device_train_batch_size": "batch",
    "activation_checkpointing": "ckpt",
    "precision": "precision",
    "attention": "attention",
    "optim": "optim",
    "per_device_eval_batch_size": "eval batch",
    "eval_accumulation_steps": "eval acc",
    "logits": "logits",
    "loss": "loss",
    "batch_eval_metrics": "metrics by batch",
    "prediction_loss_only": "loss only",
    "include_for_metrics": "metrics get",
    "eval_do_concat_batches": "eval concat",
}

# Phase of a failure -> how a sentence says it.
PHASES = {
    "start": "starting",
    "load": "loading",
    "train": "training",
    "train-again": "training after an evaluation",
    "backward": "the backward pass",
    "optimizer": "the optimizer step",
    "evaluate": "evaluation",
    "metrics": "computing the metrics",
    "save": "saving a checkpoint",
}

UNKNOWN = "–"

# Bytes as torch, the operating system and this package's children write them.
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) (bytes|[KMGT]i?B)(?!\w)")
_FACTORS = {"bytes": 1} | {f"{p}{i}B": (1024 if i else 1000) ** n for n, p in enumerate("KMGT", 1) for i in ("", "i")}


def plain(text: object) -> str:
    """`text` as one line that can be printed anywhere: no escape sequence, no line break, no half character."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def in_unit(text: object, unit: str) -> str:
    """`text` as one plain line, its sizes (`96.00 MiB`, `612000000 bytes`) in the user's own family of units."""
    written = lambda found: format_bytes(round(float(found[1]) * _FACTORS[found[2]]), unit)  # noqa: E731
    return _SIZE.sub(written, plain(text))


def about_text(seconds: float) -> str:
    """A time that is only an estimate, told no finer than that: `about 40 s`, `about 4 min`, `about 1 h 20 min`."""
    if seconds < 55:
        return f"about {max(round(seconds / 5) * 5, 5)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"about {max(minutes, 1)} min"
    return f"about {minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def knob_texts(candidate: Candidate) -> dict[str, str]:
    """Column -> short value, in the order of the columns: `batch` is per-device batch × accumulation steps."""
    texts = {}
    for knob, column in COLUMNS.items():
        if knob in candidate.values:
            texts[column] = value_text(candidate[knob])
    accumulation = candidate.get("gradient_accumulation_steps")
    if "batch" in texts and accumulation is not None:
        texts["batch"] += f"×{value_text(accumulation)}"
    others = [knob for knob in candidate.values if knob not in COLUMNS and knob != "gradient_accumulation_steps"]
    return texts | {plain(knob): value_text(candidate[knob]) for knob in others}


def value_text(value: KnobValue) -> str:
    if value is None:
        return "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else plain(value)


def candidate_text(candidate: Candidate) -> str:
    return ", ".join(f"{column} {text}" for column, text in knob_texts(candidate).items())


def change_text(baseline: Candidate | None, candidate: Candidate) -> str:
    """The knobs in which `candidate` differs from the user's own settings; all of them where those are not known."""
    if baseline is None:
        return candidate_text(candidate)
    before, after = knob_texts(baseline), knob_texts(candidate)
    changed = [f"{column} {text}" for column, text in after.items() if before.get(column) != text]
    return ", ".join(changed) or "your settings"


def phase_text(failure: Failure | None) -> str:
    """` in evaluation`, to be put behind an outcome; empty where no phase is known."""
    return f" in {PHASES.get(failure.phase, plain(failure.phase))}" if failure and failure.phase else ""


def outcome_text(measurement: Measurement) -> str:
    failed = measurement.outcome not in (Outcome.FITS, Outcome.CONTAMINATED)
    return measurement.outcome.value + (phase_text(measurement.failure) if failed else "")


def rate_text(per_second: float | None) -> str:
    """Three significant digits and never an exponent: `412`, `41.2`, `0.412`."""
    if per_second is None:
        return UNKNOWN
    digits = 0 if per_second >= 99.95 else 1 if per_second >= 9.995 else 2 if per_second >= 0.9995 else 3
    return f"{per_second:.{digits}f}"


def spread_text(spread: float | None) -> str:
    return "" if spread is None else f" ±{spread:.1%}"


def gain_text(gain: float | None) -> str:
    """How many times the baseline's speed: `1.04×`, `2.1×`."""
    if gain is None:
        return UNKNOWN
    return f"{gain:.{2 if gain < 1.995 else 1 if gain < 9.95 else 0}f}×"


def count_text(count: int) -> str:
    """A number of parameters: `350`, `22.7 M`, `8.03 B`."""
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            scaled = count / size
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {name}"
    return str(count)
