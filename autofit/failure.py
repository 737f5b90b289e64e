"""How a child died: out of memory on the device, out of memory on the host, or something else.

Pure: the child passes what it knows of its exception, the parent what it knows of the exit, and neither torch nor a
device is touched. The exception's type is read before any message, since messages change between versions and turn up
inside other messages. What is only likely is said to be (`Verdict.confirm`); the second probe that would settle it
is not made here.

Not here: what is no death: a peak above the budget (a comparison), a loss that is not finite, missing gradients.
"""

import re
import signal
from dataclasses import dataclass
from enum import Enum, auto

from autofit.records import Outcome

# Below this share of free device memory a library that could not allocate ran out of memory; above it, it has another
# trouble (deepmodeling/deepmd-kit#5440).
SCARCE_SHARE = 0.05
# With more than this share free, the driver's own `out of memory` is about pinned host memory (microsoft/WSL#8447).
PINNED_SHARE = 0.30
# Context and loaded kernels of one process: 115 MiB (T4) to 665 MiB (H100), 1.07 GiB with NCCL's buffers, from public
# out-of-memory messages.
CONTEXT_ALLOWANCE_BYTES = 3 * 2**29

HALF_BATCH = "half-batch"
NO_PINNING = "no-pinning"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str
    confirm: str | None = None  # the probe that would settle it: HALF_BATCH, NO_PINNING; None: nothing is in doubt


class _Sign(Enum):
    DEVICE = auto()  # the device had no more memory
    HOST = auto()  # the host had no more memory
    CPU_ALLOCATOR = auto()  # torch's CPU allocator: the device's memory on the CPU, the host's elsewhere
    CAP_OR_HOST = auto()  # an allocation of the process: at a cap the cap refused it, else the host
    CAP = auto()  # of memory only where a cap stands for the budget
    DRIVER = auto()  # the device, or pinned host memory where much of the device is free
    LIBRARY = auto()  # of memory only where the device was full
    AMBIGUOUS = auto()  # said of memory and of unsupported shapes alike
    NOT_MEMORY = auto()  # reads like memory and is not about its size


@dataclass(frozen=True)
class _Rule:
    sign: _Sign
    reason: str
    pattern: str  # matched anywhere in the text, white space folded


# Triton's limits. Inductor tells of them as `OutOfMemoryError: out of resource`, so this comes before the type.
_NOT_MEMORY = _Rule(_Sign.NOT_MEMORY, "a kernel asked for more on-chip memory than there is", r"out of resource: ")

_TYPES = (
    # torch.OutOfMemoryError since 2.5, torch.cuda.OutOfMemoryError since 1.13; CuPy's has the same last name.
    _Rule(_Sign.DEVICE, "the device's allocator ran out of memory", r"(^|\.)OutOfMemoryError$"),
    # NumPy's names an array, of predictions or metrics: host memory on every device.
    _Rule(_Sign.HOST, "an array did not fit in host memory", r"^numpy\..*MemoryError$"),
    _Rule(_Sign.CAP_OR_HOST, "Python could not allocate", r"^(builtins\.)?MemoryError$"),
)

# The first that matches decides.
_MESSAGES = (
    _Rule(_Sign.CPU_ALLOCATOR, "the CPU allocator ran out of memory", r"DefaultCPUAllocator: (can't alloc|not enough)"),
    # After `CUDA`, `HIP`, `XPU` or `NPU`; the allocator that accelerators share names none.
    _Rule(_Sign.DEVICE, "the device's allocator ran out of memory", r"(?i:out of memory)\. Tried to allocate"),
    _Rule(_Sign.DEVICE, "the device's allocator ran out of memory", r"MPS backend out of memory"),
    _Rule(_Sign.DEVICE, "the device's allocator ran out of memory", r"PT_DEVMEM Allocation failed"),
    # While it words its own message the allocator asks NVML, which refuses on MIG and Tegra, and this comes instead
    # (pytorch/pytorch#112377, #185240).
    _Rule(_Sign.DEVICE, "the device's allocator ran out of memory", r"NVML_SUCCESS == .*ASSERT.*CUDACachingAllocator"),
    _Rule(_Sign.DEVICE, "the driver ran out of device memory", r"(CUDA|HIP) driver error: out of memory"),
    _Rule(_Sign.DEVICE, "the driver ran out of device memory", r"Triton Error \[(CUDA|HIP)\]: out of memory"),
    _Rule(_Sign.DRIVER, "the driver ran out of memory", r"(CUDA|HIP) error: out of memory|cuda runtime error \(2\)"),
    _Rule(_Sign.DEVICE, "NCCL ran out of device memory", r"NCCL.*Cuda failure (\d+ )?'out of memory'"),
    _Rule(_Sign.DEVICE, "Level Zero ran out of device memory", r"OUT_OF_DEVICE_MEMORY"),
    _Rule(_Sign.HOST, "Level Zero ran out of host memory", r"OUT_OF_HOST_MEMORY"),
    _Rule(_Sign.LIBRARY, "cuBLAS failed", r"(CU|HIP)BLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"),
    _Rule(_Sign.LIBRARY, "cuDNN failed", r"CUDNN_STATUS_(ALLOC_FAILED|EXECUTION_FAILED|NOT_INIT|INTERNAL_ERROR)"),
    _Rule(_Sign.AMBIGUOUS, "cuDNN lacked workspace, or support for the shape", r"CUDNN_STATUS_NOT_SUPPORTED"),
    # oneDNN's text when an allocation fails; with `descriptor` it is about an unsupported operation.
    _Rule(_Sign.CAP, "oneDNN could not allocate", r"could not (create|execute) a primitive(?! descriptor)"),
    _Rule(_Sign.CAP, "a thread could not get its memory", r"can't start new thread"),
    # A bus error is a write to shared memory that was not there; torch's own message says so.
    _Rule(_Sign.HOST, "a DataLoader worker died for memory", r"DataLoader worker .*by signal: (Killed|Bus error)"),
    _Rule(_Sign.HOST, "an array did not fit in host memory", r"Unable to allocate [\d.]+ \w+ for an array"),
    _Rule(_Sign.CAP_OR_HOST, "the system gave no memory", r"Cannot allocate memory|std::bad_alloc"),
)


def exception_chain(error: BaseException) -> tuple[tuple[str, str], ...]:
    """(type name with its module, message) from `error` down to what it was raised from or while handling.

    `raise … from None` hides nothing here: what is behind a reworded out-of-memory error is the better evidence.
    """
    chain, seen = [], set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        chain.append((f"{type(error).__module__}.{type(error).__qualname__}", str(error)))
        error = error.__cause__ if error.__cause__ is not None else error.__context__
    return tuple(chain)


def classify_exception(
    chain: tuple[tuple[str, str], ...], *, device: str, free_share: float | None, capped: bool
) -> Verdict:
    """What an exception says of memory.

    `chain` is outermost first (`exception_chain`); the innermost sign of memory decides, since wrappers only repeat it.
    `free_share` is the share of device memory that was free at the failure, None where nobody could tell. `capped`
    says that a limit on the process stands for the budget, as on the CPU.
    """
    at_cap = capped and device == "cpu"
    judged = []
    for name, message in reversed(chain):
        rule = _match(name, message)
        if rule is not None:
            judged.append(_judge(rule, on_cpu=device == "cpu", at_cap=at_cap, free_share=free_share))
    certain = [verdict for verdict in judged if verdict.outcome is not Outcome.CRASHED and verdict.confirm is None]
    in_doubt = [verdict for verdict in judged if verdict.confirm is not None]
    unknown = Verdict(Outcome.CRASHED, chain[0][0] if chain else "no exception")
    return (certain + in_doubt + judged + [unknown])[0]


def _match(name: str, message: str) -> _Rule | None:
    text = " ".join(message.split())
    if re.search(_NOT_MEMORY.pattern, text):
        return _NOT_MEMORY
    by_type = next((rule for rule in _TYPES if re.search(rule.pattern, name)), None)
    return by_type or next((rule for rule in _MESSAGES if re.search(rule.pattern, text)), None)


def _judge(rule: _Rule, *, on_cpu: bool, at_cap: bool, free_share: float | None) -> Verdict:
    device_oom = Verdict(Outcome.DEVICE_OOM, rule.reason)
    host_oom = Verdict(Outcome.HOST_OOM, rule.reason)
    crashed = Verdict(Outcome.CRASHED, rule.reason)
    match rule.sign:
        case _Sign.DEVICE:
            return device_oom
        case _Sign.HOST:
            return host_oom
        case _Sign.CPU_ALLOCATOR:
            return device_oom if on_cpu else host_oom
        case _Sign.CAP_OR_HOST:
            return device_oom if at_cap else host_oom
        case _Sign.CAP:
            return device_oom if at_cap else crashed
        case _Sign.DRIVER if free_share is not None and free_share > PINNED_SHARE:
            return Verdict(Outcome.DEVICE_OOM, f"{rule.reason} with {free_share:.0%} of the device free", NO_PINNING)
        case _Sign.DRIVER:
            return device_oom
        case _Sign.LIBRARY if free_share is None:
            return Verdict(Outcome.CRASHED, f"{rule.reason}; how much of the device was free is not known", HALF_BATCH)
        case _Sign.LIBRARY if free_share < SCARCE_SHARE:
            return Verdict(Outcome.DEVICE_OOM, f"{rule.reason} with {free_share:.1%} of the device free", HALF_BATCH)
        case _Sign.AMBIGUOUS:
            return Verdict(Outcome.CRASHED, rule.reason, HALF_BATCH)
        case _:
            return crashed


# Signals by which a process dies of its own fault; all others were sent by somebody.
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
_SIGNAL_NAMES = {member.value: member.name for member in signal.Signals}


def classify_exit(
    returncode: int, *, timed_out: bool, over_host_budget: bool, oom_killed: bool | None = None
) -> tuple[Outcome, str]:
    """Why a child left no reply, and that in words.

    `returncode` is negative for a signal, as subprocess tells it, or 128 and the signal, as a shell does. `timed_out`
    and `over_host_budget`: autofit itself ended the child for that. `oom_killed` is the evidence for the kernel's
    out-of-memory killer (its counter rose while the child ran), None where no counter can be read; SIGKILL without
    evidence may be anybody's.
    """
    if over_host_budget:
        return Outcome.HOST_OOM, "its process tree exceeded the host memory budget"
    if timed_out:
        return Outcome.TIMEOUT, "it exceeded its time limit"
    number = -returncode if returncode < 0 else returncode - 128
    if number not in signal.valid_signals():
        return Outcome.CRASHED, f"exit {returncode} without a reply"
    text = f"signal {number} ({_SIGNAL_NAMES.get(number, 'real-time')})"
    if number == signal.SIGKILL and oom_killed:
        return Outcome.HOST_OOM, f"{text} from the kernel's out-of-memory killer"
    return (Outcome.CRASHED if number in _FAULTS else Outcome.KILLED), text


@dataclass(frozen=True)
class OomFacts:
    """What an out-of-memory message says, in bytes. None: it does not say. Torch prints three digits, so ±0.5 %."""

    requested_bytes: int | None = None
    capacity_bytes: int | None = None  # of the device
    free_bytes: int | None = None  # on the device, for every process
    allowed_bytes: int | None = None  # the cap on torch's allocator, where one is set
    process_bytes: int | None = None  # this process on the device, context included
    processes: tuple[tuple[int, int], ...] = ()  # (pid, bytes) of those that torch took for others, see foreign_bytes
    allocated_bytes: int | None = None  # live tensors
    unallocated_bytes: int | None = None  # reserved by torch's allocator and not in use

    @property
    def reserved_bytes(self) -> int | None:
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def foreign_bytes(self) -> int | None:
        """What other processes hold on the device: all that is neither free nor this process's own.

        In a container torch does not know its own process id among NVML's and lists itself as `Process N`: the listed
        process that holds what torch reserved and one context is taken for it. Where none is, what torch reserved and
        a large context count as its own, so that the figure is a lower bound.
        """
        own = self.process_bytes
        if own is None and self.reserved_bytes is not None:
            most = self.reserved_bytes + CONTEXT_ALLOWANCE_BYTES
            own = min((held for _, held in self.processes if self.reserved_bytes <= held <= most), default=most)
        if own is None or self.capacity_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.capacity_bytes - self.free_bytes - own)


_SIZE = r"([\d.]+) (bytes|[KMGTPE]i?B)"
# MPS wrote GB for 2³⁰ bytes before it wrote GiB (`max allowed: 18.13 GB` on a Mac of 16 GiB is 1.7 · ⅔ · 16 GiB).
_FACTORS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50, "e": 2**60}
_PATTERNS = {
    "requested_bytes": rf"(?i:tried|unable) to allocate {_SIZE}",
    "capacity_bytes": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity",  # 2.1 wrote `capacty`
    "free_bytes": rf"of which {_SIZE} is free|{_SIZE} free[;)]",
    "allowed_bytes": rf"{_SIZE} allowed;|max allowed: {_SIZE}",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|MPS allocated: {_SIZE}",
    "unallocated_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached",  # `cached` until 1.3
    "reserved_bytes": rf"{_SIZE} reserved in total by PyTorch",  # 1.4 to 2.0
}


def parse_oom_message(text: str) -> OomFacts:
    """The figures in an out-of-memory message of torch 1.0 to 2.13 (CUDA, HIP, XPU, MPS, CPU) or of NumPy."""
    flat = " ".join(text.split())
    facts = {name: _find_size(pattern, flat) for name, pattern in _PATTERNS.items()}
    reserved = facts.pop("reserved_bytes")
    if facts["unallocated_bytes"] is None and reserved is not None and facts["allocated_bytes"] is not None:
        facts["unallocated_bytes"] = max(0, reserved - facts["allocated_bytes"])
    listed = ((int(pid), _size(*rest)) for pid, *rest in re.findall(rf"Process (\d+) has {_SIZE} memory in use", flat))
    return OomFacts(**facts, processes=tuple((pid, held) for pid, held in listed if held is not None))


def _find_size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return _size(*(group for group in match.groups() if group is not None)) if match else None


def _size(number: str, unit: str) -> int | None:
    """None for what no device holds: NVML's `not available`, 2⁶⁴ − 1, is printed as 17179869184.00 GiB under WSL."""
    size = int(float(number) * _FACTORS[unit[0].lower()])
    return size if size < 2**60 else None
