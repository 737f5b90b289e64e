"""Where a script's `TrainingArguments` come from: flags, a JSON or YAML file that a parser read, or its own code.

It decides what has to be changed to change them. Transformers' parser and TRL's are listened to; they are not replaced,
and nothing is imported for them. A file that the script reads by itself is recognised where the command names it and its
keys are what the parser or the constructor was given. Other parsers (Hydra, jsonargparse, Click) count as code.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from autofit.harness.take_hold import when_imported
from autofit.records import ArgumentsSource

_FILE_KINDS = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}
_LIBRARIES = ("transformers", "trl", "accelerate", "peft")


class SourceLog:
    """Remembers where each `TrainingArguments` object of this process came from."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        """`command` is the script's, as in `ScriptTask`; made in the directory where the script starts."""
        self._words = list(command[2:] if tuple(command[:1]) == ("-m",) else command[1:])
        self._directory = os.getcwd()
        self._sources: dict[int, tuple[Any, ArgumentsSource]] = {}  # the object is held, so that its id stays its own
        self._last: ArgumentsSource | None = None
        self._parsing = False

    def install(self) -> None:
        when_imported("transformers.hf_argparser", self._listen)
        when_imported("trl.scripts.utils", self._listen_trl)

    def _listen(self, module: Any) -> None:
        parser = module.HfArgumentParser
        self._wrap(parser, "parse_args_into_dataclasses", lambda given: self._flags(given["args"]))
        self._wrap(
            parser, "parse_json_file", lambda given: ArgumentsSource("json", os.path.abspath(given["json_file"]))
        )
        self._wrap(
            parser, "parse_yaml_file", lambda given: ArgumentsSource("yaml", os.path.abspath(given["yaml_file"]))
        )
        self._wrap(parser, "parse_dict", lambda given: self._dict(given["args"]))

    def _listen_trl(self, module: Any) -> None:
        if hasattr(module, "TrlParser"):  # elsewhere in old releases
            self._wrap(module.TrlParser, "parse_args_and_config", lambda given: self._flags_and_config(given["args"]))

    def _wrap(self, owner: type, name: str, tell: Callable[[Mapping[str, Any]], ArgumentsSource]) -> None:
        """Have `tell`, from the arguments of a call by name, say where the objects that it returns come from."""
        original = getattr(owner, name)
        signature = inspect.signature(original)
        log = self

        @functools.wraps(original)
        def parse(*args: Any, **kwargs: Any) -> Any:
            if log._parsing:  # parsers call one another; the outermost call knows
                return original(*args, **kwargs)
            log._parsing = True
            try:
                outputs = original(*args, **kwargs)
            finally:
                log._parsing = False
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            source = tell(bound.arguments)
            for output in outputs:
                if dataclasses.is_dataclass(output):
                    log._keep(output, source)
            return outputs

        setattr(owner, name, parse)

    def _keep(self, arguments: Any, source: ArgumentsSource) -> None:
        self._sources[id(arguments)] = (arguments, source)
        self._last = source

    # ---- what the parsers were given ----

    def _flags(self, args: Sequence[str] | None) -> ArgumentsSource:
        if self._from_command(args):
            return ArgumentsSource("flags", flags=True)
        return ArgumentsSource("code", where=self._place())

    def _flags_and_config(self, args: Sequence[str] | None) -> ArgumentsSource:
        words = list(sys.argv[1:] if args is None else args)
        if not self._from_command(args) or "--config" not in words:
            return self._flags(args)
        return ArgumentsSource("yaml", os.path.abspath(words[words.index("--config") + 1]), flags=True)

    def _from_command(self, args: Sequence[str] | None) -> bool:
        """Whether a parser reads the words of the user's command; a script may take some out for itself.

        A list that is empty where the command has words may be the rest of them or written in the code: not said to be.
        """
        words = list(sys.argv[1:] if args is None else args)
        left = iter(self._words)
        return words == self._words or (bool(words) and all(word in left for word in words))

    def _dict(self, values: Mapping[str, Any]) -> ArgumentsSource:
        """A file whose keys are all in `values`; what has another value there, the script has set by itself."""
        for file, kind, data in self._read_files():
            differing = tuple(key for key, value in data.items() if key in values and values[key] != value)
            if data.keys() <= values.keys() and len(differing) < len(data):
                return ArgumentsSource(kind, file, assigned=differing)
        return ArgumentsSource("code", where=self._place())

    def _read_files(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Path, kind and content of the file of settings that the command names; none where it names several."""
        found = []
        for word in dict.fromkeys(self._words):
            path = os.path.join(self._directory, word.rpartition("=")[2] if word.startswith("-") else word)
            kind = _FILE_KINDS.get(os.path.splitext(path)[1].lower())
            if kind is not None and os.path.isfile(path):
                data = _read(path, kind)
                if isinstance(data, dict) and data and all(isinstance(key, str) for key in data):
                    found.append((os.path.abspath(path), kind, data))
        return found if len(found) == 1 else []

    # ---- what the code makes ----

    def constructed(self, arguments: Any, keywords: Mapping[str, Any]) -> None:
        """To be called from within the constructor's call of `arguments`, with the keywords that it was given.

        What a parser makes is recorded when the parser returns it. What a library makes (TRL's trainers turn
        `TrainingArguments` into a class of their own) comes from where the last one came.
        """
        if self._parsing:
            return
        caller = next((frame for frame in _frames() if self._owner(frame) != "helper"), None)
        if self._last is not None and caller is not None and self._owner(caller) == "library":
            self._keep(arguments, self._last)
            return
        for file, kind, data in self._read_files():
            if data == dict(keywords):  # `TrainingArguments(**data)`; single values out of a file say nothing of others
                self._keep(arguments, ArgumentsSource(kind, file))
                return
        self._keep(arguments, ArgumentsSource("code", where=self._place()))

    def source_of(self, arguments: Any, assigned: tuple[str, ...] = ()) -> ArgumentsSource:
        """Where `arguments` come from; of a copy, where the last ones came from. `assigned`: fields set since."""
        _, source = self._sources.get(id(arguments), (None, self._last or ArgumentsSource("code")))
        return dataclasses.replace(source, assigned=tuple(dict.fromkeys([*source.assigned, *assigned])))

    def _place(self) -> str | None:
        """`train.py:42` of the innermost frame of the user's own code."""
        frame = next((frame for frame in _frames() if self._owner(frame) == "user"), None)
        if frame is None:
            return None
        path = os.path.join(self._directory, frame.f_code.co_filename)
        inside = os.path.relpath(path, self._directory)
        return f"{path if inside.startswith(os.pardir) else inside}:{frame.f_lineno}"

    def _owner(self, frame: FrameType) -> str:
        """`user`, `library`, or `helper`: generated code, the standard library and autofit, which only pass a call on."""
        path = os.path.join(self._directory, frame.f_code.co_filename)
        if frame.f_code.co_filename.startswith("<") or _is_under(path, [_folder_of("autofit")]):
            return "helper"
        if frame.f_globals.get("__name__") == "__main__":  # a script may itself be installed, as TRL's are
            return "user"
        if _is_under(path, _libraries()):
            return "library"
        return "helper" if _is_under(path, [sysconfig.get_path("stdlib")]) else "user"


def _frames() -> list[FrameType]:
    """Of the stack, the innermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _libraries() -> list[str]:
    """Folders of what is installed. Transformers and what builds on it may lie elsewhere, in a clone."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [*installed, *site.getsitepackages(), site.getusersitepackages(), *map(_folder_of, _LIBRARIES)]


def _folder_of(name: str) -> str:
    """Where an imported package lies; empty where it is not imported."""
    return os.path.dirname(getattr(sys.modules.get(name), "__file__", None) or "")


def _is_under(path: str, folders: Sequence[str]) -> bool:
    return any(folder and path.startswith(folder + os.sep) for folder in folders)


def _read(path: str, kind: str) -> Any:
    """The content of a file; None where it cannot be read as what its name says, which is the script's affair."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, encoding="utf-8-sig") as file:
        if kind == "json":
            return json.load(file)
        import yaml

        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(file)
    return None
