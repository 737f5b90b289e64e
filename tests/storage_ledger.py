"""A small ledger for the tests of what is laid over fake tensors: which operator made which storage, and what is alive."""

import weakref
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageLedger(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made: list[tuple[str, int]] = []  # (operator without namespace and overload, bytes)
        self.calls: list[str] = []
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.calls.append(name)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            return False if args[0].dtype == torch.bool else 1
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(name, leaf.untyped_storage())
        return out

    def _see(self, name, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_):
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.made.append((name, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def sizes(self, name):
        """Bytes of the storages that operator `name` made, in order; seeds and other scalars left out."""
        return [size for op, size in self.made if op == name and size > 16]

    def forget(self):
        """What follows is counted by itself; what is alive stays alive."""
        self.made.clear()
        self.calls.clear()
        self.peak = self.live


@contextmanager
def fake_ledger():
    with FakeTensorMode(allow_non_fake_inputs=True), StorageLedger() as ledger:
        yield ledger
