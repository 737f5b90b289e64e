"""A user's command as Python itself would run it: argv, `sys.path` and `__main__` as a script or a module expects them.

What the script raises is shown from its own frames on (`own_traceback`).
"""

import importlib.machinery
import os
import runpy
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

_AUTOFIT = os.path.join(Path(__file__).parents[1], "")
_RUNPY = "<frozen runpy>"


def run_as_main(command: Sequence[str]) -> None:
    """Run `command` (a script or `-m module`, and its arguments) in this interpreter. Raises whatever it raises."""
    first, *arguments = command
    if first == "-m":
        module, *arguments = arguments
        sys.argv = ["-m", *arguments]
        _set_first_path(os.getcwd())
        _replace_main()
        runpy._run_module_as_main(module)  # what `python -m` calls, with its messages; it sets argv[0]
    else:
        sys.argv = [first, *arguments]
        _set_first_path(str(Path(first).resolve().parent))
        _run_script(os.path.join(os.getcwd(), first))


def _set_first_path(folder: str) -> None:
    """What stands there was put in place for `python -m autofit…`; with `-P` or `-I` nothing was."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def _replace_main() -> types.ModuleType:
    """A new `__main__`, as empty as this release of Python makes it."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if "__annotations__" in vars(sys.modules["__main__"]):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _run_script(path: str) -> None:
    """`runpy.run_path` in the real `__main__`, so that objects of the script can be pickled for loader workers."""
    main = _replace_main()
    main.__file__ = path
    main.__cached__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    source = Path(path).read_bytes()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))  # noqa: S102 - it is the user's own script, run at their request


def own_traceback(error: BaseException) -> str:
    """The traceback of `error` as the script is concerned, without frames of autofit and of `python -m`.

    Empty where nothing of the script has run, as for a module that is not there, which the message says.
    """
    hide_frames(error, _AUTOFIT, _RUNPY)
    if isinstance(error, SystemExit) and error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(error))


def hide_frames(error: BaseException, *places: str) -> None:
    """Take frames of files that begin with one of `places` out of the tracebacks of `error` and of those behind it.

    A traceback that ends in autofit itself stays whole, as that is autofit's error; one that ends in this file does not,
    since a script that cannot be compiled fails here.
    """
    hidden, seen = error, set()
    while hidden is not None and id(hidden) not in seen:
        seen.add(id(hidden))
        entries, entry = [], hidden.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        last = entries[-1].tb_frame.f_code.co_filename if entries else __file__
        if last == __file__ or not last.startswith(_AUTOFIT):
            kept = None
            for entry in reversed(entries):
                if not entry.tb_frame.f_code.co_filename.startswith(places):
                    kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            hidden.__traceback__ = kept
        hidden = hidden.__cause__ or hidden.__context__
