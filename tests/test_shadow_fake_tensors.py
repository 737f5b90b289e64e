"""Fakes know what code made and what a batch says of sizes; of model and data they know nothing."""

import pytest
import torch
import torch.nn.functional as F

from autofit.harness.shadow.fake_tensors import KNOWN_ELEMENTS, KNOWN_PER_ROW, Answering, FakeTensors


@pytest.fixture
def fakes() -> FakeTensors:
    return FakeTensors()


@pytest.fixture
def inside(fakes):
    with fakes.mode, Answering():
        yield


def convert(fakes: FakeTensors, value: torch.Tensor) -> torch.Tensor:
    return fakes.convert_batch({"x": value}, lambda *_: None)["x"]


def test_depths_of_stages_stay_known_through_sums_and_slices(inside):
    assert torch.tensor([3, 4, 6]).cumsum(0).tolist() == [3, 7, 13]
    rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
    assert rates == pytest.approx([0, 0.1, 0.2])


def test_a_mask_that_code_made_selects_what_it_would(inside):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0, :2] = True
    assert mask.nonzero().shape == (2, 2)
    assert torch.arange(6).view(2, 3)[mask].tolist() == [0, 1]


def test_what_unknown_values_were_written_to_is_unknown(inside):
    known = torch.ones(2, 3)
    row = known[0]
    row.add_(torch.empty(3))
    assert known.constant is None
    assert torch.zeros(3).normal_().constant is None


def test_views_of_known_tensors_share_their_storage(inside):
    tensor = torch.arange(6)
    assert tensor.view(2, 3).untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_large_tensors_of_code_are_unknown(inside):
    assert torch.zeros(KNOWN_ELEMENTS).constant is not None
    assert torch.zeros(KNOWN_ELEMENTS + 1).constant is None


def test_sizes_of_images_are_known_and_tokens_are_not(fakes):
    grid = convert(fakes, torch.tensor([[1, 8, 8], [1, 4, 6]]))
    with fakes.mode, Answering():
        assert grid.prod(-1).tolist() == [64, 24]
    assert convert(fakes, torch.ones(2, KNOWN_PER_ROW + 1, dtype=torch.int64)).constant is None
    assert convert(fakes, torch.ones(2, 3)).constant is None


def test_what_is_written_to_a_known_batch_does_not_reach_the_rows(fakes):
    row = torch.tensor([1, 2])
    converted = convert(fakes, row)
    with fakes.mode, Answering():
        assert converted.add_(1).tolist() == [2, 3]
    assert row.tolist() == [1, 2]


def test_assertions_about_unknown_values_hold(inside):
    unknown = torch.empty(5)
    torch._check_tensor_all(unknown > 0)
    assert unknown.isnan().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shapes_of_real_ones(fakes, dtype):
    def shapes() -> list[torch.Size]:
        rows = torch.ones(8, 16, dtype=dtype, requires_grad=True)
        experts = torch.ones(2, 16, 24, dtype=dtype, requires_grad=True)
        product = F.grouped_mm(rows, experts, offs=torch.tensor([3, 8], dtype=torch.int32))
        product.square().sum().backward()
        return [product.shape, rows.grad.shape, experts.grad.shape]

    real = shapes()
    with fakes.mode, Answering():
        assert shapes() == real


def test_rows_of_a_grouped_product_are_padded_to_16_bytes(inside):
    product = F.grouped_mm(torch.empty(4, 8), torch.empty(2, 8, 5), offs=torch.tensor([1, 4], dtype=torch.int32))
    assert product.shape == (4, 5)
    assert product.stride() == (8, 1)


def test_ctc_keeps_what_the_longest_target_needs(fakes):
    def run(targets: torch.Tensor) -> tuple[torch.Size, torch.Size]:
        scores = torch.zeros(20, 2, 7, requires_grad=True)
        steps, lengths = torch.tensor([20, 20]), torch.tensor([5, 5])
        loss, alpha = torch._ctc_loss(scores.log_softmax(-1), targets, steps, lengths)
        loss.sum().backward()
        return alpha.shape, scores.grad.shape

    real = run(torch.ones(2, 5, dtype=torch.int64))
    with fakes.mode, Answering():
        assert run(torch.ones(2, 5, dtype=torch.int64)) == real
        assert run(torch.ones(10, dtype=torch.int64)) == real  # one behind the other
