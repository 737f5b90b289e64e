"""A shadow run of a program that has no Trainer: the package's fakes, ledger and CUDA semantics around a loop of its own."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autofit.harness.shadow.meter import ShadowMeter
from autofit.records import ShadowDevice


class BareRun:
    """`make` makes the model on fakes; within `run` everything is counted."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._meter = ShadowMeter(ShadowDevice("cuda", capability))
        self._meter.install()

    def make(self, model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        with self._meter.fakes.mode:
            return model()

    @contextlib.contextmanager
    def run(self, model: torch.nn.Module, trace_file: str) -> Iterator[None]:
        """The model is on the device when it begins. The trace is written at the end."""
        self._meter.enter_training(model, None)
        self._meter.ledger.begin_phase("run")
        try:
            yield
            self._meter.ledger.trace({}).save(trace_file)
        finally:
            self._meter.release()

    def backward(self, loss: torch.Tensor) -> None:
        """In autograd's thread, which has a cuBLAS handle of its own."""
        self._meter.backward = True
        loss.backward()
        self._meter.backward = False


def read_options() -> dict[str, Any]:
    return json.loads(sys.argv[1])
