"""What to say when nothing fits: how far away the best was, and what would help, each as a command to try."""

from autofit.records import Budget, Description, Measurement, Task
from autofit.units import format_bytes


def nothing_fits(history: list[Measurement], budget: Budget, description: Description, task: Task) -> str:
    """One message: the smallest peak seen, the gap to the budget, and remedies, the most effective first."""
    peaks = [(m.peak_bytes, m.probe) for m in history if m.ran and m.peak_bytes is not None]
    limit = format_bytes(budget.device_bytes, budget.unit)
    if peaks:
        smallest, probe = min(peaks)
        gap = format_bytes(smallest - budget.device_bytes, budget.unit)
        seen = f"the smallest peak seen is {format_bytes(smallest, budget.unit)} (probe {probe}), {gap} above the budget of {limit}"
        if smallest <= budget.device_bytes:
            seen = f"the smallest peak seen is {format_bytes(smallest, budget.unit)} (probe {probe}), but no candidate passed every phase under {limit}"
    else:
        seen = f"every candidate ran out of memory under the budget of {limit}"
    lines = [f"nothing fits: {seen}; no file was written. What would help, most effective first:"]
    return "\n".join([*lines, *(f"  {text}" for text in remedies(history, budget, description, task))])


def remedies(history: list[Measurement], budget: Budget, description: Description, task: Task) -> list[str]:
    """Ways out with the command that tries each. Savings are by formula: Adam keeps three copies of what is trained."""
    found: list[tuple[int, str]] = []
    moments = 3 * description.trainable_bytes
    in_evaluation = [m for m in history if m.failure is not None and m.failure.phase in ("evaluate", "metrics")]
    if task.model is not None:
        model = task.model
        if model.lora_rank is None:
            found.append(
                (moments, f"train adapters only (saves about {format_bytes(moments, budget.unit)}): add --lora r=16")
            )
        if model.seq_len is not None and model.seq_len > 64:
            found.append(
                (moments // 2, f"shorter rows (activations shrink in proportion): add --seq-len {model.seq_len // 2}")
            )
        if model.dtype == "float32":
            found.append(
                (description.parameter_bytes * 2, "16-bit weights (changes the training): add --dtype bfloat16")
            )
    else:
        found.append(
            (
                moments,
                f"train adapters only with PEFT (saves about {format_bytes(moments, budget.unit)}): change the script",
            )
        )
        found.append((moments // 2, "shorter rows: lower the script's maximum length"))
    saved = int(description.trainable_bytes * 1.9)
    found.append(
        (
            saved,
            f"another optimizer (changes the training, saves about {format_bytes(saved, budget.unit)}): add --allow training",
        )
    )
    if in_evaluation and description.has_metrics and not description.has_logits_reduction:
        found.append((budget.device_bytes, "reduce logits before they accumulate in evaluation: add --allow code"))
    peaks = [m.peak_bytes for m in history if m.ran and m.peak_bytes is not None]
    if peaks:
        need = -(-min(peaks) * 21 // 20 // 10**6)
        found.append((1, f"a larger budget: --budget {need}MB is what the smallest candidate took, with 5 % to spare"))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]
