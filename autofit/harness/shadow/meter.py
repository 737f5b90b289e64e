"""The shadow meter: what a run would take of a device, read from a ledger over fake tensors.

It stands where the device meter stands. `enter_training` makes the modes active, so that everything from the Trainer's
own `train()` on runs on fakes; before that only models are fake. Its figures are live bytes as the ledger counts them;
what an allocator makes of them is replayed by the parent, from the trace that the run leaves.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autofit.harness.device_meter import Peaks
from autofit.harness.shadow.fake_tensors import FakeTensors
from autofit.harness.shadow.ledger import BATCH, BUFFERS, PARAMETERS, WORKSPACE, Ledger
from autofit.harness.shadow.semantics.generation import full_length_generation
from autofit.harness.shadow.semantics.host_transfer import host_transfers
from autofit.harness.shadow.semantics.masks import skipped_masks
from autofit.harness.shadow.semantics.workspace import cublas_workspace_bytes
from autofit.records import ShadowDevice


class ShadowMeter:
    name = "shadow"
    cap = "none"
    context_bytes = None

    def __init__(self, device: ShadowDevice, fakes: FakeTensors | None = None) -> None:
        """`fakes`: of a process that this one was forked from, which has made its model of them."""
        self.device = device
        self.fakes = fakes or FakeTensors()
        self._workspaces: set[str] = set()
        self.ledger = Ledger(self._make_workspace if device.kind == "cuda" else None)
        self._active = contextlib.ExitStack()
        self.backward = False  # whether the autograd thread is at work, which has a cuBLAS handle of its own

    def install(self) -> None:
        """To be called before the workload imports transformers, or at any time after."""
        self.fakes.install()

    def attach(self, budget_bytes: int | None) -> None:
        """Nothing: a shadow run touches no device and has no cap."""

    def enter_training(self, model: Any, budget_bytes: int | None) -> Peaks:
        """Put the model on the device, in the order in which `Module.to` moves it, and make the modes active."""
        self.ledger.begin_phase("load")
        names = {id(module): name for name, module in model.named_modules()}
        for module in _children_first(model):
            for values, category in ((module._parameters, PARAMETERS), (module._buffers, BUFFERS)):
                for value in values.values():
                    if value is not None:
                        self.ledger.add(value, category, names.get(id(module), ""))
        self._active.enter_context(self.fakes.real_loading())
        self._active.enter_context(host_transfers(self.ledger.on_host))
        self._active.enter_context(skipped_masks())
        self._active.enter_context(full_length_generation())
        if self.device.kind == "cuda":
            self._lay_over_cuda()
        self._active.enter_context(self.fakes.mode)
        self._active.enter_context(self.ledger)
        return Peaks(self.ledger.live_bytes, None, self.ledger.live_bytes, None)

    def _lay_over_cuda(self) -> None:
        from autofit.harness.shadow.semantics.attention import cuda_attention
        from autofit.harness.shadow.semantics.autocast import cuda_autocast
        from autofit.harness.shadow.semantics.dropout import cuda_dropout
        from autofit.harness.shadow.semantics.optimizers import cuda_optimizers

        overlays = (
            cuda_dropout(),
            cuda_attention(self.device.capability),
            cuda_autocast(),
            cuda_optimizers(self.ledger.on_host),
        )
        for overlay in overlays:
            self._active.enter_context(overlay)

    def hold(self, context: contextlib.AbstractContextManager) -> None:
        """Keep `context` open until the meter is released."""
        self._active.enter_context(context)

    def add_batch(self, fake: torch.Tensor, micro_batch: int) -> None:
        self.ledger.add(fake, BATCH, micro_batch=micro_batch)

    def _make_workspace(self) -> None:
        """cuBLAS takes its workspace with the first product of each thread: the Trainer's, and autograd's own."""
        thread = "autograd" if self.backward else "main"
        if thread not in self._workspaces:
            self._workspaces.add(thread)
            self.ledger.add_bytes(cublas_workspace_bytes(self.device.capability), WORKSPACE)

    # ---- what the schedule asks of every meter ----

    def begin_phase(self) -> None:
        """Phases have names here; the schedule gives them to the ledger."""

    def peaks(self) -> Peaks:
        return Peaks(self.ledger.peak_bytes, None, self.ledger.peak_bytes, None)

    def settle(self) -> None:
        """Nothing: storages are counted one by one."""

    def held_bytes(self) -> int:
        return self.ledger.live_bytes

    def held_peak(self) -> int:
        return self.ledger.peak_bytes

    @contextlib.contextmanager
    def live_window(self) -> Iterator[Callable[[], int | None]]:
        yield lambda: None

    def synchronize(self) -> None:
        """Nothing runs."""

    def free_share(self) -> float | None:
        return None

    def release(self) -> None:
        """Leave the modes, so that the trace and the reply can be written."""
        self._active.close()


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
