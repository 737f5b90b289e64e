"""From shadow runs to predictions: one pair of traces per structure, every batch size from them.

A structure is everything but the batch sizes. It is traced at batches 2 and 3; the two event lists give the list of any
other batch, which is replayed through the allocator. Where the two lists are not one program, and at a batch of one
row, where torch takes other views and copies, the very candidate is traced instead.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autofit.catalog import Gpu, find_gpu
from autofit.harness.evaluation import project
from autofit.harness.shadow.allocator import AllocatorSettings
from autofit.harness.shadow.family import TRACED_ACCUMULATION, Family, TracesDifferError, fit, with_accumulation
from autofit.harness.shadow.semantics.workspace import cublas_workspace_bytes
from autofit.harness.shadow.step_time import CPU_RATES, Rates, gpu_rates, step_seconds
from autofit.harness.shadow.trace import Replay, Trace, breakdown, by_module, replay
from autofit.harness.trainer_hooks import TRACE_FILE
from autofit.launch import Launcher
from autofit.launch.watch import SERVER_DIED
from autofit.leak_words import MOST_NAMED, MUCH_BYTES, leak_sentences
from autofit.records import (
    Candidate,
    Description,
    EvaluationGrowth,
    Failure,
    LeakCheck,
    Machine,
    Outcome,
    PhaseRecord,
    Prediction,
    Reply,
    Request,
    Schedule,
    ShadowDevice,
    Task,
    digest,
)
from autofit.schedule import planned
from autofit.trainer_args import arguments_of

SEMANTICS = 2  # version of what a shadow run models; traces of another one are not read
BATCHES = (2, 3)  # traced; from 2 on the operators are the same at every batch
TIME_LIMIT_SECONDS = 600.0
TRACED_EVAL_STEPS = 4  # of evaluation in a trace (`data_sets.EVAL_STEPS`)
TOP_MODULES = 10
LEAST_SHARE = 0.01  # of what a step keeps, that is named
CUDNN_FIRST = (9, 10)  # majors of capability on which torch prefers cuDNN's attention; see `semantics.attention`
WIDE_HEAD = 192  # elements of an attention head, beyond which consumer cards have no flash attention in backward
WORKSPACE = "workspace"  # category of the trace
# Of the context where nobody has measured the card's: between the figures of a T4 and of an H100 in `catalog`.
UNKNOWN_CONTEXT_BYTES = 500 * 2**20


@dataclass(frozen=True)
class ShadowTarget:
    """A device to predict for: what it makes of operators, what it holds beside them, and how fast it is."""

    name: str
    device: ShadowDevice
    context_bytes: int
    rates: Rates


def make_target(gpu: Gpu | None = None, machine: Machine | None = None) -> ShadowTarget:
    """The target of a card of the catalog, else of this machine: its GPU, or the CPU without CUDA's ways."""
    if gpu is None and machine is not None and machine.device != "cpu":
        gpu = find_gpu(machine.device_name)
        if gpu is None:
            unknown = find_gpu("a100-40gb")  # for the order of speeds alone
            device = ShadowDevice("cuda", machine.capability)
            return ShadowTarget(machine.device_name, device, UNKNOWN_CONTEXT_BYTES, gpu_rates(unknown))
    if gpu is None:
        return ShadowTarget("cpu", ShadowDevice("cpu"), 0, CPU_RATES)
    context = UNKNOWN_CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes
    return ShadowTarget(gpu.name, ShadowDevice("cuda", gpu.capability), context, gpu_rates(gpu))


class ShadowRuns:
    """Predictions for one described workload on one target; shadow runs are made when first needed, and kept in `folder`.

    `on_run` is called with a sentence before each shadow run; `limit` tells how many seconds one may take.
    """

    def __init__(
        self,
        task: Task,
        description: Description,
        target: ShadowTarget,
        launcher: Launcher,
        folder: Path,
        versions: dict[str, str],
        settings: AllocatorSettings | None = None,
        on_run: Callable[[str], None] = lambda text: None,
        limit: Callable[[], float] = lambda: TIME_LIMIT_SECONDS,
    ) -> None:
        self._task, self._description, self.target, self._launcher = task, description, target, launcher
        self._folder, self._on_run, self._limit = folder, on_run, limit
        self._settings = settings or AllocatorSettings()
        self._identity = digest(
            [SEMANTICS, versions, dataclasses.asdict(task)]
        )  # of everything that all its traces share
        self._families: dict[str, Family | Failure | None] = {}  # None: the lists differ, so each is traced by itself

    # ---- what is asked ----

    def predict(self, candidate: Candidate) -> Prediction:
        """Peaks, breakdown and step time of one candidate; runs shadow runs where its structure is not known yet."""
        traced = self.trace(candidate)
        if isinstance(traced, Failure):
            return Prediction(candidate, self.target.device.name, "traced", failure=traced)
        trace, source = traced
        return self._read(candidate, trace, source)

    def trace(self, candidate: Candidate) -> tuple[Trace, str] | Failure:
        """The events of the candidate, and whether they are `traced` or `rewritten`; a Failure where it cannot be traced."""
        batch, eval_batch, accumulation = self._sizes(candidate)
        if min(batch, eval_batch) >= min(BATCHES):
            family = self.family(candidate)
            if isinstance(family, Failure):
                return family
            if family is not None:
                with contextlib.suppress(ValueError):  # a size that falls with the batch is negative somewhere
                    return self._finished(family.at(batch, eval_batch), accumulation), "rewritten"
        traced = self._run(candidate, batch, eval_batch)
        if isinstance(traced, Failure):
            return traced
        return self._finished(traced, accumulation), "traced"

    def verify(self, candidate: Candidate) -> Prediction:
        """The prediction of a trace at these very batch sizes, to be held against `predict`."""
        batch, eval_batch, accumulation = self._sizes(candidate)
        traced = self._run(candidate, batch, eval_batch)
        if isinstance(traced, Failure):
            return Prediction(candidate, self.target.device.name, "traced", failure=traced)
        return self._read(candidate, self._finished(traced, accumulation), "traced")

    def family(self, candidate: Candidate) -> Family | Failure | None:
        """The traces of the candidate's structure at every batch; None where two traces are not one program."""
        key = self._key(candidate)
        if key not in self._families:
            self._families[key] = self._make_family(candidate)
        return self._families[key]

    def is_known(self, candidate: Candidate) -> bool:
        """Whether `predict` needs no shadow run: it has been made, by this search or an earlier one in the same folder."""
        batch, eval_batch, _ = self._sizes(candidate)
        if min(batch, eval_batch) >= min(BATCHES):
            if self._key(candidate) not in self._families and not all(
                self._kept(candidate, b, b).exists() for b in BATCHES
            ):
                return False
            if self.family(candidate) is not None:
                return True
        return self._kept(candidate, batch, eval_batch).exists()

    def has_failed(self, candidate: Candidate) -> bool:
        """Whether its structure could not be traced."""
        return isinstance(self._families.get(self._key(candidate)), Failure)

    def fits(self, candidate: Candidate, cap_bytes: int) -> bool | None:
        """Whether the candidate runs through under a cap on torch's own memory, which releases cached segments when it is met.

        None where it cannot be traced.
        """
        traced = self.trace(candidate)
        if isinstance(traced, Failure):
            return None
        settings = dataclasses.replace(self._settings, cap_bytes=cap_bytes)
        if self.target.device.kind == "cpu":
            return replay(traced[0], None).peak_allocated_bytes <= cap_bytes
        return replay(traced[0], settings).out_of_memory is None

    # ---- traces ----

    def _sizes(self, candidate: Candidate) -> tuple[int, int, int]:
        """(train batch, evaluation batch, accumulation steps).

        Evaluation follows training where it is no knob, and has no more rows in a batch than in its set.
        """
        batch = int(candidate["per_device_train_batch_size"])
        eval_batch = int(candidate.get("per_device_eval_batch_size") or batch)
        return (
            batch,
            min(eval_batch, self._description.eval_rows or eval_batch),
            int(candidate.get("gradient_accumulation_steps") or 1),
        )

    def _key(self, candidate: Candidate) -> str:
        """Equal for candidates that are one program but for their batch sizes."""
        values = {**candidate.values}
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "loss"):
            values.pop(name, None)
        values["eval_accumulation_steps"] = _flush_steps(candidate)
        if values.get("precision") == "tf32":
            values["precision"] = "fp32"  # the same tensors
        values["gradient_accumulation_steps"] = min(self._sizes(candidate)[2], TRACED_ACCUMULATION)
        values["padded"] = self._device_of(candidate).padded
        return digest(values)

    def _make_family(self, candidate: Candidate) -> Family | Failure | None:
        traces = []
        for batch in BATCHES:
            traced = self._run(candidate, batch, batch)
            if isinstance(traced, Failure):
                return traced
            traces.append(traced)
        try:
            family = fit(*traces)
        except TracesDifferError as error:
            self._on_run(f"traced one by one: {error}")
            return None
        return dataclasses.replace(family, template=_with_joined_facts(family.template, *traces))

    def _run(self, candidate: Candidate, batch: int, eval_batch: int) -> Trace | Failure:
        """One shadow run, or its trace as it was kept."""
        kept = self._kept(candidate, batch, eval_batch)
        folder = kept.parent
        with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or one that cannot be read
            return Trace.load(kept)
        self._on_run(f"shadow run of {_words(candidate)} at batch {batch}")
        shutil.rmtree(folder, ignore_errors=True)
        for _ in range(2):
            ended = self._launcher.probe(
                self._request(candidate, batch, eval_batch, folder),
                how=self._way(),
                time_limit=self._limit(),
                options=self._task.script.interpreter_options if self._task.script else (),
                trusted=True,  # it touches no device, so that a fork of anything is safe
            )
            failure = ended.reply.failure
            if ended.reply.outcome is not Outcome.KILLED and (failure is None or failure.kind != SERVER_DIED):
                break  # else somebody has ended it, which says nothing of the workload
        return self._result(ended.reply, kept)

    def _way(self) -> str:
        if self._launcher.snapshot is not None:
            return "snapshot"
        return "fork" if self._description.forkable else "fresh"

    def _kept(self, candidate: Candidate, batch: int, eval_batch: int) -> Path:
        """Where the trace lies, or will."""
        device = dataclasses.asdict(self._device_of(candidate))
        return self._folder / digest([self._identity, self._key(candidate), device, batch, eval_batch]) / TRACE_FILE

    def _result(self, reply: Reply, kept: Path) -> Trace | Failure:
        if reply.outcome is not Outcome.FITS:
            kept.unlink(missing_ok=True)  # what failed after it had been written
            return reply.failure or Failure("start", None, reply.outcome.value, "the shadow run left no reason")
        try:
            return Trace.load(kept)
        except (FileNotFoundError, ValueError) as error:
            return Failure("train", None, type(error).__name__, f"the shadow run left no trace: {error}")

    def _device_of(self, candidate: Candidate) -> ShadowDevice:
        """What is traced: one capability for all that choose the same kernels, so that many cards share traces."""
        capability = self.target.device.capability
        if capability is not None:
            sizes = self._description.config
            heads = int(sizes.get("num_attention_heads") or 1)
            head = int(sizes.get("head_dim") or 0) or int(sizes.get("hidden_size") or 0) // heads
            if capability < (8, 0):
                capability = (7, 5)
            elif capability[0] in CUDNN_FIRST:
                capability = (capability[0], 0)
            elif head <= WIDE_HEAD:
                capability = (8, 0)
        longest = self._description.longest_rows
        return dataclasses.replace(
            self.target.device,
            capability=capability,
            scaler=candidate.get("precision") == "fp16",
            padded=longest is not None and self._sizes(candidate)[0] > longest,
        )

    def _finished(self, trace: Trace, accumulation: int) -> Trace:
        """The trace as the candidate and the target would have it."""
        return self._on_target(_accumulated(self._cut(trace), accumulation))

    def _cut(self, trace: Trace) -> Trace:
        """Without the steps of evaluation beyond the end of a small set, which a trace goes through again."""
        rows, ends = self._description.eval_rows, trace.facts.get("prediction_events")
        if not rows or not ends:
            return trace
        steps = -(-rows // int(trace.facts["eval_batch"]))
        if steps >= len(ends):
            return trace
        first = int((trace.phases == trace.phase_names.index("evaluate")).argmax())
        stop = first + int(ends[steps - 1])
        blocks = int((trace.events[:stop] >= 0).sum())  # they are numbered in the order of their allocation
        operations = trace.op_phases != trace.phase_names.index("evaluate")  # nothing is told of evaluation's time
        return dataclasses.replace(
            trace,
            events=trace.events[:stop],
            phases=trace.phases[:stop],
            sizes=trace.sizes[:blocks],
            categories=trace.categories[:blocks],
            modules=trace.modules[:blocks],
            micro_batches=trace.micro_batches[:blocks],
            op_flops=trace.op_flops[operations],
            op_bytes=trace.op_bytes[operations],
            op_kinds=trace.op_kinds[operations],
            op_phases=trace.op_phases[operations],
            facts={**trace.facts, "prediction_events": ends[:steps]},
        )

    def _on_target(self, trace: Trace) -> Trace:
        """A trace with the workspaces of the target's own capability."""
        capability = self.target.device.capability
        if capability is None or WORKSPACE not in trace.category_names:
            return trace
        of_workspace = trace.categories == trace.category_names.index(WORKSPACE)
        return dataclasses.replace(trace, sizes=np.where(of_workspace, cublas_workspace_bytes(capability), trace.sizes))

    def _request(self, candidate: Candidate, batch: int, eval_batch: int, folder: Path) -> Request:
        traced = candidate.but(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=min(self._sizes(candidate)[2], TRACED_ACCUMULATION),
        )
        changes: dict[str, Any] = {}
        if "eval_accumulation_steps" in candidate.values:
            changes["eval_accumulation_steps"] = _flush_steps(candidate)
        if candidate.get("precision") == "fp16":  # refused on a CPU; the shadow device says what is meant
            changes["precision"] = "bf16"
        traced = traced.but(changes)
        attention = candidate.get("attention")
        arguments = arguments_of(traced, self._description.fields, "cpu")
        if "per_device_eval_batch_size" in self._description.fields:
            arguments["per_device_eval_batch_size"] = (
                eval_batch  # where it is no knob, too: one batch for all of a trace
            )
        return Request(
            probe=folder.name,
            folder=str(folder),
            task=self._task,
            device="cpu",
            schedule=Schedule(timed_steps=0, evaluate=bool(self._description.eval_rows)),
            arguments=arguments,
            model_kwargs={} if attention is None else {"attn_implementation": attention},
            logits=candidate.get("logits"),
            shadow=self._device_of(candidate),
        )

    # ---- predictions ----

    def _read(self, candidate: Candidate, trace: Trace, source: str) -> Prediction:
        is_cuda = self.target.device.kind == "cuda"
        replayed = replay(trace, self._settings if is_cuda else None)
        context = self.target.context_bytes
        phases = tuple(
            PhaseRecord(name, 0.0, peak.allocated_bytes, peak.reserved_bytes, peak.reserved_bytes + context, 0)
            for name, peak in replayed.peaks.items()
        )
        event = _highest_event(trace, replayed)
        leaks = self._leaks(candidate, trace)
        return Prediction(
            candidate=candidate,
            device=self.target.device.name,
            source=source,
            phases=phases,
            growth=self._growth(candidate, trace, replayed),
            step_seconds=self.step_seconds(candidate, trace),
            categories=breakdown(trace, event),
            modules=tuple(by_module(trace, event, TOP_MODULES).items()),
            leaks=leaks,
            notes=(*trace.facts.get("notes", ()), *leak_sentences(leaks)),
        )

    def _growth(self, candidate: Candidate, trace: Trace, replayed: Replay) -> EvaluationGrowth | None:
        """Evaluation over the whole set, from the few steps that the trace holds."""
        facts, rows = trace.facts, self._description.eval_rows
        if "evaluate" not in replayed.peaks or not rows or "prediction_events" not in facts:
            return None
        context, live = self.target.context_bytes, trace.live_bytes
        first = int((trace.phases == trace.phase_names.index("evaluate")).argmax())
        batch = int(facts["eval_batch"])
        steps = candidate.get("eval_accumulation_steps")
        return project(
            on_host=self.target.device.kind == "cpu",
            base_bytes=int(live[first - 1]) + context,
            first_step_peak=int(live[first : first + int(facts["prediction_events"][0])].max()) + context,
            measured_peak=replayed.peaks["evaluate"].reserved_bytes + context,
            outputs=_per_row(facts["outputs"], batch),
            host_outputs=_per_row(facts["host_outputs"], batch),
            rows_measured=min(len(facts["prediction_events"]) * batch, rows),
            rows_total=rows,
            batch=batch,
            accumulation_steps=None if steps is None else int(steps),
            concatenates=bool(facts["concatenates"]),
        )

    def _leaks(self, candidate: Candidate, trace: Trace) -> LeakCheck | None:
        """What each step keeps, where it comes to much over the user's training, by the modules and lines that made it."""
        accumulation = self._sizes(candidate)[2]
        times = accumulation / min(accumulation, TRACED_ACCUMULATION)
        made: dict[str, int] = {}
        for block, line in trace.facts.get("kept", {}).items():
            module = trace.module_names[trace.modules[int(block)]]
            where = " at ".join(part for part in (module, line) if part)
            made[where] = made.get(where, 0) + int(trace.sizes[int(block)])
        steps, evaluations = planned(self._description.resolved, self._description.train_rows)
        each = sum(made.values()) * times
        if each * (steps or 1) <= MUCH_BYTES:
            return None
        least = LEAST_SHARE * sum(made.values())
        largest = sorted((w for w in made if w and made[w] >= least), key=lambda w: -made[w])[:MOST_NAMED]
        return LeakCheck(
            device_bytes_per_step=each,
            host_bytes_per_step=each if self.target.device.kind == "cpu" else 0.0,
            steps=steps,
            evaluations=evaluations,
            holders=tuple(f"what {where} made" for where in largest),
        )

    def step_seconds(self, candidate: Candidate, trace: Trace) -> float:
        """Of one optimizer step, from the second one's operators: its micro-batches times their number, and the update."""
        begin, update, end = (int(place) for place in trace.facts["second_step"])
        accumulation = self._sizes(candidate)[2]
        tf32 = candidate.get("precision") == "tf32"
        rates = self.target.rates
        capability = self.target.device.capability
        if candidate.get("precision") == "bf16" and capability is not None and capability < (8, 0):
            rates = dataclasses.replace(rates, half_flops=rates.fp32_flops)  # there it is emulated

        def seconds(start: int, stop: int) -> float:
            chosen = slice(start, stop)
            return step_seconds(
                trace.op_flops[chosen],
                trace.op_bytes[chosen],
                trace.op_kinds[chosen],
                trace.op_kind_names,
                rates,
                tf32,
            )

        micro_batches = min(accumulation, TRACED_ACCUMULATION)
        return seconds(begin, update) * accumulation / micro_batches + seconds(update, end)


def _accumulated(trace: Trace, steps: int) -> Trace:
    return trace if steps <= TRACED_ACCUMULATION else with_accumulation(trace, steps)


def _flush_steps(candidate: Candidate) -> int | None:
    """Steps after which a trace moves what evaluation keeps to the host; None where it ends before."""
    steps = candidate.get("eval_accumulation_steps")
    return int(steps) if steps is not None and int(steps) <= TRACED_EVAL_STEPS else None


def _with_joined_facts(template: Trace, *traces: Trace) -> Trace:
    """The template with facts of every trace by its batch, where they need not be one: notes, and what evaluation keeps."""
    facts = dict(template.facts)
    facts["notes"] = list(dict.fromkeys(note for trace in traces for note in trace.facts.get("notes", ())))
    for name in ("outputs", "host_outputs"):
        if any(name in trace.facts for trace in traces):
            facts[name] = {str(trace.facts["batch"]): trace.facts.get(name, {}) for trace in traces}
    return dataclasses.replace(template, facts=facts)


def _per_row(outputs: dict[str, Any], batch: int) -> dict[str, float]:
    """Bytes of each output per row at `batch` rows, from one trace or from those of a family by their batch.

    A tensor of a fixed size takes less per row the more rows there are, which is left out; one that grows with the square
    of the batch (every row against every other) takes more, which is affine.
    """
    if not outputs or not all(isinstance(value, dict) for value in outputs.values()):
        return outputs
    (low, first), (high, second) = sorted((int(at), value) for at, value in outputs.items())
    found = {}
    for name in {**first, **second}:
        slope = (second.get(name, 0.0) - first.get(name, 0.0)) / (high - low)
        found[name] = second.get(name, 0.0) + max(slope, 0.0) * (batch - high)
    return found


def _highest_event(trace: Trace, replayed: Replay) -> int:
    """The event of the highest peak in training, which is what the breakdown tells of."""
    live = trace.live_bytes
    if "train" not in trace.phase_names:
        return replayed.peak_event or 0
    of_training = trace.phases == trace.phase_names.index("train")
    return int((live * of_training).argmax())


def _words(candidate: Candidate) -> str:
    shown = ("precision", "optim", "attention")
    parts = [str(candidate[name]) for name in shown if candidate.get(name) is not None]
    if candidate.get("activation_checkpointing"):
        parts.append("checkpointing")
    if int(candidate.get("gradient_accumulation_steps") or 1) > 1:
        parts.append("accumulation")
    return ", ".join(parts)
