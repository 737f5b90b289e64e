"""Scripts that stand at their Trainer, for tests of the snapshot: one process serves many tests.

What a script does behind its Trainer is told to it by `case.json` in its folder, read in the fork: so one snapshot, which
takes a fresh interpreter's time, shows many endings.
"""

import itertools
import json
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from conftest import OneThreadLauncher

from autofit.launch import Ended, Launcher
from autofit.records import Description, Machine, Request, Schedule, ScriptTask, Task
from autofit.study import preflight

LIMIT = 120.0
SHORT = Schedule(timed_steps=0, evaluate=False)  # training alone
PEAKS = Schedule(timed_steps=0)  # training and evaluation

# What every script here begins with. `note` appends a line to a file of the folder, `case` reads what the test has told.
PRELUDE = """
import json, os, sys

HERE = os.path.dirname(os.path.abspath(__file__))

def note(name, text="once"):
    with open(os.path.join(HERE, name), "a") as file:
        file.write(str(text) + "\\n")

def case(name):
    path = os.path.join(HERE, "case.json")
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file).get(name)

note("runs")
"""

# A causal language model of some thousand parameters and what it takes; `Seen` writes what really ran.
TRAINING = """
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import EvalLoopContainer

ROWS, LENGTH = 64, 8
SEEN = {"batches": set(), "eval_batches": set(), "autocast": set(), "forwards": 0, "blocks": 0, "moves": 0}

def see(module, args, kwargs):
    SEEN["batches" if module.training else "eval_batches"].add(kwargs["input_ids"].shape[0])
    SEEN["forwards"] += module.training

def see_block(module, args):  # inside of the model's forward, which is what runs under autocast
    SEEN["autocast"].add(str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off")
    SEEN["blocks"] += module.training

def make_model():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2))
    model.register_forward_pre_hook(see, with_kwargs=True)
    model.model.layers[0].mlp.register_forward_pre_hook(see_block)
    return model

def move(container, original=EvalLoopContainer.to_cpu_and_numpy):
    SEEN["moves"] += 1
    return original(container)

EvalLoopContainer.to_cpu_and_numpy = move

class Rows(Dataset):
    def __len__(self):
        return ROWS
    def __getitem__(self, index):
        ids = (torch.arange(LENGTH) + index) % 100
        return {"input_ids": ids, "labels": ids.clone()}

class Seen(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.write(args, model, optimizer)
    def on_evaluate(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.write(args, model, optimizer)
    def write(self, args, model, optimizer):
        seen = {**SEEN, "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
                "checkpointing": model.is_gradient_checkpointing, "rate": args.learning_rate,
                "output_dir": args.output_dir, "report_to": args.report_to, "push": args.push_to_hub}
        with open(os.path.join(HERE, "seen.json"), "w") as file:
            json.dump({name: sorted(v) if isinstance(v, set) else v for name, v in seen.items()}, file)

def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
"""


class Standing:
    """One script in a folder of its own, a launcher for it, and numbered requests. Use as a context manager."""

    def __init__(
        self, folder: Path, machine: Machine, source: str, *arguments: str, make: type[Launcher] = OneThreadLauncher
    ) -> None:
        self.folder = folder / "work"
        self.folder.mkdir(parents=True)
        path = self.folder / "train.py"
        path.write_text(PRELUDE + textwrap.dedent(source), encoding="utf-8")
        self.task = Task(script=ScriptTask((str(path), *arguments), str(self.folder)))
        self.machine, self.launcher, self.said = machine, make(machine), []
        self._root, self._numbers = folder, itertools.count(1)

    def __enter__(self) -> "Standing":
        return self

    def __exit__(self, *_: object) -> None:
        self.launcher.close()

    def describe(self, check_snapshot: bool = True) -> Description:
        """Run the script to its Trainer, where it stays, and describe it from there. Raises what the search would."""
        found = preflight.describe(self.task, self.machine, self.launcher, self._root / "describe", self.said.append)
        assert not check_snapshot or self.launcher.snapshot is not None, self.said
        return found

    def request(self, arguments: dict[str, Any] | None = None, **fields: Any) -> Request:
        name = f"{next(self._numbers):04}"
        given = {"use_cpu": True, **(arguments or {})}
        made = {"probe": name, "folder": str(self._root / name), "task": self.task, "device": "cpu", "schedule": SHORT}
        return Request(**{**made, "arguments": given, **fields})

    def probe(
        self,
        arguments: dict[str, Any] | None = None,
        *,
        how: str = "snapshot",
        case: dict[str, Any] | None = None,
        time_limit: float = LIMIT,
        **fields: Any,
    ) -> Ended:
        """One probe; `case` is what the script is told for it."""
        self.tell(**(case or {}))
        (self.folder / "seen.json").unlink(missing_ok=True)
        request = self.request(arguments, **fields)
        return self.launcher.probe(request, how=how, time_limit=time_limit, trusted=True)

    def tell(self, **facts: Any) -> None:
        (self.folder / "case.json").write_text(json.dumps(facts))

    def seen(self) -> dict[str, Any]:
        return json.loads((self.folder / "seen.json").read_text())

    def noted(self, name: str) -> list[str]:
        """The lines that the script has noted under this name."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def template(self) -> dict[str, int]:
        """Place -> pid of the processes that stand there."""
        return dict(self.launcher._template)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def lives(pid: int) -> bool:
    """A zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still the same process and no zombie."""
    return [process for process in processes if process.is_running() and lives(process.pid)]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
