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
    """The traceback of `error` without autofit's frames above and between others; whole where it never left autofit."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_AUTOFIT):
        frame = frame.tb_next
    if frame is None and not isinstance(error, SyntaxError):  # that one says by itself which file it is about
        frame = error.__traceback__
    shown = told = traceback.TracebackException(type(error), error, frame)
    while told is not None:  # the error and those behind it
        if told.stack and not told.stack[-1].filename.startswith(_AUTOFIT):  # what passes calls on is no place of it
            kept = [place for place in told.stack if not place.filename.startswith(_AUTOFIT)]
            told.stack = traceback.StackSummary.from_list(kept)
        told = told.__cause__ or told.__context__
    return "".join(shown.format())
