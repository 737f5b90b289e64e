"""Reductions of logits before Trainer accumulates them, for `preprocess_logits_for_metrics`.

Each looks at the structure it is given and refuses what it does not know, since a guess would change metrics silently.
"""

from typing import Any


class CannotReduceError(TypeError):
    """The model's output has a structure that this reduction does not know."""


def argmax(logits: Any, labels: Any) -> Any:
    """The most likely class instead of all scores.

    `logits` is a tensor of shape (rows, classes) or (rows, length, classes), or a tuple or list whose first element is
    one. Returns integers of shape (rows,) or (rows, length). Raises CannotReduceError for anything else.
    """
    scores = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
    if not hasattr(scores, "argmax") or not hasattr(scores, "dim"):
        raise CannotReduceError(
            f"cannot_reduce: logits are {type(logits).__name__}, not a tensor or a tuple that begins with one"
        )
    expected = labels.dim() + 1 if hasattr(labels, "dim") else scores.dim()
    if scores.dim() not in (2, 3) or scores.dim() != expected:
        raise CannotReduceError(
            f"cannot_reduce: logits of shape {tuple(scores.shape)} for labels of shape "
            f"{tuple(getattr(labels, 'shape', ()))} have no class dimension at the end"
        )
    return scores.argmax(dim=-1)


REDUCTIONS = {"argmax": argmax}
