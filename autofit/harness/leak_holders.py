"""Which object of a workload holds tensors that should be gone: the attribute or variable on the way to them.

Looked for only where bytes grow with every step or evaluation, since it goes through every object of the process. What only
autograd's graph holds is no Python object, so the tensor that keeps the graph is named.
"""

import collections
import gc
import inspect
import types
import weakref
from typing import Any

import torch

from autofit.leak_words import MOST_NAMED

MOST_TENSORS = 1000
DEPTH = 6  # containers between a tensor and a name
OWN = ("Phases.", "KeptTensors.")  # of the harness itself


class KeptTensors:
    """Tensors that were made between two looks and are still there at the third."""

    def __init__(self) -> None:
        self._known: set[int] | None = None
        self._fresh: list[weakref.ref] = []
        self._kept: list[weakref.ref] = []

    def look(self) -> None:
        """See which are there. To be called at equal places."""
        alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        present = {id(tensor) for tensor in alive}
        if self._known is not None:
            self._kept += self._fresh
            self._fresh = [weakref.ref(tensor) for tensor in alive if id(tensor) not in self._known]
        self._known = present

    def holders(self) -> tuple[str, ...]:
        """Attributes (`MyTrainer.losses`) and variables of modules that lead to them, those that hold most of them first."""
        gc.unfreeze()  # objects from before a fork are left out of what refers to what
        found = holders_of([tensor for ref in self._kept if (tensor := ref()) is not None][:MOST_TENSORS])
        return tuple(name for name in found if not name.startswith(OWN))[:MOST_NAMED]


def holders_of(things: list[Any]) -> list[str]:
    """The nearest attributes and module variables through which `things` are reached, those that hold most first."""
    level = {id(thing): thing for thing in things}
    seen = {id(things), id(level), *level}
    names: collections.Counter[str] = collections.Counter()
    for _ in range(DEPTH):
        owners = gc.get_referrers(*level.values()) if level else []
        seen.add(id(owners))
        above: dict[int, Any] = {}
        seen.add(id(above))
        for owner in owners:
            if id(owner) in seen or inspect.isframe(owner) or isinstance(owner, types.ModuleType):
                continue
            seen.add(id(owner))
            held = [thing for thing in gc.get_referents(owner) if id(thing) in level]
            name = _name(owner, held[0]) if held else None
            if name is None:
                above[id(owner)] = owner
            else:
                names[name] += len(held)
        level = above
    return [name for name, _ in names.most_common()]


def _name(owner: Any, held: Any) -> str | None:
    """`held` as an attribute of `owner`, or where `owner` is a dictionary of attributes or of a module's variables."""
    if isinstance(owner, torch.Tensor):  # of which it is the gradient or a view
        return None
    if type(owner) is not dict:
        key = _key(_attributes(owner), held)
        return None if key is None else f"{type(owner).__name__}.{key}"
    key = _key(owner, held)
    if key is None:
        return None
    if "__name__" in owner and "__builtins__" in owner:
        module = owner["__name__"]
        return f"{'the script' if module in ('__main__', '__mp_main__') else module}: {key}"
    for instance in gc.get_referrers(owner):
        if isinstance(instance, type) and instance.__dict__.get(key) is held:
            return f"{instance.__name__}.{key}"
        if _attributes(instance) is owner:
            return f"{type(instance).__name__}.{key}"
    return None


def _key(attributes: dict[str, Any] | None, held: Any) -> str | None:
    found = next((key for key, value in (attributes or {}).items() if value is held), None)
    return found if isinstance(found, str) else None


def _attributes(thing: Any) -> dict[str, Any] | None:
    """An instance's own dictionary; None where there is none."""
    if isinstance(thing, (type, types.ModuleType)) or inspect.isframe(thing):
        return None
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
