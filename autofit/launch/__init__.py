"""The parent's side of a probe: start a child, watch it, end it in time, and say how it ended."""

from autofit.launch.launcher import Ended, Launcher, MismatchError
from autofit.launch.watch import Progress

__all__ = ["Ended", "Launcher", "MismatchError", "Progress"]
