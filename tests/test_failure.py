"""Deaths of children are told apart by type, message, exit code and counters. Messages are in their real wording."""

import signal

import numpy as np
import pytest

from autofit.failure import (
    HALF_BATCH,
    NO_PINNING,
    classify_exception,
    classify_exit,
    exception_chain,
    parse_oom_message,
)
from autofit.records import Outcome

MIB, GIB = 2**20, 2**30

TORCH_1_0 = (
    "CUDA out of memory. Tried to allocate 16.00 GiB "
    "(GPU 0; 11.93 GiB total capacity; 4.00 GiB already allocated; 7.33 GiB free; 179.00 KiB cached)"
)
TORCH_1_13 = (
    "CUDA out of memory. Tried to allocate 984.00 MiB (GPU 0; 47.50 GiB total capacity; 22.15 GiB already allocated; "
    "68.88 MiB free; 22.16 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
TORCH_2_0_CAPPED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 23.99 GiB total capacity; 19.01 GiB already allocated; "
    "3.42 GiB free; 19.19 GiB allowed; 19.10 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
    "memory try setting max_split_size_mb to avoid fragmentation."
)
TORCH_2_1 = (
    "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacty of 23.69 GiB of which 7.11 GiB is free. "
    "Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch memory, this process has 16.31 GiB memory in "
    "use. Of the allocated memory 16.01 GiB is allocated by PyTorch, and 7.47 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation."
)
TORCH_2_5_SHARED = (
    "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 31.36 GiB of which 471.69 MiB is "
    "free. Including non-PyTorch memory, this process has 16.63 GiB memory in use. Process 19239 has 14.26 GiB memory "
    "in use. Of the allocated memory 15.03 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
)
TORCH_2_5_CAPPED = (
    "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which 2.07 GiB is "
    "free. Including non-PyTorch memory, this process has 77.11 GiB memory in use. 75.23 GiB allowed; Of the allocated "
    "memory 74.23 GiB is allocated by PyTorch, and 943.54 MiB is reserved by PyTorch but unallocated."
)
CONTAINER = (
    "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 93.02 GiB of which 1.18 GiB is "
    "free. Process 2752205 has 91.82 GiB memory in use. Of the allocated memory 90.63 GiB is allocated by PyTorch, and "
    "120.54 MiB is reserved by PyTorch but unallocated."
)
WSL = (
    "CUDA out of memory. Tried to allocate 3.98 GiB. GPU 0 has a total capacity of 31.84 GiB of which 16.30 GiB is "
    "free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. 17.51 GiB allowed; Of the "
    "allocated memory 6.74 GiB is allocated by PyTorch, and 7.02 GiB is reserved by PyTorch but unallocated."
)
OTHERS_HIDDEN = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 191.69 GiB of which 0 bytes is "
    "free. 50.00 GiB allowed; Of the allocated memory 9.58 GiB is allocated by PyTorch, and 20.00 MiB is reserved by "
    "PyTorch but unallocated."
)
HIP = (
    "HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 255.69 GiB of which 252.82 GiB is "
    "free. 1.20 GiB allowed; Of the allocated memory 1.14 GiB is allocated by PyTorch, with 17.00 MiB allocated in "
    "private pools (e.g., HIP Graphs), and 18.63 MiB is reserved by PyTorch but unallocated."
)
XPU = (
    "XPU out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 30.30 GiB of which 14.10 GiB is "
    "free. Of the allocated memory 16.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
    "unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
ACCELERATOR = (
    "Out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 63.59 GiB of which 52.00 MiB is free. "
    "Of the allocated memory 61.14 GiB is allocated by PyTorch, and 18.63 MiB is reserved by PyTorch but unallocated."
)
MPS = (
    "MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 3.95 MB, max allowed: 18.13 GB). Tried to "
    "allocate 1024.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
    "allocations (may cause system failure)."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1073741824 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_ERROR = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
NVML_ASSERT = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug to '
    "PyTorch. "
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"
)
NCCL_ARGUMENT = NCCL.replace("2 'out of memory'", "1 'invalid argument'")
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CUBLAS_INIT = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
CUDNN = "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
CUDNN_RUN = "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"
CUDNN_SHAPE = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
LEVEL_ZERO = "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
TRITON = (
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` "
    "may help."
)
INDUCTOR_TRITON = (
    "No valid triton configs. OutOfMemoryError: out of resource: triton_flex_attention Required: 262144 Hardware "
    "limit:232448 Reducing block sizes or `num_stages` may help."
)
NUMPY = "Unable to allocate 2.00 GiB for an array with shape (268435456,) and data type float64"
WORKER_NUMPY = (
    "Caught _ArrayMemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    f'  File "dataset.py", line 3, in __getitem__\nnumpy._core._exceptions._ArrayMemoryError: {NUMPY}'
)
WORKER_KILLED = "DataLoader worker (pid 28841) is killed by signal: Killed. "
WORKER_BUS = (
    "DataLoader worker (pid 28841) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
WORKER_SEGV = "DataLoader worker (pid 28841) is killed by signal: Segmentation fault. "
BACKEND_FAILED = "backend='inductor' raised:\nRuntimeError: the compiler gave up"


def runtime(message):
    return (("builtins.RuntimeError", message),)


def classify(chain, device="cuda:0", free_share=None, capped=False):
    return classify_exception(chain, device=device, free_share=free_share, capped=capped)


@pytest.mark.parametrize(
    "message",
    [
        TORCH_1_0,
        TORCH_1_13,
        TORCH_2_0_CAPPED,
        TORCH_2_1,
        TORCH_2_5_SHARED,
        TORCH_2_5_CAPPED,
        CONTAINER,
        WSL,
        HIP,
        XPU,
        ACCELERATOR,
        MPS,
        CUDA_ERROR,
        "HIP error: out of memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        NVML_ASSERT,
        NCCL,
        NCCL.replace("Cuda failure 2 ", "Cuda failure "),
        LEVEL_ZERO,
        f"Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback …\n{TORCH_2_5_SHARED}",
    ],
)
def test_messages_of_a_full_device_are_device_oom_and_not_in_doubt(message):
    verdict = classify(runtime(message), free_share=0.01)
    assert (verdict.outcome, verdict.confirm) == (Outcome.DEVICE_OOM, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.OutOfMemoryError", Outcome.DEVICE_OOM),
        ("torch.cuda.OutOfMemoryError", Outcome.DEVICE_OOM),
        ("builtins.MemoryError", Outcome.HOST_OOM),
        ("numpy._core._exceptions._ArrayMemoryError", Outcome.HOST_OOM),
        ("numpy.core._exceptions._ArrayMemoryError", Outcome.HOST_OOM),
        ("numpy.core._exceptions.MemoryError", Outcome.HOST_OOM),
        ("builtins.ValueError", Outcome.CRASHED),
    ],
)
def test_the_type_alone_decides_when_the_message_is_empty(name, expected):
    assert classify(((name, ""),)).outcome is expected


def test_the_type_goes_before_a_message_that_says_otherwise():
    assert classify((("builtins.MemoryError", CUDA_ERROR),)).outcome is Outcome.HOST_OOM
    assert classify((("torch.OutOfMemoryError", NUMPY),)).outcome is Outcome.DEVICE_OOM


@pytest.mark.parametrize(
    "message",
    [WORKER_KILLED, WORKER_BUS, NUMPY, WORKER_NUMPY, "std::bad_alloc", CPU, "[Errno 12] Cannot allocate memory"],
)
def test_messages_of_a_full_host_are_host_oom_beside_a_gpu(message):
    verdict = classify(runtime(message), free_share=0.01)
    assert (verdict.outcome, verdict.confirm) == (Outcome.HOST_OOM, None)


@pytest.mark.parametrize(
    "message",
    [
        TRITON,
        INDUCTOR_TRITON,
        NCCL_ARGUMENT,
        WORKER_SEGV,
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "CUDA error: device-side assert triggered",
        "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)",
        'x == y INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug to PyTorch.',
        "I ran out of memory of what to say",
    ],
)
def test_other_errors_are_crashes_even_when_the_device_is_full(message):
    verdict = classify(runtime(message), free_share=0.01)
    assert (verdict.outcome, verdict.confirm) == (Outcome.CRASHED, None)


def test_on_chip_memory_is_no_device_memory_even_under_the_type_of_an_oom():
    assert classify((("triton.runtime.errors.OutOfResources", TRITON),)).outcome is Outcome.CRASHED
    assert classify((("torch.OutOfMemoryError", INDUCTOR_TRITON),)).outcome is Outcome.CRASHED


@pytest.mark.parametrize("message", [CUBLAS, CUBLAS_INIT, CUDNN, CUDNN_RUN])
@pytest.mark.parametrize(
    ("free_share", "expected", "confirm"),
    [
        (0.0, Outcome.DEVICE_OOM, HALF_BATCH),
        (0.049, Outcome.DEVICE_OOM, HALF_BATCH),
        (0.05, Outcome.CRASHED, None),
        (0.8, Outcome.CRASHED, None),
        (None, Outcome.CRASHED, HALF_BATCH),
    ],
)
def test_a_library_that_fails_is_out_of_memory_only_when_less_than_a_twentieth_is_free(
    message, free_share, expected, confirm
):
    verdict = classify(runtime(message), free_share=free_share)
    assert (verdict.outcome, verdict.confirm) == (expected, confirm)


@pytest.mark.parametrize("free_share", [None, 0.01, 0.9])
def test_cudnn_not_supported_is_settled_by_half_the_batch(free_share):
    verdict = classify(runtime(CUDNN_SHAPE), free_share=free_share)
    assert (verdict.outcome, verdict.confirm) == (Outcome.CRASHED, HALF_BATCH)


def test_a_driver_out_of_memory_on_a_device_with_room_is_tried_again_without_pinning():
    assert classify(runtime(CUDA_ERROR), free_share=0.31).confirm == NO_PINNING
    assert classify(runtime(CUDA_ERROR), free_share=0.30).confirm is None
    assert classify(runtime(TORCH_2_5_CAPPED), free_share=0.9).confirm is None


@pytest.mark.parametrize(
    ("message", "on_gpu", "on_cpu", "on_capped_cpu"),
    [
        (CPU, Outcome.HOST_OOM, Outcome.DEVICE_OOM, Outcome.DEVICE_OOM),
        ("could not create a primitive", Outcome.CRASHED, Outcome.CRASHED, Outcome.DEVICE_OOM),
        ("could not execute a primitive", Outcome.CRASHED, Outcome.CRASHED, Outcome.DEVICE_OOM),
        (
            "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable "
            "ONEDNN_VERBOSE=all to get additional diagnostic information.",
            Outcome.CRASHED,
            Outcome.CRASHED,
            Outcome.CRASHED,
        ),
        ("can't start new thread", Outcome.CRASHED, Outcome.CRASHED, Outcome.DEVICE_OOM),
        ("[Errno 12] Cannot allocate memory", Outcome.HOST_OOM, Outcome.HOST_OOM, Outcome.DEVICE_OOM),
        (NUMPY, Outcome.HOST_OOM, Outcome.HOST_OOM, Outcome.HOST_OOM),
        (WORKER_KILLED, Outcome.HOST_OOM, Outcome.HOST_OOM, Outcome.HOST_OOM),
        ("shapes do not match", Outcome.CRASHED, Outcome.CRASHED, Outcome.CRASHED),
    ],
)
def test_on_the_cpu_a_cap_turns_refused_allocations_into_device_oom(message, on_gpu, on_cpu, on_capped_cpu):
    chain = runtime(message)
    assert classify(chain, device="cuda:0", capped=True).outcome is on_gpu
    assert classify(chain, device="cpu", capped=False).outcome is on_cpu
    assert classify(chain, device="cpu", capped=True).outcome is on_capped_cpu


def test_a_plain_memory_error_at_the_cap_is_the_caps_and_elsewhere_the_hosts():
    chain = (("builtins.MemoryError", ""),)
    assert classify(chain, device="cpu", capped=True).outcome is Outcome.DEVICE_OOM
    assert classify(chain, device="cpu", capped=False).outcome is Outcome.HOST_OOM
    assert classify(chain, device="cuda:0", capped=True).outcome is Outcome.HOST_OOM


def test_an_oom_is_found_under_a_compiler_exception():
    chain = (("torch._dynamo.exc.BackendCompilerFailed", BACKEND_FAILED), ("torch.OutOfMemoryError", TORCH_2_5_SHARED))
    assert classify(chain).outcome is Outcome.DEVICE_OOM
    assert classify(chain[:1]).outcome is Outcome.CRASHED


def test_the_innermost_sign_of_memory_decides():
    chain = (("builtins.MemoryError", ""), ("torch.OutOfMemoryError", TORCH_2_1))
    assert classify(chain).outcome is Outcome.DEVICE_OOM
    assert classify(chain[::-1]).outcome is Outcome.HOST_OOM


def test_a_certain_sign_goes_before_one_in_doubt():
    chain = (("torch.OutOfMemoryError", TORCH_2_1), ("builtins.RuntimeError", CUDNN_SHAPE))
    verdict = classify(chain, free_share=0.01)
    assert (verdict.outcome, verdict.confirm) == (Outcome.DEVICE_OOM, None)


def test_a_crash_is_named_after_the_outermost_exception():
    assert classify((("my.Error", "outer"), ("builtins.KeyError", "inner"))).reason == "my.Error"
    assert classify(()).outcome is Outcome.CRASHED


def raised(function):
    with pytest.raises(Exception) as info:
        function()
    return info.value


def test_the_chain_follows_causes_then_contexts_outermost_first():
    def cause():
        try:
            raise MemoryError("inner")
        except MemoryError as error:
            raise RuntimeError("outer") from error

    def context():
        try:
            raise MemoryError("inner")
        except MemoryError:
            raise RuntimeError("outer")  # noqa: B904 - the implicit context is what is tested

    def hidden():
        try:
            raise MemoryError("inner")
        except MemoryError:
            raise RuntimeError("outer") from None

    expected = (("builtins.RuntimeError", "outer"), ("builtins.MemoryError", "inner"))
    for function in (cause, context, hidden):
        assert exception_chain(raised(function)) == expected


def test_a_circular_chain_ends():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert [message for _, message in exception_chain(first)] == ["first", "second"]


def test_an_exception_with_two_arguments_is_read():
    chain = exception_chain(RuntimeError(CUDA_ERROR, 2))
    assert classify(chain).outcome is Outcome.DEVICE_OOM


def test_the_real_numpy_exception_is_host_oom():
    error = raised(lambda: np.empty(2**50, dtype=np.float64))
    assert classify(exception_chain(error), device="cpu", capped=True).outcome is Outcome.HOST_OOM
    assert parse_oom_message(str(error)).requested_bytes == 2**53


def test_the_real_exceptions_of_torch_are_recognised():
    torch = pytest.importorskip("torch")
    chain = exception_chain(raised(lambda: torch.empty(2**55)))
    assert classify(chain, device="cpu").outcome is Outcome.DEVICE_OOM
    assert classify(chain, device="cuda:0").outcome is Outcome.HOST_OOM
    assert classify(exception_chain(torch.OutOfMemoryError(""))).outcome is Outcome.DEVICE_OOM


SIGKILL = -signal.SIGKILL


@pytest.mark.parametrize(
    ("returncode", "flags", "expected"),
    [
        (SIGKILL, {"oom_killed": True}, Outcome.HOST_OOM),
        (137, {"oom_killed": True}, Outcome.HOST_OOM),
        (SIGKILL, {"oom_killed": False}, Outcome.KILLED),
        (SIGKILL, {"oom_killed": None}, Outcome.KILLED),
        (137, {}, Outcome.KILLED),
        (SIGKILL, {"timed_out": True, "oom_killed": True}, Outcome.TIMEOUT),
        (SIGKILL, {"over_host_budget": True}, Outcome.HOST_OOM),
        (SIGKILL, {"over_host_budget": True, "timed_out": True}, Outcome.HOST_OOM),
        (-signal.SIGTERM, {}, Outcome.KILLED),
        (143, {}, Outcome.KILLED),
        (-signal.SIGTERM, {"oom_killed": True}, Outcome.KILLED),
        (-signal.SIGINT, {}, Outcome.KILLED),
        (-signal.SIGSEGV, {}, Outcome.CRASHED),
        (139, {}, Outcome.CRASHED),
        (-signal.SIGABRT, {}, Outcome.CRASHED),
        (-signal.SIGBUS, {}, Outcome.CRASHED),
        (-40, {}, Outcome.KILLED),
        (0, {}, Outcome.CRASHED),
        (1, {}, Outcome.CRASHED),
        (255, {}, Outcome.CRASHED),
    ],
)
def test_an_exit_without_a_reply_is_classified(returncode, flags, expected):
    flags = {"timed_out": False, "over_host_budget": False, **flags}
    assert classify_exit(returncode, **flags)[0] is expected


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exit 0 without a reply"),
        (3, "exit 3 without a reply"),
        (-11, "signal 11 (SIGSEGV)"),
        (139, "signal 11 (SIGSEGV)"),
        (-40, "signal 40 (real-time)"),
    ],
)
def test_an_exit_is_named(returncode, text):
    assert classify_exit(returncode, timed_out=False, over_host_budget=False)[1] == text


def about(bytes_, value, unit=GIB):
    return bytes_ == pytest.approx(value * unit, rel=1e-6)


def test_torch_1_messages_are_parsed():
    facts = parse_oom_message(TORCH_1_0)
    assert about(facts.requested_bytes, 16) and about(facts.capacity_bytes, 11.93) and about(facts.free_bytes, 7.33)
    assert about(facts.allocated_bytes, 4) and about(facts.unallocated_bytes, 179, 1024)
    assert facts.process_bytes is None and facts.processes == ()

    facts = parse_oom_message(TORCH_1_13)
    assert about(facts.requested_bytes, 984, MIB) and about(facts.capacity_bytes, 47.5)
    assert about(facts.free_bytes, 68.88, MIB) and about(facts.reserved_bytes, 22.16)
    assert facts.unallocated_bytes == pytest.approx(0.01 * GIB, rel=1e-3)


def test_torch_2_messages_are_parsed():
    facts = parse_oom_message(TORCH_2_1)
    assert about(facts.requested_bytes, 8) and about(facts.capacity_bytes, 23.69) and about(facts.free_bytes, 7.11)
    assert about(facts.process_bytes, 16.31) and facts.processes == ((2006998, 256 * MIB),)
    assert about(facts.allocated_bytes, 16.01) and about(facts.unallocated_bytes, 7.47, MIB)
    assert facts.allowed_bytes is None

    facts = parse_oom_message(HIP)
    assert about(facts.allowed_bytes, 1.2) and about(facts.unallocated_bytes, 18.63, MIB)


@pytest.mark.parametrize(("message", "allowed"), [(TORCH_2_0_CAPPED, 19.19), (TORCH_2_5_CAPPED, 75.23), (MPS, 18.13)])
def test_a_cap_is_parsed(message, allowed):
    assert about(parse_oom_message(message).allowed_bytes, allowed)


def test_other_messages_give_what_they_have():
    assert about(parse_oom_message(MPS).requested_bytes, 1024, MIB)
    assert parse_oom_message(CPU).requested_bytes == 2**30
    facts = parse_oom_message("shapes do not match")
    assert facts.requested_bytes is None and facts.foreign_bytes is None


def test_wrapped_lines_are_parsed_as_one():
    wrapped = TORCH_2_5_SHARED.replace(" non-PyTorch", "\n   non-PyTorch").replace("31.36 GiB", "31.36\nGiB")
    assert parse_oom_message(wrapped) == parse_oom_message(TORCH_2_5_SHARED)


@pytest.mark.parametrize(
    ("message", "gibibytes"),
    [
        (TORCH_2_5_SHARED, 14.27),  # Process 19239
        (TORCH_2_1, 0.27),
        (TORCH_2_5_CAPPED, 0.01),
        (CONTAINER, 0.02),  # `Process 2752205` is this very process
        (OTHERS_HIDDEN, 180.59),  # 191.69 − 9.60 − 1.5 for the context: a lower bound
        (WSL, 0.28),  # its own bytes are not known there either
        (TORCH_1_13, 23.77),
    ],
)
def test_what_other_processes_hold_is_told_from_ones_own(message, gibibytes):
    assert parse_oom_message(message).foreign_bytes == pytest.approx(gibibytes * GIB, abs=0.01 * GIB)


def test_a_foreign_process_in_a_container_is_not_taken_for_ones_own():
    message = CONTAINER.replace("90.63 GiB is allocated", "1.40 GiB is allocated")
    assert parse_oom_message(message).foreign_bytes > 85 * GIB


def test_memory_that_the_driver_pages_to_the_host_is_not_foreign():
    spilled = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is "
        "free. Of the allocated memory 14.51 GiB is allocated by PyTorch, and 15.90 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert parse_oom_message(spilled).foreign_bytes == 0
