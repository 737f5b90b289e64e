"""What a prediction can be told, and what follows before anything runs: the cards, the task, the knobs."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autofit.catalog import Gpu, find_gpu, gpu_names, near_gpus, parse_budget
from autofit.errors import UsageError
from autofit.harness.shadow.allocator import AllocatorSettings, set_variable, settings_from
from autofit.knobs import refusal
from autofit.machine import read_machine
from autofit.prediction import ShadowTarget, make_target
from autofit.records import Candidate, Description, Machine, Task
from autofit.study import preflight
from autofit.units import format_bytes, looks_like_size
from autofit.workloads.model_task import DEFAULT_EFFECTIVE_BATCH

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Fields that the knob `precision` says, and that a CPU, on which shadow runs run, refuses or reads in its own way.
PRECISION_FIELDS = ("fp16", "bf16", "tf32")
BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
EVAL_BATCH, EVAL_ACCUMULATION = "per_device_eval_batch_size", "eval_accumulation_steps"
LEAST_EVAL_BATCH = 2  # one row more than the least, and no shadow run of its own
ALL_GPUS, CPU = "all", "cpu"
MOST = 2**20  # rows, steps or processes; more is a slip of the pen
HEADROOM = 0.05  # share of this machine's device that is left free, as a search does by default


@dataclass(frozen=True)
class PredictOptions(preflight.WorkloadOptions):
    """Everything that a prediction can be told. Exactly one of `model` and `command`; None is the workload's own value."""

    gpu: str | None = None  # a card of the catalog, `all`, or `cpu`; None: this machine's
    budget: str | None = None  # bytes that the process may hold; None: what the card can use
    batch: int | None = None  # per-device train batch
    accumulation: int | None = None  # micro-batches per optimizer step
    eval_batch: int | None = None
    eval_accumulation: int | None = None  # steps after which evaluation moves its outputs to the host
    logits: str | None = None  # reduction before evaluation keeps them: full or argmax
    precision: str | None = None
    checkpointing: bool | None = None
    optim: str | None = None
    attention: str | None = None
    processes: int = 1  # of a DistributedDataParallel training, a card each; with a model only
    max_batch: bool = False  # the largest batch for each precision × checkpointing × optimizer
    verify: bool = False  # trace the very batch sizes too, and hold the rewritten figures against it


@dataclass(frozen=True)
class Place:
    """Where a workload is predicted to run, and what it may hold there."""

    target: ShadowTarget
    label: str
    budget_bytes: int
    native_bf16: bool
    native_tf32: bool
    context_known: bool = True  # else `prediction` assumes one
    rates_known: bool = True  # likewise
    whole_bytes: int | None = None  # of the device, where the budget is the default one, less the headroom


def check_options(options: PredictOptions) -> None:
    """Refuse what makes no sense anywhere. Raises UsageError."""
    if (options.model is None) == (options.command is None):
        raise UsageError(
            "give either --model NAME, or your own script after --: autofit predict --gpu rtx-3090 -- python train.py"
        )
    for name in ("batch", "accumulation", "eval_batch", "eval_accumulation", "processes"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {value} makes no sense; give a whole number from 1 to {MOST}")
    if options.processes > 1 and options.command is not None:
        raise UsageError("--processes belongs to --model; a script is predicted as one process")
    if options.processes > 1 and options.gpu == CPU:
        raise UsageError("--processes is for cards, of which each process has its own; leave it out with --gpu cpu")
    if options.precision is not None and options.precision not in PRECISIONS:
        raise UsageError(f"--precision {options.precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    if options.max_batch and options.gpu == ALL_GPUS:
        raise UsageError("--max-batch is for one card; name it with --gpu")
    if options.max_batch and (options.batch is not None or options.effective_batch is not None):
        name = "--batch" if options.batch is not None else "--effective-batch"
        raise UsageError(f"--max-batch looks for the batch by itself; leave {name} out")
    if options.verify and (options.max_batch or options.gpu == ALL_GPUS):
        raise UsageError("--verify is for one prediction; leave out --max-batch, and name one card with --gpu")


# ---- cards ----


def places_of(options: PredictOptions) -> list[Place]:
    """The cards that are asked for, those with the least memory first. Raises UsageError."""
    return [_with_processes(place, options.processes) for place in _places(options)]


def _with_processes(place: Place, processes: int) -> Place:
    device = replace(place.target.device, processes=processes)
    return replace(place, target=replace(place.target, device=device))


def _places(options: PredictOptions) -> list[Place]:
    if options.gpu == ALL_GPUS:
        if options.budget is not None:
            raise UsageError("--budget means nothing with --gpu all, whose cards have their own; leave one of them out")
        return [_place(find_gpu(name), None) for name in gpu_names()]
    budget = None if options.budget is None else parse_budget(options.budget)
    if options.gpu == CPU:
        machine = read_machine("cpu")
        return [Place(make_target(), "CPU", **_own_budget(budget, machine), native_bf16=True, native_tf32=False)]
    if options.gpu is None:
        return [_own_place(budget)]
    gpu = find_gpu(options.gpu)
    if gpu is not None:
        return [_place(gpu, budget)]
    if looks_like_size(options.gpu) and not options.gpu.strip().isdigit():  # 3090 is half a name
        raise UsageError(f"--gpu {options.gpu!r} is a size, not a card; name a card, and give the size as --budget")
    near = near_gpus(options.gpu)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known cards are {', '.join(gpu_names())}"
    raise UsageError(f"--gpu {options.gpu!r} is no card that autofit knows; {hint}")


def _place(gpu: Gpu, budget: int | None) -> Place:
    return Place(
        target=make_target(gpu),
        label=gpu.label,
        budget_bytes=budget or gpu.usable_bytes,
        native_bf16=gpu.native_bf16,
        native_tf32=gpu.tf32_flops is not None,
        context_known=gpu.context_bytes is not None,
    )


def _own_place(budget: int | None) -> Place:
    """This machine's first GPU."""
    machine = read_machine(None)
    if machine.device == "cpu":
        raise UsageError("there is no GPU here; name a card to predict for, such as --gpu rtx-3090, or --gpu all")
    ampere = (machine.capability or (0, 0)) >= (8, 0)
    gpu = find_gpu(machine.device_name)
    return Place(
        target=make_target(machine=machine),
        label=machine.device_name,
        **_own_budget(budget, machine),
        native_bf16=ampere,
        native_tf32=ampere,
        context_known=gpu is not None and gpu.context_bytes is not None,
        rates_known=gpu is not None,
    )


def _own_budget(budget: int | None, machine: Machine) -> dict[str, Any]:
    if budget is not None:
        return {"budget_bytes": budget}
    return {"budget_bytes": int(machine.device_bytes * (1 - HEADROOM)), "whole_bytes": machine.device_bytes}


def allocator_of(places: list[Place]) -> tuple[AllocatorSettings, list[str]]:
    """The settings of torch's CUDA allocator in this environment, and what is assumed by them. Raises UsageError."""
    found = set_variable(os.environ)
    if found is None or all(place.target.device.kind == "cpu" for place in places):
        return AllocatorSettings(), []
    return settings_from(os.environ), [f"assumed: {'='.join(found)}, as set here"]


def precision_refusal(precision: str, place: Place) -> str | None:
    """What a card has not that the precision needs, after its name; None where it can be had."""
    if precision == "tf32" and not place.native_tf32:
        return "has no tf32; use --precision fp32 or fp16"
    return None


# ---- the task and the knobs ----


def task_and_knobs(
    options: PredictOptions, machine: Machine, say: Callable[[str], None]
) -> tuple[Task, dict[str, Any]]:
    """The task, and the values of the knobs that were asked for. Raises UsageError."""
    arguments = preflight.read_arguments(options.args) if options.command is None else {}
    wanted = {
        BATCH: options.batch,
        ACCUMULATION: options.accumulation,
        EVAL_BATCH: options.eval_batch,
        EVAL_ACCUMULATION: options.eval_accumulation,
        "logits": options.logits,
        "precision": options.precision or next((name for name in PRECISION_FIELDS if arguments.get(name)), None),
        "activation_checkpointing": options.checkpointing,
        "optim": options.optim,
        "attention": options.attention,
    }
    arguments = {name: value for name, value in arguments.items() if name not in PRECISION_FIELDS}
    for name in (BATCH, ACCUMULATION):
        if wanted[name] is not None:
            arguments[name] = wanted[name]
    if options.max_batch:
        arguments.setdefault(ACCUMULATION, 1)
    own = replace(options, effective_batch=_own_effective_batch(options, arguments, say))
    task = preflight.make_task(own, arguments, machine.versions.get("transformers", ""), say)
    if task.model is not None:
        task = Task(model=replace(task.model, effective_batch=options.processes * task.model.effective_batch))
        wanted |= {name: task.model.base_args[name] for name in (BATCH, ACCUMULATION)}
    return task, {name: value for name, value in wanted.items() if value is not None}


def _own_effective_batch(options: PredictOptions, arguments: dict[str, Any], say: Callable[[str], None]) -> int | None:
    """The rows of an optimizer step that are one process's own; None where its own settings say. Raises UsageError."""
    effective, processes = options.effective_batch, options.processes
    if processes == 1 or (effective is not None and effective < 1):
        return effective
    said = [arguments[name] for name in (BATCH, ACCUMULATION) if arguments.get(name) is not None]
    if effective is None:
        if said:
            return None
        own = math.ceil(DEFAULT_EFFECTIVE_BATCH / processes)
        say(f"assumed: effective batch {processes * own} (--effective-batch)")
        return own
    factors = [processes, *(n for n in said if type(n) is int and n > 0)]  # others are refused with the task
    least = math.prod(factors)
    if effective % least or (len(factors) == 3 and effective != least):
        text = " × ".join(map(str, factors))
        raise UsageError(
            f"--effective-batch {effective} is {'not the' if len(factors) == 3 else 'no multiple of the'} {text} rows of "
            f"{processes} processes; change one of them"
        )
    return effective // processes


def traced_task(task: Task) -> Task:
    """The task as it is described and traced: the same for every batch, which the candidate sets."""
    if task.model is None:
        return task
    arguments = {**task.model.base_args, BATCH: 2, ACCUMULATION: 2}
    return Task(model=replace(task.model, base_args=arguments, effective_batch=4))


def candidate_of(description: Description, wanted: dict[str, Any], place: Place | None) -> Candidate:
    """The workload's own settings with what was asked for laid over; on `place`, where it is one. Raises UsageError."""
    own = preflight.baseline_of(description)
    for name in wanted:
        if name not in own.values:
            flag = {EVAL_BATCH: "eval-batch", EVAL_ACCUMULATION: "eval-accumulation"}.get(name, name)
            raise UsageError(f"this workload has nothing that --{flag} could set; leave it out")
    if wanted.get("activation_checkpointing") and not description.can_checkpoint:
        raise UsageError(f"{description.model_class} has no activation checkpointing; leave --checkpointing out")
    attention = wanted.get("attention")
    if attention is not None and attention not in description.attentions:
        raise UsageError(f"--attention {attention!r} cannot be used; use one of {', '.join(description.attentions)}")
    logits = wanted.get("logits")
    if logits is not None and logits not in description.reductions:
        raise UsageError(f"--logits {logits!r} cannot be used; use one of {', '.join(description.reductions)}")
    lacking = None if place is None else precision_refusal(str(wanted.get("precision")), place)
    if lacking is not None:
        raise UsageError(f"{place.label} {lacking}")
    candidate = own.but(wanted)
    refused = refusal(candidate, description)
    if refused is not None:
        raise UsageError(refused)
    return candidate


def with_lean_evaluation(candidate: Candidate, description: Description, wanted: dict[str, Any]) -> Candidate:
    """The candidate with the evaluation that takes least, as far as the user has said nothing of it.

    Where training is compared, an evaluation that keeps all scores of a whole set on the device would decide for it.
    """
    least = {EVAL_BATCH: LEAST_EVAL_BATCH, EVAL_ACCUMULATION: 1, "logits": "argmax"}
    if "argmax" not in description.reductions:
        del least["logits"]
    said = {*wanted, *description.arguments}
    return candidate.but(
        {name: value for name, value in least.items() if name in candidate.values and name not in said}
    )


def place_notes(places: list[Place]) -> list[str]:
    """What is assumed of the cards, one sentence each."""
    notes = [
        f"assumed: a budget of {format_bytes(place.budget_bytes)}, the {format_bytes(place.whole_bytes)} of this machine's "
        f"{place.label} less {HEADROOM:.0%} headroom; --budget sets another"
        for place in places
        if place.whole_bytes is not None
    ]
    unknown = [place for place in places if not place.context_known]
    if unknown:
        size = format_bytes(unknown[0].target.context_bytes)
        whose = f"a {unknown[0].label}" if len(places) == 1 else f"{len(unknown)} of the {len(places)} cards"
        notes.append(f"assumed: {size} for the CUDA context of {whose}, which is not known")
    notes += [
        f"assumed: the speeds of an A100, since those of a {place.label} are not known"
        for place in places
        if not place.rates_known
    ]
    return notes


def process_notes(processes: int) -> list[str]:
    """What figures of one process of several say, and what is not in them."""
    if processes == 1:
        return []
    return [
        f"assumed: DistributedDataParallel in {processes} processes, a card each: memory, batch and accumulation are those "
        f"of one process, the effective batch and rows/s those of all {processes}",
        "not counted: the time of communication, the memory of NCCL, and what evaluation gathers from other processes",
    ]
