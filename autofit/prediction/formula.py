"""What a candidate will probably take, by formula: for structures of which there is no shadow run.

Parameter states are
exact, activations are the closed form of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", eq. 1 and 2: s·b·h·(34 + 5·a·s/h) bytes a layer at 16 bits, s·b·h·2 when recomputed), scaled by
what this run has measured. Sizes that a model does not tell are taken from its parameter count.
"""

from autofit.records import METRICS_FIELDS, Candidate, Description, Measurement

# Relative time of the same matrix products, from the tensor-core rates of Ampere and later; on the CPU from bf16 dot
# products being twice as wide. Only the order matters, and measurements replace it.
SPEED = {"cpu": {"fp32": 1.0, "bf16": 0.7}, "cuda": {"fp32": 1.0, "tf32": 0.55, "bf16": 0.4, "fp16": 0.42}}
RECOMPUTE = 4 / 3  # one more forward pass: forward 2, backward 4 floating-point operations per parameter and token
LAUNCH_ROWS = 1.0  # a micro-batch costs as much as this many rows beyond its own


class Formula:
    """Estimates for one workload; `learn` takes every measurement of training that fitted."""

    def __init__(self, description: Description, device: str) -> None:
        self._facts, self._device = description, "cpu" if device == "cpu" else "cuda"
        sizes = description.config
        self._hidden = int(sizes.get("hidden_size") or max(round((description.parameters / 12) ** (1 / 3)), 64))
        self._layers = int(sizes.get("num_hidden_layers") or 12)
        self._heads = int(sizes.get("num_attention_heads") or max(self._hidden // 64, 1))
        self._tokens = self._tokens_per_row()
        self._scales: dict[bool, list[float]] = {True: [], False: []}
        self._points: dict[str, dict[int, int]] = {}  # structure -> batch -> measured bytes

    def _tokens_per_row(self) -> int:
        sizes, longest = self._facts.config, self._facts.longest_row or 128
        if sizes.get("patch_size") and sizes.get("image_size"):
            return int((sizes["image_size"] / sizes["patch_size"]) ** 2) + 1
        return longest

    def train_bytes(self, candidate: Candidate) -> int:
        """Peak of training: the line through what was measured of the same structure, else the scaled formula."""
        points = self._points.get(structure(candidate), {})
        batch = int(candidate["per_device_train_batch_size"])
        if len(points) >= 2:
            low, high = _nearest_two(sorted(points), batch)
            slope = max((points[high] - points[low]) / (high - low), 0)
            return int(points[low] + slope * (batch - low))
        activations = self._activation_bytes(candidate) * self._scale(candidate)
        if len(points) == 1:
            known = next(iter(points))
            per_row = activations / batch
            return int(points[known] + per_row * (batch - known))
        return int(self._state_bytes(candidate) + activations)

    def seconds_per_row(self, candidate: Candidate) -> float:
        precision = SPEED[self._device].get(str(candidate.get("precision")), 1.0)
        recompute = RECOMPUTE if candidate.get("activation_checkpointing") else 1.0
        slower = 1.05 if candidate.get("attention") == "eager" else 1.0
        slower *= 1.01 if candidate.get("optim") == "adamw_torch" else 1.0
        batch = int(candidate["per_device_train_batch_size"])
        return precision * recompute * slower * (1 + LAUNCH_ROWS / batch)

    def learn(self, measurement: Measurement) -> None:
        """Correct the formula by a probe that ran. Probes that did not are ignored."""
        peak = measurement.train_bytes
        if not measurement.ran or peak is None:
            return
        candidate = measurement.candidate
        batch = int(candidate["per_device_train_batch_size"])
        self._points.setdefault(structure(candidate), {})[batch] = peak
        above = peak - self._state_bytes(candidate)
        expected = self._activation_bytes(candidate)
        if above > 0 and expected > 0:
            self._scales[bool(candidate.get("activation_checkpointing"))].append(above / expected)

    def _scale(self, candidate: Candidate) -> float:
        own = self._scales[bool(candidate.get("activation_checkpointing"))]
        other = self._scales[not candidate.get("activation_checkpointing")]
        known = sorted(own or other)
        return known[len(known) // 2] if known else 1.0

    def _state_bytes(self, candidate: Candidate) -> int:
        """Weights, gradients, and two Adam moments of the trainable ones; foreach keeps one more copy in the step."""
        trainable = self._facts.trainable_bytes
        moments = {"adafactor": 0.1, "sgd": 0}.get(str(candidate.get("optim")), 2)
        foreach = trainable if candidate.get("optim") == "adamw_torch" and self._device == "cuda" else 0
        return int(self._facts.parameter_bytes + trainable + moments * trainable + foreach)

    def _activation_bytes(self, candidate: Candidate) -> float:
        batch, tokens, hidden = int(candidate["per_device_train_batch_size"]), self._tokens, self._hidden
        half = candidate.get("precision") in ("bf16", "fp16") or "float32" not in self._facts.dtypes
        width = 1.0 if half else 2.0
        quadratic = 5 * self._heads * tokens / hidden if candidate.get("attention") == "eager" else 0.0
        layer = tokens * batch * hidden * (34 + quadratic) * width
        if candidate.get("activation_checkpointing"):
            stack = tokens * batch * hidden * 2 * width * self._layers + layer
        else:
            stack = layer * self._layers
        return stack + self._logit_bytes(batch)

    def _logit_bytes(self, batch: int) -> float:
        """Logits of a language model, at the start of backward: 14 bytes a value under a 32-bit loss."""
        if "CausalLM" not in self._facts.model_class and "LMHead" not in self._facts.model_class:
            return 0.0
        return 14.0 * batch * self._tokens * int(self._facts.config.get("vocab_size") or 0)


def structure(candidate: Candidate) -> str:
    """Equal for candidates that differ in the train batch (and what follows from it or only evaluation sees) alone."""
    ignored = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "logits",
        "loss",
        *METRICS_FIELDS,
    )
    return repr(sorted((k, v) for k, v in candidate.values.items() if k not in ignored))


def _nearest_two(known: list[int], batch: int) -> tuple[int, int]:
    """The two measured batches around `batch`, or the two nearest on one side."""
    above = [k for k in known if k >= batch]
    below = [k for k in known if k < batch]
    if above and below:
        return below[-1], above[0]
    return (above[0], above[1]) if above else (below[-2], below[-1])
