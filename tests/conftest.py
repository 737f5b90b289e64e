"""What tests of real children share: one warm server for all of them, a model of some kilobytes, scripts made on the spot."""

import itertools
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.catalog.model_configs import find_model
from autofit.launch import Launcher
from autofit.machine import read_machine
from autofit.records import Machine, ModelTask, Request, Schedule, ScriptTask, Task

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network

QUICK = Schedule(timed_steps=2, timed_seconds=0.2)
TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}


class OneThreadLauncher(Launcher):
    """Children with one OpenMP thread: two of them spin against each other on a shared machine."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def machine() -> Machine:
    return read_machine("cpu")


@pytest.fixture(scope="session")
def launcher(machine: Machine) -> Iterator[Launcher]:
    """A launcher whose server has torch and transformers imported; for forks."""
    with OneThreadLauncher(machine) as launcher:
        launcher.warm()
        yield launcher


@pytest.fixture
def cold_launcher(machine: Machine) -> Iterator[Launcher]:
    """A launcher of its own for one test, with nothing imported; for scripts that need no torch."""
    with OneThreadLauncher(machine) as launcher:
        yield launcher


def make_task(**changes: Any) -> Task:
    """The tiny causal language model of 25 thousand parameters; `changes` are fields of ModelTask."""
    config = {**find_model("HuggingFaceTB/SmolLM2-135M").config, **TINY_SIZES}
    fields = {
        "model": "tiny",
        "config": config,
        "task": "causal-lm",
        "effective_batch": 8,
        "dtype": "float32",
        "eval_rows": 64,
        "seq_len": 16,
    }
    return Task(model=ModelTask(**{**fields, **changes}))


@pytest.fixture
def tiny_task() -> Task:
    return make_task()


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Request]:
    """`ask(task, …)`: a request in a folder of its own; further arguments are fields of Request."""
    numbers = itertools.count(1)

    def make(task: Task, **fields: Any) -> Request:
        name = f"{next(numbers):04}"
        return Request(
            **{
                "probe": name,
                "folder": str(tmp_path / name),
                "task": task,
                "device": "cpu",
                "schedule": QUICK,
                **fields,
            }
        )

    return make


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Task]:
    """`script(source, *arguments)`: the source as a file in a folder of its own, as a task that runs it there."""

    def write(source: str, *arguments: str) -> Task:
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        path = folder / "train.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return Task(script=ScriptTask((str(path), *arguments), str(folder)))

    return write
