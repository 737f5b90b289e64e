"""What the user's whole training takes, projected from the speeds in the table: training, and evaluations by its schedule.

Told wherever evaluation is more than a twentieth of it, whatever was searched for. Loading and checkpoints are no part of it.
"""

from collections.abc import Sequence

from autofit.extrapolation import RunSeconds, WholeRun
from autofit.records import Selection
from autofit.report.summary import Row
from autofit.units import format_seconds

WORTH_TELLING = 0.05  # share of evaluation


def run_sentences(selection: Selection, rows: Sequence[Row]) -> list[str]:
    """One sentence with the user's settings and what was chosen; one more with what is assumed. Empty where evaluation is
    little, or the schedule is not known."""
    run = selection.run
    if run is None or not run.is_known:
        return []
    named = sorted((row for row in rows if row.role and row.fits), key=lambda row: "yours" not in row.role)
    told = [(row.role, row_seconds(row, run)) for row in named]
    known = [(name, seconds) for name, seconds in told if seconds is not None]
    worth = selection.objective == "wallclock" or any(s.eval_share > WORTH_TELLING for _, s in known)
    if not known or not worth:
        return []
    count = f"{run.evaluations} evaluation{'' if run.evaluations == 1 else 's'}"
    listed = "; ".join(
        f"{name} {format_seconds(s.total)} (training {format_seconds(s.train)}, {count} {format_seconds(s.evaluate)})"
        for name, s in known
    )
    assumed = f" ({run.told})" if run.told else ""
    return [f"Your whole run, projected{assumed}: {listed}."]


def row_seconds(row: Row, run: WholeRun) -> RunSeconds | None:
    """At the speeds of the row; None where it was not evaluated."""
    one = run.eval_rows / row.eval_per_second if run.eval_rows and row.eval_per_second else None
    return run.seconds(row.train_per_second, one)
