"""What a candidate will take, before anything is probed: by shadow runs where they can be had, else by formula.

Nothing here was measured, and nothing here decides what fits: probes do.
"""

from autofit.prediction.formula import LAUNCH_ROWS, structure
from autofit.prediction.predictor import Predictor
from autofit.prediction.shadow_runs import ShadowRuns, ShadowTarget, make_target
from autofit.prediction.verdict import BORDERLINE, DOES_NOT_FIT, FITS, Verdict, judge, largest_batch

__all__ = [
    "BORDERLINE",
    "DOES_NOT_FIT",
    "FITS",
    "LAUNCH_ROWS",
    "Predictor",
    "ShadowRuns",
    "ShadowTarget",
    "Verdict",
    "judge",
    "largest_batch",
    "make_target",
    "structure",
]
