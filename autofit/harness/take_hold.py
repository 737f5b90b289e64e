"""Run code when a module has been imported, without importing it.

A script may set environment variables before it imports torch, so the harness must not import transformers for it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` once `name` has been executed; at once where it is imported already."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action
        self._searching = False

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name or self._searching:
            return None
        self._searching = True  # the others find it
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def _imported(self, module: ModuleType) -> None:
        """Not earlier: a script may only ask whether there is a module, or fail in importing it and try again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str):
        return getattr(self._loader, name)
