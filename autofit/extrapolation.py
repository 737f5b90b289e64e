"""What a probe of some steps says of the user's whole training: speed, the growth of evaluation, what is never given back.

Plain data, as `records` has it, which hands these names on. Not here: how long that training is (`schedule`).
"""

import statistics
from dataclasses import dataclass, field

LEAST_LINEAR = 0.1  # of a timed evaluation, that is no copying, whatever the rate of copies was measured to be


@dataclass(frozen=True)
class Speed:
    """Timed windows over the same rows, in the order in which they ran."""

    rows: int  # rows per window
    seconds: tuple[float, ...]  # wall time of each window
    delay_share: float | None = None  # share of wall time that the process's threads waited for a processor

    @property
    def per_second(self) -> float:
        """Rows per second: the median window."""
        return self.rows / statistics.median(self.seconds)


@dataclass(frozen=True)
class EvaluationGrowth:
    """How evaluation grows with its rows, measured over a few steps and projected to the whole set."""

    rows_measured: int
    rows_total: int
    device_bytes_per_row: float  # accumulated on the device per row, padded to the longest
    host_bytes_per_row: float  # accumulated on the host per row
    projected_process_bytes: int  # device peak of the whole evaluation; a projection
    projected_host_bytes: int  # growth of host memory over the whole evaluation; a projection
    outputs: dict[str, float] = field(default_factory=dict)  # what accumulates, by the model's names -> bytes per row
    metrics_bytes_per_row: float = 0.0  # that the metrics function takes beside its arguments
    host_level_bytes: int | None = None  # of the process tree when evaluation began
    phase: str = "evaluate"  # or predict: what was projected
    base_bytes: int | None = None  # in use on the device when evaluation began
    step_bytes: int | None = None  # on the device, of one step beside what it puts out; of a batch of …
    batch: int | None = None  # … so many rows
    copy_seconds: float = 0.0  # of the whole evaluation: in which what has accumulated is copied; a projection
    timed_copy_seconds: float = 0.0  # the same of the rows that were timed; both 0 where it comes to little
    device_copy_rate: float | None = None  # bytes per second of torch's concatenation there; None: not measured
    host_copy_rate: float | None = None  # likewise of NumPy's
    metrics_seconds: float | None = None  # of the metrics function in one timed evaluation, which they are part of

    def seconds(self, timed: Speed) -> tuple[float, ...]:
        """Of one evaluation of the whole set, for each timed window; a projection.

        The part that is linear in rows, which the windows hold beside their own copies, and the copies, which are not.
        """
        alone = [max(seconds - self.timed_copy_seconds, LEAST_LINEAR * seconds) for seconds in timed.seconds]
        return tuple(self.rows_total * seconds / timed.rows + self.copy_seconds for seconds in alone)

    @property
    def prediction_bytes_per_row(self) -> float:
        """Of what the model puts out: neither losses nor labels nor inputs."""
        return sum(size for name, size in self.outputs.items() if name not in ("losses", "labels", "inputs"))


@dataclass(frozen=True)
class RunSeconds:
    """What a whole training takes, loading and checkpoints left out: projected, never measured."""

    train: float
    evaluate: float

    @property
    def total(self) -> float:
        return self.train + self.evaluate

    @property
    def eval_share(self) -> float:
        return self.evaluate / self.total if self.total else 0.0


@dataclass(frozen=True)
class WholeRun:
    """The user's own training, by its schedule."""

    train_rows: int | None  # that are trained on in all; None: not known
    evaluations: int
    eval_rows: int | None  # of the evaluation set whose speed is measured
    all_eval_rows: int = 0  # of all evaluation sets, each of which is gone through at every evaluation
    told: str = ""  # what is assumed of it, or why it is not known

    @property
    def is_known(self) -> bool:
        """Whether training can be weighed against evaluation."""
        return self.train_rows is not None and bool(self.eval_rows)

    def seconds(self, train_per_second: float | None, eval_seconds: float | None) -> RunSeconds | None:
        """At so many rows per second of training and so many seconds for one evaluation of the measured set; None where
        either is not known. Other evaluation sets are taken to be as fast."""
        if self.train_rows is None or not train_per_second or (eval_seconds is None and self.evaluations):
            return None
        sets = self.all_eval_rows / self.eval_rows if self.eval_rows else 0.0
        return RunSeconds(self.train_rows / train_per_second, self.evaluations * sets * (eval_seconds or 0.0))


@dataclass(frozen=True)
class LeakCheck:
    """What a training keeps and never gives back, by what it keeps it, and how often the user's own training does that.

    Zero where nothing was seen that matters. On the CPU the device's bytes are host memory and count as such too.
    """

    device_bytes_per_step: float = 0.0  # optimizer step
    host_bytes_per_step: float = 0.0
    device_bytes_per_evaluation: float = 0.0  # of the whole set; of memory that processes keep at least this
    host_bytes_per_evaluation: float = 0.0  # of the process tree
    processes_per_evaluation: int = 0
    files_per_evaluation: int = 0  # descriptors
    steps: int | None = None  # of the user's own training; None: not known
    evaluations: int | None = None
    holders: tuple[str, ...] = ()  # objects of the workload that hold it, or modules and lines that made it

    @property
    def found(self) -> bool:
        return max(self.per_step_bytes, self.per_evaluation_bytes, self.processes_per_evaluation) > 0

    @property
    def per_step_bytes(self) -> float:
        return max(self.device_bytes_per_step, self.host_bytes_per_step)

    @property
    def per_evaluation_bytes(self) -> float:
        return max(self.device_bytes_per_evaluation, self.host_bytes_per_evaluation)

    @property
    def device_bytes(self) -> int:
        """By which the device's memory grows over the whole training; an extrapolation."""
        return self._planned(self.device_bytes_per_step, self.device_bytes_per_evaluation)

    @property
    def host_bytes(self) -> int:
        return self._planned(self.host_bytes_per_step, self.host_bytes_per_evaluation)

    def _planned(self, per_step: float, per_evaluation: float) -> int:
        return int(per_step * (self.steps or 0) + per_evaluation * (self.evaluations or 0))
