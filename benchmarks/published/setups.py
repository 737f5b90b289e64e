"""From a row of `memory_rows.csv` to the program that stands for it, and whether its source says enough to set it up.

What is clear was decided from the sources, before anything was predicted; the reasons are told with the results. A row
without a program is told as such.
"""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
ROWS_FILE = Path(__file__).resolve().parent.parent / "data" / "memory_rows.csv"

# What a metric counts of a run: torch's own tensors, the segments of its allocator, or those and the context.
ALLOCATED, RESERVED, PROCESS, FITS = "allocated", "reserved", "process", "fits"
COUNTERS = {
    "torch_max_allocated": ALLOCATED,
    "torch_max_reserved": RESERVED,
    "nvml_used": PROCESS,
    "torch_peak_active": ALLOCATED,  # blocks in use, those that a stream has yet to release included
    "weights_allocated": ALLOCATED,
    "fits": FITS,
    "oom": FITS,
}

# Who takes cuBLAS workspaces: torch's allocator from 1.13 on (pytorch/pytorch#83461), on ROCm from 2.6 on (#138791). Before,
# the library takes as much from the driver by itself, so that NVML counts it and torch's counters do not.
ALLOCATOR, DRIVER = "allocator", "driver"


@dataclass(frozen=True)
class Row:
    """A published measurement. The source column goes with it wherever it is shown."""

    source: str
    model: str
    task: str
    seq_len: int | None
    batch: int | None
    grad_accum: int | None
    precision: str
    optimizer: str
    grad_ckpt: str
    attn: str
    peft: str
    gpu: str
    metric: str
    value_mib: float
    note: str

    @property
    def name(self) -> str:
        shape = f"{self.batch}×{self.seq_len}" if self.batch else ""
        extra = [self.precision if self.batch else "", "checkpointing" if self.grad_ckpt.startswith("yes") else ""]
        extra += [f"accumulation {self.grad_accum}" if (self.grad_accum or 1) > 1 else ""]
        return " ".join(part for part in (self.model, self.task, shape, *extra) if part)


@dataclass(frozen=True)
class Setup:
    """How a row is run. `program` is a module of this package, `options` what it is told."""

    program: str | None
    options: dict[str, Any] = field(default_factory=dict)
    capability: tuple[int, int] = (8, 0)
    context_mib: float | None = 0.0  # held outside torch's allocator, where the metric counts it; None: nobody says
    cap_mib: float | None = None  # of torch's own memory
    workspaces: str = ALLOCATOR  # who takes cuBLAS workspaces
    unclear: str = ""  # why the source does not say enough; empty: it does
    other: dict[str, Any] = field(
        default_factory=dict
    )  # options of another reading of the source, told beside the first
    other_reading: str = ""


def read_rows(path: Path = ROWS_FILE) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        return [_row(values) for values in csv.DictReader(file)]


def _row(values: dict[str, str]) -> Row:
    numbers = {name: int(values[name]) if values[name] else None for name in ("seq_len", "batch", "grad_accum")}
    texts = {name: text for name, text in values.items() if name not in numbers and name != "value_mb"}
    return Row(**texts, **numbers, value_mib=float(values["value_mb"]))


def set_up(row: Row) -> Setup:
    """By where the row comes from. A row of a new source has no program."""
    for part, make in _SOURCES.items():
        if part in row.source:
            return make(row)
    return Setup(None, unclear="there is no program for this source")


# ---- transformers' Trainer on a V100: perf_train_gpu_one, January 2022 ----

# The page reads NVML after `torch.ones((1, 1)).to("cuda")`: context, kernels and one small segment of torch's allocator.
V100_CONTEXT_MIB = 1343 - 2
V100_TOTAL_MIB = 16160  # nvidia-smi on the page


def _trainer_page(row: Row) -> Setup:
    if row.task == "context only":
        return Setup(None, unclear="it is the context that the other rows of the page include: given, not predicted")
    v100 = {"capability": (7, 0), "context_mib": V100_CONTEXT_MIB, "cap_mib": V100_TOTAL_MIB - V100_CONTEXT_MIB}
    v100["workspaces"] = DRIVER
    if row.task == "model load only":
        return Setup("forward", {"model": row.model, "head": "text-classification", "forward": False}, **v100)
    options = {
        "era": "2022",
        "model": row.model,
        "task": "text-classification",
        "seq_len": row.seq_len,
        "batch": row.batch,
        "accumulation": row.grad_accum,
        "amp": "amp" in row.precision,
        "checkpointing": row.grad_ckpt.startswith("yes"),
        "reentrant": True,  # torch had no other way
        "columns": [],
        "own_adamw": row.optimizer.startswith("adamw_hf"),
        "optim": _optim(row.optimizer),
    }
    return Setup("trainer", options, **v100)


def _optim(text: str) -> str:
    """What `TrainingArguments.optim` calls an optimizer of the file."""
    if "8bit" in text or "8-bit" in text:
        return "adamw_bnb_8bit"
    return "adafactor" if "adafactor" in text.lower() else "adamw_torch"


# ---- optimum-benchmark's training scenario: a Trainer on ROCm, 2024 ----


_TASKS = {  # as the file abbreviates them -> as optimum-benchmark names them
    "fill-mask": "fill-mask",
    "text-cls": "text-classification",
    "text-classification": "text-classification",
    "token": "token-classification",
    "question": "question-answering",
    "text-gen": "text-generation",
    "image": "image-classification",
}


def _optimum(row: Row) -> Setup:
    """Rows are as optimum_benchmark/generators makes them: a mask of ones, and token types where the model takes them."""
    task = next((name for text, name in _TASKS.items() if text in row.task), None)
    workspaces = DRIVER if "ROCm" in row.gpu else ALLOCATOR
    if task is None:
        return Setup(None, unclear=f"there is no program for {row.task}")
    if "train" not in row.task:
        sizes = {"batch": row.batch, "seq_len": row.seq_len, "with_mask": True}
        return Setup("forward", {"model": row.model, "head": task, "forward": True, **sizes}, workspaces=workspaces)
    has_types = "/bert-" in row.model
    options = {
        "era": "2024",
        "model": row.model,
        "task": task,
        "seq_len": row.seq_len,
        "batch": row.batch,
        "accumulation": row.grad_accum or 1,
        "amp": "amp" in row.precision or "mixed" in row.precision,
        "checkpointing": row.grad_ckpt.startswith("yes"),
        "reentrant": True,
        "columns": ["attention_mask", *(["token_type_ids"] if has_types else [])],
        "own_adamw": False,
        "optim": _optim(row.optimizer),
    }
    return Setup("trainer", options, workspaces=workspaces)


# ---- transformers' own benchmark of inference: TITAN RTX, 2020 ----


def _inference(row: Row) -> Setup:
    hidden = re.fullmatch(r"BertConfig\(hidden_size=(\d+)\)", row.model)
    options = {
        "model": {"hidden_size": int(hidden.group(1))} if hidden else row.model,
        "head": None,
        "forward": True,
        "old_attention": True,
        "batch": row.batch,
        "seq_len": row.seq_len,
    }
    return Setup(
        "forward",
        options,
        capability=(7, 5),
        context_mib=None,
        workspaces=DRIVER,
        unclear="the figure includes the context, which the page does not tell",
    )


def _accelerate(row: Row) -> Setup:
    return Setup("forward", {"model": row.model, "head": None, "forward": False})


# ---- LitGPT's resource tables: LoRA on an A100, October 2023 ----


def _litgpt(row: Row) -> Setup:
    quantized = "nf4" in row.precision or "int8" in row.precision
    return Setup(
        None if quantized else "litgpt",
        {"model": row.model, "batch": row.batch, "seq_len": row.seq_len, "wide_norm": True},
        unclear="weights of 4 or 8 bits are not modelled" if quantized else "",
        other={"wide_norm": False} if "llama" in row.model.lower() else {},
        other_reading="RMSNorm in bf16, as at the commit that the page names; that of a week later is taken",
    )


# ---- torchtune's table of techniques: A100, November 2024 ----


def _torchtune(row: Row) -> Setup:
    checkpointing = row.grad_ckpt.startswith("yes")
    options = {
        "batch": row.batch,
        "seq_len": row.seq_len,
        "checkpointing": checkpointing,
        "chunks": 8 if checkpointing else 0,
    }
    reason = "the table's techniques add up, so that this row ran compiled, which is not modelled"
    return Setup("torchtune", options, unclear=reason if checkpointing else "")


# ---- whether LLaMA 7B with quantized weights fits a T4 ----


def _qlora(row: Row) -> Setup:
    options = {
        "weights": "int8" if "int8" in row.precision else "4bit",
        "batch": row.batch,
        "seq_len": row.seq_len,
        "checkpointing": row.grad_ckpt.startswith("yes"),
    }
    return Setup(
        "qlora",
        options,
        capability=(7, 5),
        context_mib=165,
        cap_mib=row.value_mib - 165,
        unclear="a verdict without a figure; kernels of bitsandbytes and the adapters' rank are assumed",
    )


_SOURCES = {
    "perf_train_gpu_one": _trainer_page,
    "optimum-benchmark": _optimum,
    "docs/source/en/benchmarks.md": _inference,
    "model_size_estimator": _accelerate,
    "resource-tables.md": _litgpt,
    "torchtune": _torchtune,
    "4bit-transformers-bitsandbytes": _qlora,
}
