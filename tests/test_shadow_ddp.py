"""The buckets of DistributedDataParallel against torch's own assignment."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.harness.shadow.semantics.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES, bucket_bytes

sizes = st.lists(st.tuples(st.integers(1, 20_000_000), st.sampled_from([torch.float32, torch.bfloat16])), max_size=12)


def fake(numel: int, dtype: torch.dtype, requires_grad: bool = True) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="meta", requires_grad=requires_grad)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_buckets_are_those_that_torch_would_make(listed):
    parameters = [fake(numel, dtype) for numel, dtype in listed]
    if not parameters:
        assert bucket_bytes([]) == []
        return
    assigned, _ = dist._compute_bucket_assignment_by_size(parameters, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
    theirs = [sum(parameters[i].numel() * parameters[i].element_size() for i in bucket) for bucket in assigned]
    assert sorted(bucket_bytes(parameters)) == sorted(theirs)


def test_together_they_are_one_copy_of_what_is_trained():
    parameters = [fake(3_000_000, torch.float32), fake(9, torch.float32, False), fake(70, torch.bfloat16)]
    assert sum(bucket_bytes(parameters)) == 4 * 3_000_000 + 2 * 70


def test_a_bucket_closes_at_its_limit():
    assert bucket_bytes([fake(2**18, torch.float32)] * 3) == [2**20, 2**21]
    assert bucket_bytes([fake(2**18 - 1, torch.float32)] * 2) == [pytest.approx(2**21, abs=8)]
