"""What to say when nothing fits: how far away the best was, and what would help, each as something to try.

A peak is told only where a probe ran to its end; of one that died at the cap only a lower bound is known, and where not
even that, an estimate by formula, said to be one. Remedies carry estimated savings, which order them and prove nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autofit.failure import parse_oom_message
from autofit.knobs import OTHER_OPTIMIZERS
from autofit.leak_words import leak_sentences
from autofit.prediction import Predictor
from autofit.records import (
    EVALUATION_PHASES,
    LEAK,
    Budget,
    Candidate,
    Description,
    Measurement,
    ModelTask,
    Outcome,
    Task,
)
from autofit.report.labels import in_unit
from autofit.selection import fits_training
from autofit.units import format_bytes

MEMORY = (Outcome.DEVICE_OOM, Outcome.HOST_OOM, Outcome.OVER_BUDGET)
SPARE = 1.05  # of a larger budget above the peak that was measured
LORA_STATES = 3  # gradients and the two moments of Adam, each as large as what is trained
ADAFACTOR_SAVES = 1.9  # of the two moments of Adam; it keeps a row and a column of one
LEAST_TOKENS = 64  # shorter rows are not advised


@dataclass(frozen=True)
class Remedy:
    """Something to try. `saved_bytes` is an estimate, None where there is none."""

    text: str
    saved_bytes: int | None
    of_evaluation: bool = False


def nothing_fits(history: Sequence[Measurement], budget: Budget, description: Description, task: Task) -> str:
    """One message: how far from the budget the nearest was, and remedies, the most effective first."""
    lines = [
        f"nothing fits: {_nearest(history, budget, description)}; no file was written. What would help, the most effective first:"
    ]
    return "\n".join([*lines, *(f"  {text}" for text in remedies(history, budget, description, task))])


def remedies(history: Sequence[Measurement], budget: Budget, description: Description, task: Task) -> list[str]:
    """Ways out by estimated saving; where only evaluation fails, those of evaluation first and a larger budget last."""
    found = _evaluation_remedies(history, budget, description, task)
    found += _leak_remedies(history, budget)
    tried = [m.candidate for m in history]
    if tried:
        smallest = min(tried, key=_predictor(history, description).train_bytes)
        found += _training_remedies(tried, smallest, description, task)
    first = only_evaluation_fails(history, budget)
    found.sort(key=lambda r: (not (first and r.of_evaluation), -(r.saved_bytes or 0)))
    texts = [r.text + _saving(r.saved_bytes, budget) for r in found]
    return texts + _larger_budget(history, budget, description)


def only_evaluation_fails(history: Sequence[Measurement], budget: Budget) -> bool:
    """Whether some settings train within the budget, so that evaluation alone is in the way."""
    return any(map(_fails_in_evaluation, history)) and any(fits_training(m, budget) for m in history)


def _fails_in_evaluation(m: Measurement) -> bool:
    return m.outcome in MEMORY and m.failure is not None and m.failure.phase in EVALUATION_PHASES


# ---- how far away ----


def _nearest(history: Sequence[Measurement], budget: Budget, description: Description) -> str:
    size = lambda held: format_bytes(held, budget.unit)  # noqa: E731
    limit, lead = budget.device_bytes, ""
    if only_evaluation_fails(history, budget):
        lead = "training fits and evaluation does not; "
    above = peaks_above(history, budget, description)
    if above:
        held, probe = above[0]
        return f"{lead}the smallest peak above the budget of {size(limit)} is {size(held)} (probe {probe}), {size(held - limit)} too much"
    of_memory = [m for m in history if m.outcome in MEMORY]
    if of_memory and all(m.outcome is Outcome.HOST_OOM for m in of_memory):
        count = len({m.candidate for m in of_memory})
        return f"{lead}{count} of the candidates tried ran out of host memory under the host budget of {size(budget.host_bytes)}"
    count = len({m.candidate for m in of_memory})
    all_failed = count == len({m.candidate for m in history})
    who = f"all {count} candidates tried" if all_failed else f"{count} of the candidates tried"
    text = f"{lead}{who} ran out of memory under the budget of {size(limit)}"
    bounds = [(held or 0, asked or 0, m.probe) for m in history for held, asked in [_bound(m)] if held or asked]
    if bounds:
        held, asked, probe = min(bounds, key=lambda b: (not b[0], b[0] + b[1]))  # what was held says more
        if not held:
            return f"{text}; probe {probe} was refused {size(asked)} there"
        refused = f" when it was refused {size(asked)} more" if asked else ""
        return f"{text}; probe {probe} held at least {size(held)}{refused}"
    estimate = _smallest_estimate(history, budget, description)
    return text if estimate is None else f"{text}; the smallest needs ~{size(estimate)}, an estimate by formula"


def peaks_above(history: Sequence[Measurement], budget: Budget, description: Description) -> list[tuple[int, str]]:
    """(bytes, probe) of whole runs above the budget, the smallest first; of those that evaluated where any did."""
    ran = [m for m in history if m.ran and m.peak_bytes is not None and m.peak_bytes > budget.device_bytes]
    whole = [m for m in ran if m.eval_bytes is not None] if description.eval_rows else []
    return sorted((m.peak_bytes, m.probe) for m in whole or ran)


def _bound(m: Measurement) -> tuple[int | None, int | None]:
    """(bytes that a probe which died for device memory held at least, bytes that it was refused), None where unknown."""
    if m.outcome is not Outcome.DEVICE_OOM:
        return None, None
    facts = parse_oom_message(m.failure.message if m.failure else "")
    if facts.requested_bytes is None and m.failure:
        facts = parse_oom_message(m.failure.traceback)
    known = [held for held in (m.peak_bytes, facts.process_bytes, facts.allocated_bytes) if held is not None]
    return max(known, default=None), facts.requested_bytes


def _predictor(history: Sequence[Measurement], description: Description) -> Predictor:
    # Only a GPU has a name among the device's facts.
    predictor = Predictor(description, "cuda:0" if "name" in description.device_facts else "cpu")
    for m in history:
        predictor.learn(m)
    return predictor


def _smallest_estimate(history: Sequence[Measurement], budget: Budget, description: Description) -> int | None:
    """Of the candidates that ran out of device memory; None where the formula says that one of them fits."""
    predictor = _predictor(history, description)
    smallest = min(
        (predictor.train_bytes(m.candidate) for m in history if m.outcome is Outcome.DEVICE_OOM), default=None
    )
    return smallest if smallest is not None and smallest > budget.device_bytes else None


# ---- what would help ----


def _training_remedies(
    tried: Sequence[Candidate], smallest: Candidate, description: Description, task: Task
) -> list[Remedy]:
    found, model = [], task.model
    trainable = description.trainable_bytes
    if 2 * description.trainable_parameters > description.parameters:
        how = "add --lora r=16" if model else "wrap the model in the script: get_peft_model(model, LoraConfig(r=16))"
        found.append(Remedy(f"train adapters only: {how}", LORA_STATES * trainable))
    tokens = model.seq_len if model else description.longest_row
    sizes = description.config
    is_text = model is not None or not (sizes.get("patch_size") or sizes.get("input") == "pixel_values")
    if is_text and tokens is not None and tokens > LEAST_TOKENS:
        how = f"add --seq-len {tokens // 2}" if model else f"max_length={tokens // 2} where the script tokenizes"
        found.append(Remedy(f"shorter rows: {how}", _saved_by_half_the_row(smallest, description)))
    if description.dtypes.get("float32", 0) * 2 > description.parameters:
        how = "add --dtype bfloat16" if model else "from_pretrained(…, dtype=torch.bfloat16) in the script"
        states = description.parameter_bytes + LORA_STATES * trainable
        found.append(Remedy(f"16-bit weights (changes the training): {how}", states // 2))
    if not any(c.get("optim") in OTHER_OPTIMIZERS for c in tried):
        found.append(
            Remedy("another optimizer (changes the training): add --allow training", int(trainable * ADAFACTOR_SAVES))
        )
    return found


def _saved_by_half_the_row(candidate: Candidate, description: Description) -> int | None:
    """By the formula alone, whose activations grow with the row."""
    if description.longest_row is None:
        return None
    half = dataclasses.replace(description, longest_row=description.longest_row // 2)
    whole, less = (_predictor((), d).train_bytes(candidate) for d in (description, half))
    return max(whole - less, 0) or None


def _evaluation_remedies(
    history: Sequence[Measurement], budget: Budget, description: Description, task: Task
) -> list[Remedy]:
    failed = [m for m in history if _fails_in_evaluation(m)]
    if not failed:
        return []
    found = []
    # The loop holds what it gathered twice while it concatenates.
    grown = [
        (2 * m.growth.device_bytes_per_row + m.growth.metrics_bytes_per_row) * m.growth.rows_total
        for m in failed
        if m.growth is not None
    ]
    gathered = int(max(grown, default=0)) or None
    reduced = description.has_logits_reduction or any(m.candidate.get("logits", "full") != "full" for m in history)
    if task.script is not None and description.has_metrics and not reduced:
        found.append(
            Remedy(
                "reduce logits before they gather in evaluation: give the Trainer a preprocess_logits_for_metrics, such as "
                "those of autofit.logits, and a compute_metrics that takes what it returns",
                gathered,
                True,
            )
        )
    if task.model is not None:
        found += _fewer_rows(task.model, gathered)
    batches = [int(m.candidate.get("per_device_eval_batch_size") or 1) for m in failed]
    if min(batches) > 1:
        found.append(
            Remedy("a smaller evaluation batch: add --knob per_device_eval_batch_size=1", _by_one_row(failed), True)
        )
    host = [
        m.growth.projected_host_bytes + (m.growth.host_level_bytes or m.host_bytes or 0) if m.growth else m.host_bytes
        for m in failed
        if m.outcome is Outcome.HOST_OOM and (m.growth or m.host_bytes)
    ]
    if host:
        found.append(Remedy(f"more host memory: add --host-budget {option_size(min(host), budget.unit)}", None, True))
    return found


def _leak_remedies(history: Sequence[Measurement], budget: Budget) -> list[Remedy]:
    """What does not fit because it is kept has to be let go of; the sentence of the probe that kept least."""
    leaking = [m for m in history if m.failure is not None and m.failure.kind == LEAK]
    if not leaking:
        return []
    least = min(leaking, key=lambda m: m.leaks.device_bytes + m.leaks.host_bytes)
    saved = max(least.leaks.device_bytes, least.leaks.host_bytes)
    of_evaluation = _fails_in_evaluation(least)
    sentence = leak_sentences(least.leaks)[-1 if of_evaluation else 0]
    return [Remedy(in_unit(sentence, budget.unit), saved, of_evaluation)]


def _fewer_rows(model: ModelTask, gathered: int | None) -> list[Remedy]:
    rows = model.eval_rows // 2
    how = f"evaluate on fewer rows, in your training too: add --eval-rows {rows}"
    return [Remedy(how, gathered and gathered // 2, True)] if rows > 0 else []


def _by_one_row(failed: Sequence[Measurement]) -> int | None:
    """What the measured part of evaluation holds at most for the rows beyond the first."""
    held = [
        int((p.process_bytes - (m.phase("load").process_bytes or 0)) * (1 - 1 / batch))
        for m in failed
        if (p := m.phase("evaluate")) is not None and p.process_bytes is not None and m.phase("load") is not None
        if (batch := int(m.candidate.get("per_device_eval_batch_size") or 1)) > 1
    ]
    return max(min(held), 0) or None if held else None


def _larger_budget(history: Sequence[Measurement], budget: Budget, description: Description) -> list[str]:
    """The least that is known to be needed: a peak above the budget; without one, what a probe held and was refused, or
    the smallest estimate where that is more; without any, nothing."""
    above = peaks_above(history, budget, description)
    estimate = None if only_evaluation_fails(history, budget) else _smallest_estimate(history, budget, description)
    bounds = [(held + asked, m.probe) for m in history for held, asked in [_bound(m)] if held and asked]
    bound, probe = min(bounds, default=(0, ""))
    if above:
        word, need, source = "at least", above[0][0], f"what probe {above[0][1]} took, with 5 % to spare"
    elif bound > max(estimate or 0, budget.device_bytes):
        word, need, source = "at least", bound, f"what probe {probe} held and was refused, with 5 % to spare"
    elif estimate is not None:
        word, need, source = "about", estimate, "an estimate by formula for the smallest candidate tried"
    else:
        return []
    size = option_size(int(need * SPARE), budget.unit)
    if not budget.text:  # the budget is all that this device has
        return [f"a device with {word} {size}, which --device names ({source})"]
    return [f"a larger budget, {word} --budget {size} ({source})"]


def option_size(amount: int, unit: str) -> str:
    """`amount` rounded up, as an option takes it, in the family of `unit`: `525MB`, `26.1GiB`."""
    binary = "i" in unit.lower()
    step, middle = (2**10, "i") if binary else (10**3, "")
    if amount >= 10 * step**3:
        return f"{math.ceil(amount * 10 / step**3) / 10:g}G{middle}B"
    return f"{math.ceil(amount / step**2)}M{middle}B"


def _saving(saved: int | None, budget: Budget) -> str:
    return "" if not saved else f" (saves ~{format_bytes(saved, budget.unit)})"
