import numpy as np
import pytest

from autofit import catalog
from autofit.harness.shadow.semantics.workspace import cublas_workspace_bytes
from autofit.harness.shadow.step_time import CPU_RATES, LAUNCH_SECONDS, Rates, gpu_rates, step_seconds

KINDS = ("matmul_fp32", "matmul_half", "other")
FP32, HALF, OTHER = range(3)
ROUND = Rates(fp32_flops=1e12, tf32_flops=4e12, half_flops=8e12, bandwidth_bytes=1e12, launch_seconds=1e-6)
MIB = 2**20


def seconds(*operators: tuple[float, float, int], rates: Rates = ROUND, tf32: bool = False, kernels=None) -> float:
    """Of operators given as (flops, bytes, kind)."""
    flops, moved, kinds = zip(*operators, strict=True)
    return step_seconds(flops, moved, kinds, KINDS, rates, tf32, kernels)


def test_arithmetic_takes_its_share_of_the_peak():
    assert seconds((7e11, 0, FP32)) == pytest.approx(1)
    assert seconds((7e11, 0, HALF)) == pytest.approx(1 / 8)


def test_tf32_speeds_up_products_of_fp32_only():
    assert seconds((7e11, 0, FP32), tf32=True) == pytest.approx(1 / 4)
    assert seconds((7e11, 0, HALF), tf32=True) == pytest.approx(1 / 8)
    assert seconds((7e11, 0, OTHER), tf32=True) == pytest.approx(1)


def test_tf32_changes_nothing_where_a_device_has_none():
    turing = gpu_rates(catalog.find_gpu("t4"))
    assert seconds((7e11, 0, FP32), rates=turing, tf32=True) == seconds((7e11, 0, FP32), rates=turing)


def test_traffic_takes_its_share_of_the_bandwidth():
    assert seconds((0, 8e11, OTHER)) == pytest.approx(1)


def test_each_operator_takes_the_longer_of_both_and_they_add_up():
    computing, moving = (7e11, 1, FP32), (1, 8e11, OTHER)
    assert seconds(computing, moving) == pytest.approx(2)
    assert seconds((7e11, 8e11, FP32)) == pytest.approx(1)


def test_small_operators_take_what_the_host_needs_to_launch_them():
    assert seconds(*[(10, 10, OTHER)] * 1000) == pytest.approx(1000 * ROUND.launch_seconds)
    assert seconds((10, 10, OTHER), (10, 10, OTHER), kernels=[1, 99]) == pytest.approx(100 * ROUND.launch_seconds)


def test_the_host_is_hidden_behind_a_busy_device():
    assert seconds((7e11, 0, FP32), kernels=[1000]) == pytest.approx(1)


def test_nothing_takes_no_time():
    assert step_seconds([], [], [], KINDS, ROUND, False) == 0


def test_a_kind_without_a_rate_is_named():
    with pytest.raises(ValueError, match="matmul_int8"):
        step_seconds([1.0], [1.0], [0], ("matmul_int8",), ROUND, False)


def test_kinds_may_be_listed_in_any_order():
    assert step_seconds([7e11], [0.0], np.array([0]), ("matmul_half",), ROUND, False) == pytest.approx(1 / 8)


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_the_rates_of_a_gpu_are_those_of_the_catalog(name):
    gpu = catalog.find_gpu(name)
    rates = gpu_rates(gpu)
    assert (rates.fp32_flops, rates.tf32_flops, rates.half_flops) == (gpu.fp32_flops, gpu.tf32_flops, gpu.half_flops)
    assert (rates.bandwidth_bytes, rates.launch_seconds) == (gpu.bandwidth_bytes, LAUNCH_SECONDS)
    assert 19e-6 <= rates.launch_seconds <= 26e-6


def transformer(rows: int, half: bool, recompute: bool = False) -> list[tuple[float, float, int]]:
    """Operators of 12 layers of 768 over 512 tokens a row, forward and backward, roughly."""
    tokens, width, item = 512 * rows, 768, 2 if half else 4
    passes = 3 + recompute
    product = (2 * tokens * width * 3 * width, item * (4 * tokens * width + 3 * width**2), HALF if half else FP32)
    pointwise = (0.0, 2 * item * tokens * width, OTHER)
    return [product] * (4 * 12 * passes) + [pointwise] * (10 * 12 * passes)


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_known_orders_hold_on_every_gpu(name):
    rates = gpu_rates(catalog.find_gpu(name))
    full, half = (seconds(*transformer(16, half), rates=rates) for half in (False, True))
    assert half < full / 1.5
    assert seconds(*transformer(16, False, recompute=True), rates=rates) == pytest.approx(full * 4 / 3, rel=0.01)
    throughput = [rows / seconds(*transformer(rows, True), rates=rates) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert throughput == sorted(throughput)
    assert throughput[-1] / throughput[-2] < throughput[1] / throughput[0] + 1e-9


def test_newer_data_centre_cards_are_faster():
    names = ["t4", "v100-16", "a100-40", "a100-80", "h100-80", "h200"]
    taken = [seconds(*transformer(64, True), rates=gpu_rates(catalog.find_gpu(name))) for name in names]
    assert taken == sorted(taken, reverse=True)


def test_on_a_cpu_less_traffic_is_faster():
    assert seconds(*transformer(4, True), rates=CPU_RATES) < seconds(*transformer(4, False), rates=CPU_RATES)


@pytest.mark.parametrize(
    ("capability", "size"),
    [((7, 0), 8.125), ((7, 5), 8.125), ((8, 0), 8.125), ((8, 9), 8.125), ((9, 0), 32), ((10, 0), 32), ((12, 0), 32)],
)
def test_a_workspace_grew_with_hopper(capability, size):
    assert cublas_workspace_bytes(capability, {}) == size * MIB


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (":4096:8", 32 * MIB),
        (":16:8", 128 * 1024),
        (":4096:2:16:8", 8.125 * MIB),
        (":0:0", 0),
        ("", 8.125 * MIB),
        ("4096", 8.125 * MIB),
    ],
)
def test_the_environment_sets_the_workspace_as_torch_reads_it(config, size):
    assert cublas_workspace_bytes((8, 0), {"CUBLAS_WORKSPACE_CONFIG": config}) == size


def test_the_workspace_is_read_from_this_processs_environment(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")
    assert cublas_workspace_bytes((9, 0)) == 16 * 1024
