"""Measurements for the tests of tables and terminals, as small as they can be."""

from autofit.records import (
    Budget,
    Candidate,
    Choice,
    Description,
    EvaluationGrowth,
    Failure,
    Machine,
    Measurement,
    Outcome,
    PhaseRecord,
    Selection,
    Speed,
)

MB = 10**6
BUDGET = Budget(500 * MB, 12_000 * MB, "MB", "500MB")
BASELINE = Candidate(
    {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": False,
        "precision": "fp32",
        "attention": "sdpa",
        "optim": "adamw_torch",
        "per_device_eval_batch_size": 8,
        "eval_accumulation_steps": None,
        "logits": "full",
    }
)
LARGE = BASELINE.but(per_device_train_batch_size=32, gradient_accumulation_steps=1)
SMALL = BASELINE.but(per_device_train_batch_size=2, gradient_accumulation_steps=16)
FUSED = LARGE.but(optim="adamw_torch_fused")
IN_CODE = LARGE.but(logits="argmax")

MACHINE = Machine(
    device="cpu",
    device_name="Some CPU",
    device_bytes=16 * 10**9,
    host_bytes=16 * 10**9,
    cpu_name="Some CPU",
    cpu_count=4,
    system="Linux",
    versions={"torch": "2.9.0", "transformers": "5.0.0"},
)
DESCRIPTION = Description(
    arguments={},
    resolved={},
    fields=("activation_checkpointing", "per_device_train_batch_size"),
    model_class="BertForSequenceClassification",
    parameters=109_483_778,
    trainable_parameters=109_483_778,
    parameter_bytes=437_935_112,
    trainable_bytes=437_935_112,
    dtypes={"float32": 109_483_778},
    attention="sdpa",
    attentions=("sdpa", "eager"),
    can_checkpoint=True,
    has_metrics=True,
    has_logits_reduction=False,
    reductions=("full", "argmax"),
    train_rows=1000,
    eval_rows=10_000,
    longest_row=128,
    device_facts={},
    forkable=True,
    modules=(),
)


def probe(
    number: int,
    candidate: Candidate,
    purpose: str = "train",
    outcome: Outcome = Outcome.FITS,
    *,
    rates: tuple[float, ...] = (),
    eval_rates: tuple[float, ...] = (),
    train: int | None = None,
    evaluate: int | None = None,
    projected: int | None = None,
    failure: Failure | None = None,
    cap: str = "enforced",
) -> Measurement:
    """A measurement; memory in MB, speed as the rate of each window."""
    phases = [("train", train), ("evaluate", evaluate)]
    growth = None
    if projected is not None:
        growth = EvaluationGrowth(32, 10_000, 1.0, 1.0, projected * MB, 0)
    return Measurement(
        f"{number:04d}",
        purpose,
        candidate,
        outcome,
        12.5,
        phases=tuple(PhaseRecord(name, 1.0, process_bytes=held * MB) for name, held in phases if held is not None),
        train_speed=Speed(32, tuple(32 / rate for rate in rates)) if rates else None,
        eval_speed=Speed(64, tuple(64 / rate for rate in eval_rates)) if eval_rates else None,
        growth=growth,
        failure=failure,
        cap=cap,
    )


def choice(candidate: Candidate, rate: float, gain: float | None, peak: int = 412, **more) -> Choice:
    return Choice(candidate, "0009", rate, 0.01, more.pop("eval_rate", None), peak * MB, gain, **more)


def selection(best: Choice | None, with_code: Choice | None = None, **more) -> Selection:
    told = {"baseline": BASELINE, "baseline_outcome": Outcome.FITS, **more}
    return Selection(best, with_code, **told)


def usual() -> tuple[list[Measurement], Selection]:
    """A baseline that fits, a winner twice as fast, one that is slower, and one that runs out of memory."""
    measurements = [
        probe(1, BASELINE, "baseline", rates=(19.6, 19.8), eval_rates=(120.0,), train=300, evaluate=310, projected=380),
        probe(2, LARGE, rates=(41.0, 41.4), train=400),
        probe(3, SMALL, rates=(9.0, 9.2), train=250),
        probe(
            4,
            LARGE.but(activation_checkpointing=True),
            outcome=Outcome.DEVICE_OOM,
            failure=Failure("backward", 2, "OutOfMemoryError", "no more memory: tried to allocate 96 MiB"),
        ),
        probe(
            5,
            BASELINE,
            "confirm-baseline",
            rates=(19.5, 19.7),
            eval_rates=(120.0,),
            train=300,
            evaluate=310,
            projected=380,
        ),
        probe(6, LARGE, "confirm", rates=(41.1, 41.3), eval_rates=(310.0,), train=402, evaluate=410, projected=412),
    ]
    return measurements, selection(choice(LARGE, 41.2, 2.102, folder="runs/x/best"))
