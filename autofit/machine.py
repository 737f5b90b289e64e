"""What hardware and libraries are here, and what they hold right now.

GPUs are asked through NVML and the host through /proc and /sys, so that the parent opens no device context, imports no
torch, and can look at a child from outside. NVML counts GPUs in the order of the PCI bus and so does `cuda:N` here, as
nvidia-smi prints it; a child is pinned to the GPU's UUID, so CUDA's own order (fastest first) cannot mix them up.

Not here: what torch says of its device (a child tells, in `Description.device_facts`), budgets, and accelerators other
than NVIDIA's.
"""

import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from autofit.errors import DeviceError, UsageError
from autofit.records import Machine

ROOT = Path("/")

# Distributions that change what a step costs, where they are installed.
DISTRIBUTIONS = (
    *("torch", "transformers", "accelerate", "triton", "peft", "kernels"),
    *("flash-attn", "liger-kernel", "bitsandbytes", "deepspeed"),
)

_UNSUPPORTED = object()


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of one."""

    uuid: str | None  # None: it cannot be read, and the GPU cannot be used
    name: str
    total_bytes: int | None  # None where NVML does not tell
    shares_host_memory: bool = False  # it has none of its own (DGX Spark, Jetson)
    capability: tuple[int, int] | None = None
    instances: tuple["Gpu", ...] | None = None  # None: not in MIG mode

    @property
    def opened(self) -> "Gpu | None":
        """What CUDA opens for it: in MIG mode the first instance, since a process can open only one."""
        if self.instances is not None:
            return self.instances[0] if self.instances else None
        return self if self.uuid is not None else None


class Nvml:
    """What NVML says of the GPUs. What it does not support or permit is None."""

    def __init__(self, library: Any):
        """`library` is the initialised `pynvml` module, or something that answers like it."""
        self._library = library

    @classmethod
    def open(cls) -> "Nvml | None":
        """None where pynvml, the driver or its library is missing."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def driver(self) -> str | None:
        return self._ask("nvmlSystemGetDriverVersion")

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU of the machine or container in the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says."""
        handles = [self._ask("nvmlDeviceGetHandleByIndex", n) for n in range(self._ask("nvmlDeviceGetCount") or 0)]
        return tuple(self._gpu(handle) for handle in handles)

    def total_bytes(self, uuid: str) -> int | None:
        """What processes can share: less than the physical size by what driver and firmware reserve."""
        return self._memory(self._handle(uuid))[0]

    def used_bytes(self, uuid: str) -> int | None:
        """What all processes hold together."""
        return self._memory(self._handle(uuid))[1]

    def processes(self, uuid: str) -> tuple[tuple[int, int | None], ...] | None:
        """(process id, bytes with the context) of each process that has a context; None where NVML does not list them.

        Process ids are those of the host: in a container they may be unknown there, or none may be listed.
        """
        handle = self._handle(uuid)
        compute = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if compute is None:
            return None
        graphics = self._ask("nvmlDeviceGetGraphicsRunningProcesses", handle) or []
        held: dict[int, int | None] = {}
        for process in [*graphics, *compute]:  # one that draws and computes is in both lists, with the same bytes
            if held.get(process.pid) is None:
                held[process.pid] = process.usedGpuMemory
        return tuple(held.items())

    def process_bytes(self, uuid: str, pid: int) -> int | None:
        """What one process holds, its context included; None where it is not listed: without a context, or in a
        container that sees other process ids, or on a MIG instance.
        """
        return dict(self.processes(uuid) or ()).get(pid)

    def foreign_bytes(self, uuid: str, own_pids: Collection[int]) -> int | None:
        """What is held on the GPU by others than `own_pids`; all that is in use where `own_pids` is empty.

        None where not one of `own_pids` is listed with its bytes, since then theirs cannot be told from the others'.
        """
        used = self.used_bytes(uuid)
        if used is None or not own_pids:
            return used
        own = [held for pid, held in self.processes(uuid) or () if pid in own_pids]
        if not own or None in own:
            return None
        return max(0, used - sum(own))

    def _gpu(self, handle: Any, capability: tuple[int, int] | None = None) -> Gpu:
        """A MIG instance has its parent's `capability`, which NVML tells of the parent only."""
        if capability is None:
            answer = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
            capability = None if answer is None else tuple(answer)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, unsupported=_UNSUPPORTED)
        return Gpu(
            uuid=self._ask("nvmlDeviceGetUUID", handle),
            name=self._ask("nvmlDeviceGetName", handle) or "NVIDIA GPU",
            total_bytes=self._memory(handle)[0],
            shares_host_memory=memory is _UNSUPPORTED,
            capability=capability,
            instances=self._instances(handle, capability),
        )

    def _instances(self, handle: Any, capability: tuple[int, int] | None) -> tuple[Gpu, ...] | None:
        modes = self._ask("nvmlDeviceGetMigMode", handle)
        if modes is None or modes[0] != self._library.NVML_DEVICE_MIG_ENABLE:
            return None
        numbers = range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        handles = [self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in numbers]
        return tuple(self._gpu(instance, capability) for instance in handles if instance is not None)

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """(total, used). The first version of the call counts what the driver reserves as used."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, version=self._library.nvmlMemory_v2)
        if memory is not None:
            return memory.total - memory.reserved, memory.used
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return (memory.total, memory.used) if memory is not None else (None, None)

    def _handle(self, uuid: str) -> Any:
        return self._ask("nvmlDeviceGetHandleByUUID", uuid)

    def _ask(self, function: str, *arguments: Any, unsupported: Any = None, **options: Any) -> Any:
        """The answer of an NVML function; None for an error or an argument of None, which no earlier call answered."""
        if None in arguments:
            return None
        try:
            return getattr(self._library, function)(*arguments, **options)
        except self._library.NVMLError_NotSupported:
            return unsupported
        except (self._library.NVMLError, self._library.NVMLLibraryMismatchError):
            return None


def read_machine(
    device: str | None = None,
    *,
    open_nvml: Callable[[], Nvml | None] = Nvml.open,
    environ: Mapping[str, str] = os.environ,
    versions: Mapping[str, str] | None = None,
    root: Path = ROOT,
) -> Machine:
    """The machine as `device` sees it: `cpu`, `cuda` (the first visible GPU) or `cuda:N`.

    None is the first visible GPU where there is one and torch can use it, else the CPU. Sizes are totals, which stay;
    `available_device_bytes` and `available_host_bytes` tell of now. On the CPU, device and host memory are one. The
    keyword arguments replace what is read, `versions` the installed libraries.

    Raises UsageError for what is no device, and DeviceError where it is not here or cannot be measured.
    """
    index = _parse_device(device)
    versions = dict(read_versions() if versions is None else versions)
    gpu, driver = None, None
    if index is not None:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        gpu, driver = _find_gpu(device, index, open_nvml, visible, versions.get("torch", ""))
    host_bytes = total_host_bytes(root=root)
    device_bytes = host_bytes if gpu is None or gpu.shares_host_memory else gpu.total_bytes
    if device_bytes is None:
        raise DeviceError(f"the driver does not tell how much memory {gpu.name} has (nvidia-smi); use --device cpu")
    cpu_name = _cpu_name(root)
    return Machine(
        device="cpu" if gpu is None else f"cuda:{index}",
        device_name=cpu_name if gpu is None else gpu.name,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        cpu_name=cpu_name,
        cpu_count=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
        device_id=None if gpu is None else gpu.uuid,
        capability=None if gpu is None else gpu.capability,
        driver=driver,
    )


def read_versions() -> dict[str, str]:
    """Versions of Python, autofit and those of DISTRIBUTIONS that are installed, read without importing them."""
    versions = {"python": platform.python_version()}
    for name in ("hf-autofit", *DISTRIBUTIONS):
        try:
            versions[name.removeprefix("hf-")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs or MIG instances that CUDA would show, in its order, for this value of CUDA_VISIBLE_DEVICES.

    Entries are indices, UUIDs, or beginnings of UUIDs that fit only one. As in CUDA, the first entry that fits nothing
    ends the list, and a repeated one empties it.
    """
    if visible is None:
        return tuple(gpu.opened for gpu in gpus if gpu.opened is not None)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named_gpu(gpus, entry.strip())
        if gpu is None:
            break
        if gpu in chosen:
            return ()
        chosen.append(gpu)
    return tuple(chosen)


def total_host_bytes(*, root: Path = ROOT) -> int:
    """Host memory that the processes started from here can hold: all of it, or the tightest cgroup's limit."""
    return min([_meminfo(root, "MemTotal"), *(limit for _, limit in _cgroup_limits(root))])


def available_host_bytes(*, root: Path = ROOT) -> int:
    """What can still be allocated on the host now: what the kernel calls available, and the room in each cgroup.

    File pages that nobody has used of late count as room, as in the kubelet's working set: the kernel drops them first.
    """
    room = [_meminfo(root, "MemAvailable")]
    for folder, limit in _cgroup_limits(root):
        usage = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        stat = _read(folder / "memory.stat") or ""
        cached = _field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0  # v1, v2
        room.append(limit - max(0, usage - cached))
    return max(0, min(room))


def available_device_bytes(
    machine: Machine, *, open_nvml: Callable[[], Nvml | None] = Nvml.open, root: Path = ROOT
) -> int | None:
    """What can still be allocated on the machine's device now; None where NVML no longer answers."""
    if machine.device_id is None:
        return available_host_bytes(root=root)
    nvml = open_nvml()
    if nvml is None:
        return None
    with closing(nvml):
        used = nvml.used_bytes(machine.device_id)
        shared = used is None and any(gpu.shares_host_memory for gpu in nvml.gpus() if gpu.uuid == machine.device_id)
    if shared:
        return available_host_bytes(root=root)
    return None if used is None else max(0, machine.device_bytes - used)


def oom_kills(*, root: Path = ROOT) -> int | None:
    """Processes that the kernel killed for memory in this cgroup, ever; where it does not count, on the whole machine.

    Only a difference says anything. None where neither is counted.
    """
    for folder in _cgroup_folders(root):
        for name in ("memory.events", "memory.oom_control"):  # v2, v1
            kills = _field(_read(folder / name) or "", "oom_kill")
            if kills is not None:
                return kills
    return _field(_read(root / "proc/vmstat") or "", "oom_kill")


def tree_bytes(pid: int, *, root: Path = ROOT) -> int:
    """Resident host memory of the process and all that descends from it; 0 when it is gone.

    One process counts with its resident pages. Several share pages (forked DataLoader workers share the model), so that
    each counts with its proportional share; pages shared with processes outside the tree would then count in part, so
    the sum is never below the largest process. A share that cannot be read is replaced by the resident pages.
    """
    resident = {member: _resident_bytes(root, member) for member in process_tree(pid, root=root)}
    resident = {member: held for member, held in resident.items() if held}
    if len(resident) < 2:
        return sum(resident.values())
    return max(sum(_proportional_bytes(root, pid) or held for pid, held in resident.items()), *resident.values())


def process_tree(pid: int, *, root: Path = ROOT) -> list[int]:
    """The process and after it its descendants, from every process's parent: /proc/PID/task/TID/children is not everywhere."""
    children = defaultdict(list)
    for folder in (root / "proc").glob("[0-9]*"):
        stat = _read(folder / "stat")
        if stat:
            parent = stat.rpartition(")")[2].split()[1]  # the name in parentheses may hold anything
            children[int(parent)].append(int(folder.name))
    tree = [pid]
    for member in tree:
        tree += children[member]
    return tree


def private_bytes(pid: int, *, root: Path = ROOT) -> int | None:
    """Host memory that would be free if this one process were gone; None where it is, or the system does not tell."""
    told = _read(root / "proc" / str(pid) / "smaps_rollup") or ""
    kibibytes = [_field(told, name) for name in ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")]
    return None if None in kibibytes[:2] else sum(size or 0 for size in kibibytes) * 1024


def run_delay_seconds(pid: int | str = "self", *, root: Path = ROOT) -> float | None:
    """Time that the process's threads were ready to run and waited for a processor, summed since each began.

    Threads that ended no longer count. None where the process is gone or the kernel does not keep these figures
    (then all three in /proc/PID/task/TID/schedstat are 0: run time, delay in nanoseconds, time slices).
    """
    lines = [_read(task / "schedstat") for task in (root / "proc" / str(pid) / "task").glob("[0-9]*")]
    figures = [[int(word) for word in line.split()] for line in lines if line]
    if not any(any(line) for line in figures):
        return None
    return sum(line[1] for line in figures) / 1e9


def _parse_device(device: str | None) -> int | None:
    """Index of the GPU; None for the CPU. No device given is the first GPU."""
    if device is None or device == "cuda":
        return 0
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda:(\d+)", device)
    if match:
        return int(match.group(1))
    if re.fullmatch(r"(xpu|mps)(:\d+)?", device):
        raise DeviceError(f"{device} is not measured yet; use --device cuda or --device cpu")
    raise UsageError(f"{device!r} is not a device; write cpu, cuda or cuda:N")


def _find_gpu(
    device: str | None, index: int, open_nvml: Callable[[], Nvml | None], visible: str | None, torch_version: str
) -> tuple[Gpu | None, str | None]:
    """(GPU, driver); a GPU of None is the CPU, given only where no device was asked for."""
    found: tuple[Gpu, ...] = ()
    driver = None
    nvml = open_nvml()
    if nvml is not None:
        with closing(nvml):
            found, driver = visible_gpus(nvml.gpus(), visible), nvml.driver()
    cpu_build = torch_version.endswith("+cpu")
    if index < len(found) and not cpu_build:
        return found[index], driver
    if device is None:
        return None, None
    if nvml is None:
        raise DeviceError(f"{device} needs an NVIDIA driver and none answers here (nvidia-smi); use --device cpu")
    if not found and visible is not None:
        raise DeviceError(f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU for {device}; unset it or use --device cpu")
    if not found:
        raise DeviceError(f"{device} is not here: the driver lists no usable GPU (nvidia-smi -L); use --device cpu")
    if index >= len(found):
        names = ", ".join(f"cuda:{number} {gpu.name}" for number, gpu in enumerate(found))
        raise DeviceError(f"{device} is not here; visible: {names}")
    raise DeviceError(f"torch {torch_version} is built without CUDA; install its CUDA build or use --device cpu")


def _named_gpu(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    if entry.startswith(("GPU-", "MIG-")):
        everything = [*gpus, *(instance for gpu in gpus for instance in gpu.instances or ())]
        fitting = [gpu for gpu in everything if gpu.uuid is not None and gpu.uuid.startswith(entry)]
        return fitting[0].opened if len(fitting) == 1 else None
    number = re.match(r"\+?\d+", entry)  # CUDA reads as far as there are digits
    return gpus[int(number.group())].opened if number and int(number.group()) < len(gpus) else None


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders that may hold this process's memory figures: its own cgroup first, then each one above it.

    In a container without a cgroup namespace the path is the host's and its lower folders do not exist here; the walk
    upwards ends at the mount, which is the container's own cgroup.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified")  # version 2, alone or beside version 1
        elif "memory" in controllers.split(","):
            mounts = ("sys/fs/cgroup/memory",)
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        for mount in mounts:
            for depth in range(len(names), -1, -1):
                yield (root / mount).joinpath(*names[:depth])


def _cgroup_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """(folder, limit in bytes) of each level that has one. Version 1 writes `no limit` as almost 2⁶³."""
    for folder in _cgroup_folders(root):
        limit = _number(folder / "memory.max")
        if limit is None:
            limit = _number(folder / "memory.limit_in_bytes")
        if limit is not None:
            yield folder, limit


def _meminfo(root: Path, name: str) -> int:
    kibibytes = _field(_read(root / "proc/meminfo") or "", f"{name}:")
    if kibibytes is None:
        raise DeviceError(f"/proc/meminfo does not tell {name}; autofit measures on Linux only")
    return kibibytes * 1024


def _cpu_name(root: Path) -> str:
    """The processor's name; ARM kernels give none, and the architecture stands for it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo") or "", re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def _resident_bytes(root: Path, pid: int) -> int | None:
    statm = _read(root / "proc" / str(pid) / "statm")
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm else None


def _proportional_bytes(root: Path, pid: int) -> int | None:
    kibibytes = _field(_read(root / "proc" / str(pid) / "smaps_rollup") or "", "Pss:")
    return None if kibibytes is None else kibibytes * 1024


def _field(text: str, name: str) -> int | None:
    """The number after `name` at the beginning of a line."""
    match = re.search(rf"^{re.escape(name)}\s+(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    """None where the file is missing, may not be read, or belongs to a process that ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return None
