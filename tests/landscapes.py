"""Made-up machines for tests of the search: true memory and speed of every candidate, unknown to the planner."""

import random
from dataclasses import dataclass, field, replace

from autofit.harness.evaluation import copy_seconds, project
from autofit.knobs import Space, make_space
from autofit.prediction import Predictor
from autofit.records import (
    Budget,
    Candidate,
    Description,
    EvaluationGrowth,
    Failure,
    Machine,
    Measurement,
    Outcome,
    PhaseRecord,
    Speed,
)

MACHINE = Machine("cuda:0", "Made-up", 24 * 10**9, 64 * 10**9, "cpu", 8, "Linux", {}, "GPU-1", (8, 6), "1")
BASELINE = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "activation_checkpointing": False,
    "precision": "fp32",
    "optim": "adamw_torch",
    "per_device_eval_batch_size": 8,
    "eval_accumulation_steps": None,
    "attention": "sdpa",
    "logits": "full",
}


def make_description(**changes) -> Description:
    facts = {
        "arguments": {},
        "resolved": {},
        "fields": tuple(BASELINE),
        "model_class": "BertForSequenceClassification",
        "parameters": 110_000_000,
        "trainable_parameters": 110_000_000,
        "parameter_bytes": 440_000_000,
        "trainable_bytes": 440_000_000,
        "dtypes": {"float32": 110_000_000},
        "attention": "sdpa",
        "attentions": ("sdpa", "eager"),
        "can_checkpoint": True,
        "has_metrics": True,
        "has_logits_reduction": False,
        "reductions": ("full", "argmax"),
        "train_rows": 1000,
        "eval_rows": 1000,
        "longest_row": 512,
        "device_facts": {},
        "modules": (),
        "forkable": True,
        "config": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 30522},
    }
    return Description(**{**facts, **changes})


@dataclass
class Landscape:
    """Truth with random errors around the formula; `measure` answers as a probe would."""

    seed: int
    budget_bytes: int
    error: float = 0.3  # of the truth around the formula, per structure
    eval_bytes_per_row: float = 1000.0
    baseline: dict = field(default_factory=lambda: dict(BASELINE))
    description: Description = field(default_factory=make_description)
    allow: frozenset = frozenset({"code"})
    eval_speed: float = 1.0  # times the usual
    eval_step_bytes: float = 0.0  # of one row of an evaluation batch, beside what is kept
    copy_rates: tuple[float, float] | None = None  # bytes per second on the device and on the host; None: at no cost

    def __post_init__(self) -> None:
        self.space: Space = make_space(self.description, MACHINE, Candidate(self.baseline), {}, self.allow)
        self.budget = Budget(self.budget_bytes, 64 * 10**9)
        self._truth = Predictor(self.description, MACHINE.device)
        self.probes = 0

    def _factor(self, *key: object) -> float:
        return 1 + self.error * random.Random(repr((self.seed, key))).uniform(-1, 1)

    def train_bytes(self, candidate: Candidate) -> int:
        shape = [candidate[k] for k in ("activation_checkpointing", "precision", "attention", "optim")]
        return int(self._truth.train_bytes(candidate) * self._factor("bytes", *shape))

    def train_rate(self, candidate: Candidate) -> float:
        shape = [candidate[k] for k in ("activation_checkpointing", "precision", "attention", "optim")]
        return 100 / (self._truth.seconds_per_row(candidate) * self._factor("rate", *shape))

    def eval_rate(self, candidate: Candidate) -> float:
        """Rows per second of evaluation, copies left out."""
        batch = candidate["per_device_eval_batch_size"]
        return self.eval_speed * 500 * batch / (batch + 16)

    def _growth(self, candidate: Candidate, base: int, rows: int, per_row: float) -> EvaluationGrowth:
        batch, steps = candidate["per_device_eval_batch_size"], candidate["eval_accumulation_steps"]
        outputs = {"predictions": per_row}
        growth = project(
            on_host=False, base_bytes=base, first_step_peak=int(base + min(batch, rows) * (per_row + self.eval_step_bytes)), measured_peak=0, outputs=outputs, host_outputs=outputs,
            rows_measured=64, rows_total=rows, batch=batch, accumulation_steps=steps, concatenates=True,
        )  # fmt: skip
        if self.copy_rates is None:
            return growth
        growth = replace(growth, device_copy_rate=self.copy_rates[0], host_copy_rate=self.copy_rates[1])
        whole, timed = (copy_seconds(growth, n, batch, steps, True) for n in (rows, 256))
        return replace(growth, copy_seconds=whole, timed_copy_seconds=timed)

    def best_rate(self, in_code: bool = False) -> float:
        """The highest training rate of all candidates that fit."""
        own = self.space.baseline["attention"]
        candidates = [c for c in self.space.train_candidates() if in_code or c["attention"] == own]
        return max((self.train_rate(c) for c in candidates if self.train_bytes(c) <= self.budget_bytes), default=0.0)

    def measure(self, candidate: Candidate, purpose: str) -> Measurement:
        self.probes += 1
        facts = {"probe": f"{self.probes:04d}", "purpose": purpose, "candidate": candidate, "seconds": 10.0}
        peak = self.train_bytes(candidate)
        if peak > self.budget_bytes:
            failure = Failure("train", 1, "OutOfMemoryError", "out of memory")
            return Measurement(outcome=Outcome.DEVICE_OOM, failure=failure, **facts)
        phases = [PhaseRecord("train", 5.0, peak, peak, peak)]
        growth = eval_speed = None
        outcome = Outcome.FITS
        if purpose in ("baseline", "evaluate"):
            rows = self.description.eval_rows
            kept_whole = candidate.get("logits") == "full" and not candidate.get("batch_eval_metrics")
            per_row = self.eval_bytes_per_row if kept_whole else 8.0
            phases.append(PhaseRecord("evaluate", 1.0, None, int(0.5 * peak), int(0.5 * peak)))
            growth = self._growth(candidate, int(0.5 * peak), rows, per_row)
            eval_speed = Speed(256, (256 / self.eval_rate(candidate) + growth.timed_copy_seconds,))
            outcome = Outcome.OVER_BUDGET if growth.projected_process_bytes > self.budget_bytes else Outcome.FITS
        speed = None if purpose == "evaluate" else Speed(128, (128 / self.train_rate(candidate),) * 2)
        return Measurement(
            outcome=outcome, phases=tuple(phases), train_speed=speed, eval_speed=eval_speed, growth=growth, **facts
        )
