"""The nouns of autofit as frozen dataclasses: what is searched, on what, and what came back.

Everything here is plain data that `codec` turns into JSON and back. Bytes are integers, times are seconds, and what is not
known is None. Nothing here imports torch, reads a device or opens a file.
"""

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autofit.extrapolation import EvaluationGrowth, LeakCheck, Speed, WholeRun

KnobValue = bool | int | str | None

# Fields of TrainingArguments that change what a metrics function receives, in the order in which they are tried.
METRICS_FIELDS = ("batch_eval_metrics", "prediction_loss_only", "include_for_metrics", "eval_do_concat_batches")
EVALUATION_PHASES = ("evaluate", "generate", "metrics", "predict")  # of failures that say nothing against the training


class Outcome(str, Enum):
    """How a probe ended. All of them are results; none is an error of the search."""

    FITS = "fits"
    DEVICE_OOM = "device_oom"  # the device, or the cap that stands for the budget, had no more memory
    HOST_OOM = "host_oom"  # host memory ran out, or the process tree exceeded the host budget
    OVER_BUDGET = (
        "over_budget"  # it ran, and its peak or its projection to the whole evaluation set is above the budget
    )
    TIMEOUT = "timeout"
    KILLED = "killed"  # by a signal that autofit did not send
    CRASHED = "crashed"  # an exception that is not about memory, or a process that left no reply
    INVALID = "invalid"  # it ran and is no training: non-finite loss, no gradient, wrong batch, changed metrics
    CONTAMINATED = "contaminated"  # somebody else used the device or the processor while it was timed


class Effect(str, Enum):
    """What a knob may change beyond memory and speed."""

    EXACT = "exact"  # the same mathematics, up to the order of summation
    NUMERICS = "numerics"  # other rounding: bf16, tf32, another attention kernel
    TRAINING = "training"  # another optimisation problem: another optimizer, 16-bit weights


@dataclass(frozen=True)
class ModelTask:
    """A model that autofit trains by itself, on synthetic rows of the worst-case shape."""

    model: str  # as the user named it
    config: dict[str, Any]  # the model's configuration, whole
    task: str  # text-classification, causal-lm or image-classification
    effective_batch: int  # rows per optimizer step
    dtype: str  # of the weights: float32, bfloat16 or float16
    eval_rows: int  # rows of the evaluation set that the projection is made for
    seq_len: int | None = None  # tokens per row; None for images
    image_size: int | None = None  # pixels per side; None for text
    lora_rank: int | None = None
    base_args: dict[str, Any] = field(default_factory=dict)  # the user's own TrainingArguments fields


@dataclass(frozen=True)
class ScriptTask:
    """A user's command that ends by calling `Trainer.train()`."""

    command: tuple[str, ...]  # what follows the interpreter: a script or `-m module`, and its arguments
    directory: str  # where it runs
    interpreter_options: tuple[str, ...] = ()  # `-u`, `-X …`
    digest: str = ""  # of the script's own source, so that an edited script is another task
    launcher: tuple[str, ...] = ()  # the words before the script where no interpreter starts it: `accelerate launch …`
    environment: dict[str, str] = field(default_factory=dict)  # variables that the launcher sets for its one process


@dataclass(frozen=True)
class Task:
    """What is trained: exactly one of the two is given."""

    model: ModelTask | None = None
    script: ScriptTask | None = None

    @property
    def name(self) -> str:
        """A short name that is safe in a path."""
        if self.model is not None:
            text = f"{self.model.model}-{self.model.task}"
        else:
            text = next((part for part in self.script.command if part != "-m"), "script")
        stem = text.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py")
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).strip("-.")[:60] or "task"


@dataclass(frozen=True)
class Machine:
    """The hardware and the libraries that a measurement is true for."""

    device: str  # cpu or cuda:N, N counting the devices that this process may see
    device_name: str
    device_bytes: int  # that processes can hold there at most: a total that stays, not what is free now
    host_bytes: int  # likewise of host memory, cgroup limits respected
    cpu_name: str
    cpu_count: int  # processors this process may use
    system: str
    versions: dict[str, str]  # distribution -> version: python, torch, transformers, accelerate, autofit, …
    device_id: str | None = None  # the GPU's UUID
    capability: tuple[int, int] | None = None
    driver: str | None = None

    @property
    def key(self) -> str:
        """Equal where measurements may be reused.

        Sizes count with two digits: the same machine has some more or fewer bytes after an update of its kernel or
        driver, and two cards of one name (a RTX 3060 of 8 and of 12 GB) or two limits of a container differ by more.
        """
        sizes = [f"{self.device_bytes:.1e}", f"{self.host_bytes:.1e}"]
        hardware = [self.device_name, self.capability, self.driver, self.cpu_name, self.cpu_count]
        return digest([self.device.partition(":")[0], *hardware, *sizes, self.versions])


@dataclass(frozen=True)
class Budget:
    """What the training process may hold.

    On CUDA: everything it reserves plus its context. On the CPU: bytes above the process's state after warm-up, the
    model's own weights counted. `host_bytes` bounds the whole process tree in host memory.
    """

    device_bytes: int
    host_bytes: int
    unit: str = "GiB"  # the unit that the user wrote, for printing
    text: str = ""  # what the user wrote; empty for the default


@dataclass(frozen=True, eq=False)
class Candidate:
    """One decided value for every knob; nothing in it is automatic."""

    values: dict[str, KnobValue]

    def __getitem__(self, knob: str) -> KnobValue:
        return self.values[knob]

    def get(self, knob: str, default: KnobValue = None) -> KnobValue:
        return self.values.get(knob, default)

    def but(self, changes: Mapping[str, KnobValue] | None = None, **more: KnobValue) -> "Candidate":
        """The same with some knobs changed."""
        return Candidate({**self.values, **(changes or {}), **more})

    @property
    def key(self) -> str:
        return digest(self.values)

    def __eq__(self, other: object) -> bool:
        """By key, since `True == 1` in Python and they are different settings."""
        return isinstance(other, Candidate) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class Schedule:
    """What one child does between the start of training and its reply."""

    describe_only: bool = False  # stop at `Trainer.train()` and reply what was found there
    timed_steps: int = 10  # at least this many optimizer steps, in windows over the same rows …
    timed_seconds: float = 5.0  # … or this long, whichever comes first; 0 steps: training is not timed
    evaluate: bool = True
    seed: int = 0  # of which typical rows are timed
    save: bool = False  # one checkpoint, as the confirmation writes it
    sampled_rows: int | None = None  # training rows whose sizes are read; None: as many as there is time for
    sampled_eval_rows: int | None = None
    predict: bool = False  # also `predict()`, where evaluation is measured
    check_forms: bool = False  # with `describe_only`: of the fields that change what the metrics function receives
    check_accumulation: bool = False  # with `describe_only`: compare gradients of a batch and of its parts


@dataclass(frozen=True)
class ShadowDevice:
    """The device whose behaviour a shadow run is laid out to have."""

    kind: str  # cuda or cpu
    capability: tuple[int, int] | None = None  # CUDA's compute capability: decides the attention kernel and workspaces
    scaler: bool = False  # fp16, which a CPU refuses: the Trainer is asked for bf16, the rest laid over
    padded: bool = False  # batches of the asked size hold shorter rows, so that masks are needed, whatever a trace sees
    processes: int = 1  # of a DistributedDataParallel training; the run is one of them

    @property
    def name(self) -> str:
        """`cpu`, or `cuda-8.6`."""
        return self.kind if self.capability is None else f"{self.kind}-{'.'.join(map(str, self.capability))}"


@dataclass(frozen=True)
class Request:
    """What the parent asks of one child. Written before the child starts, and kept beside its reply."""

    probe: str  # number of the probe and name of its folder
    folder: str
    task: Task
    device: str
    schedule: Schedule
    arguments: dict[str, Any] = field(default_factory=dict)  # TrainingArguments fields to set
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # attn_implementation
    logits: str | None = None  # reduction to apply before metrics; None leaves what the workload has
    switches: dict[str, bool] = field(default_factory=dict)  # attributes to set on the Trainer before it trains
    files: str | None = (
        None  # a folder with emitted files (the confirmation): they give the values, `arguments` what must come out
    )
    budget_bytes: int | None = None  # None: not capped
    timed_eval_rows: int = 0  # rows of one timed evaluation, the same for every candidate; 0: evaluation is not timed
    requested_at: float = 0.0  # seconds since the epoch
    shadow: ShadowDevice | None = None  # a shadow run of such a device instead of a probe


@dataclass(frozen=True)
class ArgumentsSource:
    """How a script comes to its `TrainingArguments`: what has to be changed to change them."""

    kind: str  # flags, json, yaml (a parser read them), or code
    file: str | None = None  # the JSON or YAML file that the parser read, as an absolute path
    flags: bool = False  # the parser also takes flags, which win over the file
    where: str | None = None  # `train.py:42`, where the script itself makes them
    assigned: tuple[str, ...] = ()  # fields that the script assigns by itself after they were made


@dataclass(frozen=True)
class AccumulationCheck:
    """Whether one batch and the same rows in smaller batches, accumulated, give the same gradients in this workload."""

    rows: int = 0  # rows of the batch that was divided; 0: nothing was compared
    parts: int = 0  # accumulation steps that it was divided into
    difference: float | None = None  # norm of the difference of the gradients over their norm; None: not compared
    losses: tuple[float, ...] = ()  # as the Trainer would log them: of the whole batch, of the parts
    remedy: str = ""  # what to change in the script, for the installed version; empty where they are the same
    switch: str = ""  # attribute of the Trainer that was seen to make them the same; empty: none was
    switch_value: bool = False
    failure: str = ""  # why nothing could be compared

    @property
    def holds(self) -> bool:
        """Whether batch may be traded for accumulation."""
        return self.difference is not None and self.difference <= ACCUMULATION_TOLERANCE


ACCUMULATION_TOLERANCE = (
    0.02  # rounding in bf16 stays below; a loss that is averaged per micro-batch is off by the factor
)


@dataclass(frozen=True)
class Description:
    """The workload as it stands when it calls `Trainer.train()`, before anything is changed."""

    arguments: dict[str, Any]  # fields that the user gave, as JSON values, secrets left out
    resolved: dict[str, Any]  # the tunable fields as TrainingArguments resolved them
    fields: tuple[str, ...]  # every field of the installed TrainingArguments class in use
    model_class: str
    parameters: int
    trainable_parameters: int
    parameter_bytes: int
    trainable_bytes: int
    dtypes: dict[str, int]  # dtype -> parameters
    attention: str | None  # implementation in use; None where the model has no choice
    attentions: tuple[str, ...]  # implementations that this model and this installation support
    can_checkpoint: bool
    has_metrics: bool
    has_logits_reduction: bool  # the workload brings its own preprocess_logits_for_metrics
    reductions: tuple[str, ...]  # of logits, that its metrics were seen to accept: full, then the fewest bytes first
    train_rows: int | None  # None: an iterable data set
    eval_rows: int | None  # None: no evaluation set, or one whose loader is the script's own
    longest_row: int | None  # elements of the longest input of a row: tokens, or pixels
    device_facts: dict[str, Any]  # what torch says of the device: name, capability, bf16, total bytes
    forkable: bool  # nothing was changed in the environment before torch was imported, so a fork may have imported it
    modules: tuple[str, ...]  # library modules that the workload imported, for the server to import once
    config: dict[str, Any] = field(
        default_factory=dict
    )  # sizes of the model: layers, hidden, heads, vocabulary, labels
    notes: tuple[str, ...] = ()
    longest_rows: int | None = None  # training rows as long as the longest, of those looked at; None: all of them
    sampled_rows: int | None = None  # training rows whose sizes were read; None: not known
    sampled_eval_rows: int | None = None
    source: ArgumentsSource | None = None  # of a script; None: not known
    accumulation: AccumulationCheck | None = None  # None: not checked
    # Field that changes what the metrics function receives -> values with which metrics were seen to be the same, the
    # script's own first; only where they were looked at.
    metrics_forms: dict[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    predicts: bool = False  # the script calls `predict()` behind its training, or is asked to
    all_eval_rows: int | None = None  # of all evaluation sets, where there are several


@dataclass(frozen=True)
class PhaseRecord:
    """Peaks of one phase. Peaks are the process's since the phase began, what earlier phases left included."""

    name: str  # load, train, evaluate, predict, train-again, save
    seconds: float
    allocated_bytes: int | None = None  # live tensor bytes; on the CPU read in an untimed window of training only
    reserved_bytes: int | None = None  # held by torch's allocator; on the CPU growth of peak resident memory
    process_bytes: int | None = None  # what the budget is compared with: reserved and context; on the CPU as reserved
    retries: int | None = None  # allocations that succeeded only after the allocator gave cached memory back


LEAK = "leak_suspected"  # kind of the failure where what is kept over the whole training does not fit


@dataclass(frozen=True)
class Failure:
    """Why a probe did not fit or did not run."""

    phase: str  # start, load, train, backward, optimizer, evaluate, generate, metrics, predict, train-again, save
    step: int | None
    kind: str  # exception type, `signal 9`, `exit 3`, or the rule that was broken: nonfinite_loss, no_gradient, …
    message: str  # first line
    traceback: str = ""


@dataclass(frozen=True)
class Reply:
    """What a child writes before it ends."""

    outcome: Outcome
    phases: tuple[PhaseRecord, ...] = ()
    train_speed: Speed | None = None
    eval_speed: Speed | None = None
    growth: EvaluationGrowth | None = None
    failure: Failure | None = None
    echo: dict[str, Any] = field(default_factory=dict)  # the fields, model settings and rows that it really ran with
    description: Description | None = None
    cap: str = "none"  # enforced, judged (no cap can be set), or none
    context_bytes: int | None = None  # held on the device outside torch's allocator
    steps: int = 0  # optimizer steps that were applied
    skipped_steps: int = 0  # that the fp16 scaler skipped
    first_step_seconds: float | None = None  # from the request to the end of the first optimizer step
    measured_seconds: float = 0.0  # inside optimizer steps and evaluations
    delay_seconds: float | None = None  # that threads waited for a processor, in all
    leaks: LeakCheck | None = None  # None: not looked for
    notes: tuple[str, ...] = ()


class _Peaks:
    """What a measurement and a prediction tell of their `phases` and `growth` in the same words."""

    phases: tuple[PhaseRecord, ...]
    growth: EvaluationGrowth | None

    def phase(self, name: str) -> PhaseRecord | None:
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def train_bytes(self) -> int | None:
        """Peak of the training phases, as the budget counts it."""
        return _highest(self.phases, ("train", "train-again"))

    @property
    def eval_bytes(self) -> int | None:
        """Peak of evaluation: the projection to the whole set where there is one, never below the steps that ran."""
        measured = _highest(self.phases, ("evaluate", "predict"))
        if measured is None or self.growth is None:
            return measured
        return max(measured, self.growth.projected_process_bytes)

    @property
    def peak_bytes(self) -> int | None:
        """The figure that is compared with the budget."""
        peaks = [p.process_bytes for p in self.phases if p.process_bytes is not None]
        if self.growth is not None:
            peaks.append(self.growth.projected_process_bytes)
        return max(peaks, default=None)


@dataclass(frozen=True)
class Measurement(_Peaks):
    """One finished probe, as the journal keeps it."""

    probe: str
    purpose: str  # baseline, canary, train, evaluate, race, confirm, confirm-baseline
    candidate: Candidate
    outcome: Outcome
    seconds: float  # wall time from request to reply, as the parent saw it
    phases: tuple[PhaseRecord, ...] = ()
    train_speed: Speed | None = None
    eval_speed: Speed | None = None
    growth: EvaluationGrowth | None = None
    failure: Failure | None = None
    host_bytes: int | None = None  # peak of the process tree
    cap: str = "none"
    context_bytes: int | None = None
    first_step_seconds: float | None = None
    measured_seconds: float = 0.0
    delay_seconds: float | None = None
    device: str = ""  # machine key
    start: str = "fork"  # snapshot, fork or fresh: how the child was started
    leaks: LeakCheck | None = None  # None: not looked for
    notes: tuple[str, ...] = ()

    @property
    def eval_seconds(self) -> tuple[float, ...]:
        """Of one evaluation of the whole set, for each timed window: a projection. Empty where none was timed."""
        if self.eval_speed is None:
            return ()
        return self.eval_speed.seconds if self.growth is None else self.growth.seconds(self.eval_speed)

    @property
    def eval_rates(self) -> tuple[float, ...]:
        """Rows per second of the same: what was timed, less what copying costs over all rows."""
        if self.eval_speed is None:
            return ()
        rows = self.eval_speed.rows if self.growth is None else self.growth.rows_total
        return tuple(rows / seconds for seconds in self.eval_seconds)

    @property
    def eval_per_second(self) -> float | None:
        """The median of `eval_rates`."""
        return statistics.median(self.eval_rates) if self.eval_rates else None

    @property
    def ran(self) -> bool:
        """Whether its peaks and speeds are those of a whole run; a contaminated probe's peaks are."""
        return self.outcome in (Outcome.FITS, Outcome.OVER_BUDGET, Outcome.CONTAMINATED)


@dataclass(frozen=True)
class Prediction(_Peaks):
    """What a shadow run says of one candidate, as the journal keeps it. Nothing here was measured on a device."""

    candidate: Candidate
    device: str  # what was simulated: `cuda-8.6` or `cpu`
    source: str  # `traced` at these very batch sizes, or `rewritten` from traces at others
    phases: tuple[PhaseRecord, ...] = ()  # as a probe would measure them; `seconds` is 0
    growth: EvaluationGrowth | None = None
    step_seconds: float | None = None  # of one optimizer step: an estimate of which only the order counts
    categories: dict[str, int] = field(default_factory=dict)  # bytes alive at the highest instant of training
    modules: tuple[tuple[str, int], ...] = ()  # that hold most at that instant, the largest first
    failure: Failure | None = None  # what could not be traced; there are no phases then
    leaks: LeakCheck | None = None  # what the second step made and nothing gave back; None: nothing
    notes: tuple[str, ...] = ()
    machine: str = ""  # key of the machine, its libraries included, whose probes it was made for; empty: of no search


@dataclass(frozen=True)
class Choice:
    """A confirmed candidate. Speeds are from the confirmation, interleaved with the baseline's."""

    candidate: Candidate
    probe: str  # the confirming probe
    train_per_second: float
    train_spread: float  # half the range of the windows' rates, as a share of the median
    eval_per_second: float | None
    peak_bytes: int
    gain: float | None  # its speed over the baseline's in the same confirmation; None when the baseline did not fit
    folder: str = ""
    eval_seconds: float | None = None  # of one evaluation of the whole set; a projection


@dataclass(frozen=True)
class Selection:
    """The answer of a search. `best` can be said in TrainingArguments alone, `best_with_code` needs a snippet."""

    best: Choice | None
    best_with_code: Choice | None
    baseline: Candidate | None
    baseline_outcome: Outcome | None
    front: tuple[Candidate, ...] = ()  # Pareto front of memory against training speed
    reasons: dict[str, str] = field(default_factory=dict)  # candidate key -> why it was not chosen
    notes: tuple[str, ...] = ()
    objective: str = "throughput"  # of training, or wallclock: gains are then of the whole run, and projected
    run: WholeRun | None = None  # the user's own training, that wall time is projected to; None: of an older search


def digest(value: Any) -> str:
    """Twelve hex digits that are equal for equal JSON values, whatever the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _highest(phases: tuple[PhaseRecord, ...], names: tuple[str, ...]) -> int | None:
    return max((p.process_bytes for p in phases if p.name in names and p.process_bytes is not None), default=None)
