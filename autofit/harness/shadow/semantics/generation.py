"""Text generation without values: every row goes on to the full length.

Whether a row has met its end token is never known of fakes, so a generation would never end. Here the length alone ends it,
for all rows at once (`StoppingCriteriaList` of transformers/generation/stopping_criteria.py): the worst case of memory, since
the cache of keys and values is then as long as it can be.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_length_generation() -> Iterator[None]:
    """Generation stops at its maximal length, and not before; without one at once."""
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    original = StoppingCriteriaList.__call__

    def is_done(criteria: Any, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        longest = criteria.max_length
        done = longest is None or input_ids.shape[1] >= longest
        return torch.full((input_ids.shape[0],), done, device=input_ids.device, dtype=torch.bool)

    StoppingCriteriaList.__call__ = is_done
    try:
        yield
    finally:
        StoppingCriteriaList.__call__ = original
