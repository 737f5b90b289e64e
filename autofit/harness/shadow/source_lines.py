"""The line of the workload's own source that is running: the innermost one outside of libraries and of autofit."""

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

Line = tuple[CodeType, int]
_FOREIGN = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),  # autofit
    }
)
_own: dict[CodeType, bool] = {}


def running_line() -> Line | None:
    """None where everything that runs is a library's. Takes 3 µs with ten frames on the stack, 11 µs with eighty."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = _own.get(code)
        if own is None:
            own = _own[code] = not code.co_filename.startswith((*_FOREIGN, "<"))
        if own:
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def line_text(line: Line | None) -> str:
    """`train.py:31`; empty for None."""
    return "" if line is None else f"{os.path.basename(line[0].co_filename)}:{line[1]}"
