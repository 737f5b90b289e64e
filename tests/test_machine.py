"""The machine is read through NVML, /proc and /sys: here from a made library, made trees, and real children."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pynvml
import pytest

from autofit import codec, machine
from autofit.errors import DeviceError, UsageError
from autofit.machine import Nvml, read_machine, visible_gpus
from autofit.records import Machine

MIB, GIB = 2**20, 2**30
PAGE = os.sysconf("SC_PAGE_SIZE")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cu130", "transformers": "5.24.0"}


@dataclass(eq=False)
class Card:
    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    total: int = 80 * GIB
    reserved: int = 1 * GIB
    used: int = 3 * GIB
    capability: tuple[int, int] = (8, 0)
    instances: list["Card"] | None = None
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)  # function -> NVML error code


class FakeLibrary:
    """Answers like pynvml, for made cards."""

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, *cards):
        self.cards = cards
        self.shut_down = False

    def _check(self, card, function):
        if function in card.refused:
            raise pynvml.NVMLError(card.refused[function])

    def nvmlShutdown(self):
        self.shut_down = True

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._check(self.cards[index], "nvmlDeviceGetHandleByIndex")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            for candidate in (card, *(card.instances or [])):
                if candidate.uuid == uuid:
                    return candidate
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, card):
        self._check(card, "nvmlDeviceGetUUID")
        return card.uuid

    def nvmlDeviceGetName(self, card):
        self._check(card, "nvmlDeviceGetName")
        return card.name

    def nvmlDeviceGetCudaComputeCapability(self, card):
        self._check(card, "nvmlDeviceGetCudaComputeCapability")
        return card.capability

    def nvmlDeviceGetMigMode(self, card):
        if card.instances is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index):
        if index >= len(card.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.instances[index]

    def nvmlDeviceGetMemoryInfo(self, card, version=None):
        self._check(card, "nvmlDeviceGetMemoryInfo")
        if version is None:
            return SimpleNamespace(total=card.total, used=card.used + card.reserved)
        self._check(card, "nvmlDeviceGetMemoryInfo_v2")
        return SimpleNamespace(total=card.total, reserved=card.reserved, used=card.used)

    def _processes(self, card, listed):
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in listed]

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        if "mismatch" in card.refused:
            raise pynvml.NVMLLibraryMismatchError("versions differ")
        self._check(card, "nvmlDeviceGetComputeRunningProcesses")
        return self._processes(card, card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        self._check(card, "nvmlDeviceGetGraphicsRunningProcesses")
        return self._processes(card, card.graphics)


A, B = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000"
SLICES = ["MIG-1111aaaa-0000", "MIG-2222bbbb-0000"]


def nvml(*cards):
    return Nvml(FakeLibrary(*cards))


def mig_card(uuid=A):
    name = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    no_capability = {"nvmlDeviceGetCudaComputeCapability": pynvml.NVML_ERROR_NOT_SUPPORTED}
    instances = [Card(u, name, 10 * GIB, reserved=0, used=1 * GIB, refused=no_capability) for u in SLICES]
    return Card(uuid, instances=instances)


def read(device, *cards, environ=None, versions=VERSIONS):
    return read_machine(device, open_nvml=lambda: nvml(*cards), environ=environ or {}, versions=versions)


def write(root, files):
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


# GPUs


def test_the_first_gpu_is_the_machine_when_none_is_named():
    found = read(None, Card(A), Card(B))
    assert (found.device, found.device_id, found.device_name) == ("cuda:0", A, "NVIDIA A100-SXM4-80GB")
    assert (found.capability, found.driver, found.versions) == ((8, 0), "580.65.06", VERSIONS)
    assert found.device_bytes == 79 * GIB  # without what the driver reserves, with what others use


def test_a_numbered_gpu_is_found():
    assert read("cuda:1", Card(A), Card(B)).device_id == B
    assert read("cuda", Card(A), Card(B)).device == "cuda:0"


def test_the_cpu_is_the_machine_where_there_is_no_gpu_and_where_it_is_asked_for():
    assert read(None).device == "cpu"
    assert read_machine(None, open_nvml=lambda: None, versions=VERSIONS).device == "cpu"
    found = read("cpu", Card(A))
    assert (found.device, found.device_id, found.capability, found.driver) == ("cpu", None, None, None)
    assert found.device_bytes == found.host_bytes > 0


def test_the_cpu_is_asked_for_without_opening_nvml():
    def refuse():
        raise AssertionError("NVML was opened")

    assert read_machine("cpu", open_nvml=refuse).device == "cpu"


def test_nvml_is_closed_again():
    library = FakeLibrary(Card(A))
    read_machine("cuda", open_nvml=lambda: Nvml(library), environ={}, versions=VERSIONS)
    assert library.shut_down


def test_a_torch_without_cuda_leaves_the_cpu_and_is_told_when_cuda_is_asked_for():
    versions = {"torch": "2.13.0+cpu"}
    assert read(None, Card(A), versions=versions).device == "cpu"
    with pytest.raises(DeviceError, match=r"2\.13\.0\+cpu is built without CUDA; .*--device cpu"):
        read("cuda", Card(A), versions=versions)


@pytest.mark.parametrize("device", ["xpu", "xpu:0", "mps"])
def test_other_accelerators_are_refused_as_not_measured_yet(device):
    with pytest.raises(DeviceError, match=rf"^{device} is not measured yet; use --device"):
        read(device, Card(A))


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "", "CPU", "0"])
def test_what_is_no_device_is_a_usage_error(device):
    with pytest.raises(UsageError, match="write cpu, cuda or cuda:N"):
        read(device, Card(A))


@pytest.mark.parametrize(
    ("open_nvml", "environ", "message"),
    [
        (lambda: None, {}, "cuda:2 needs an NVIDIA driver and none answers here .*; use --device cpu"),
        (lambda: nvml(), {}, "cuda:2 is not here: the driver lists no usable GPU .*; use --device cpu"),
        (lambda: nvml(Card(A), Card(B)), {}, "cuda:2 is not here; visible: cuda:0 NVIDIA .*, cuda:1 NVIDIA"),
        (lambda: nvml(Card(A)), {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES=7 leaves no GPU .*; unset it"),
    ],
)
def test_a_missing_gpu_is_one_line_with_the_way_out(open_nvml, environ, message):
    with pytest.raises(DeviceError, match=message) as info:
        read_machine("cuda:2", open_nvml=open_nvml, environ=environ, versions=VERSIONS)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B]),
        ("0", [A]),
        ("1,0", [B, A]),
        (" 1 , 0 ", [B, A]),
        ("1gpu", [B]),
        (B, [B]),
        ("GPU-b", [B]),
        ("GPU-b,GPU-a", [B, A]),
        ("GPU-", []),  # fits both
        ("GPU-cccc", []),
        ("", []),
        ("-1", []),
        ("0,-1,1", [A]),
        ("0,5,1", [A]),
        ("0,0", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_respected(visible, expected):
    assert [gpu.uuid for gpu in visible_gpus(nvml(Card(A), Card(B)).gpus(), visible)] == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [SLICES[0], B]),
        ("0", [SLICES[0]]),
        ("1", [B]),
        (A, [SLICES[0]]),
        (SLICES[1], [SLICES[1]]),
        ("MIG-2222", [SLICES[1]]),
        ("MIG-", []),
    ],
)
def test_in_mig_mode_instances_stand_for_the_gpu(visible, expected):
    assert [gpu.uuid for gpu in visible_gpus(nvml(mig_card(), Card(B)).gpus(), visible)] == expected


def test_a_mig_instance_has_its_own_size_and_its_parents_capability():
    found = read("cuda", mig_card(), environ={"CUDA_VISIBLE_DEVICES": SLICES[1]})
    assert (found.device_id, found.device_bytes, found.capability) == (SLICES[1], 10 * GIB, (8, 0))
    assert found.device_name.endswith("MIG 1g.10gb")


def test_a_gpu_in_mig_mode_without_an_instance_cannot_be_used():
    assert visible_gpus(nvml(Card(A, instances=[]), Card(B)).gpus(), None)[0].uuid == B
    assert visible_gpus(nvml(Card(A, instances=[]), Card(B)).gpus(), "0,1") == ()


def test_visible_numbers_are_counted_after_cuda_visible_devices():
    found = read("cuda:0", Card(A), Card(B), environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert (found.device, found.device_id) == ("cuda:0", B)


def test_a_lost_gpu_keeps_its_number_and_cannot_be_used():
    lost = Card(A, refused={"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST})
    gpus = nvml(lost, Card(B)).gpus()
    assert [gpu.uuid for gpu in visible_gpus(gpus, "1")] == [B]
    assert visible_gpus(gpus, "0") == ()


def test_a_gpu_that_shares_the_hosts_memory_has_the_hosts_size():
    spark = Card(A, "NVIDIA GB10", refused={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED})
    found = read("cuda", spark)
    assert found.device_bytes == found.host_bytes
    available = machine.available_device_bytes(found, open_nvml=lambda: nvml(spark))
    assert 0 < available <= found.host_bytes


def test_a_gpu_that_stops_answering_has_not_the_hosts_memory():
    found = read("cuda", Card(A))
    spark = Card(B, "NVIDIA GB10", refused={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED})
    lost = Card(A, refused={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST})
    assert machine.available_device_bytes(found, open_nvml=lambda: nvml(lost, spark)) is None


def test_a_gpu_of_unknown_size_is_refused():
    hidden = Card(A, refused={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NO_PERMISSION})
    with pytest.raises(DeviceError, match="does not tell how much memory"):
        read("cuda", hidden)


def test_available_device_bytes_are_what_nobody_uses():
    card = Card(A, used=3 * GIB)
    found = read("cuda", card)
    assert machine.available_device_bytes(found, open_nvml=lambda: nvml(card)) == 76 * GIB
    assert machine.available_device_bytes(found, open_nvml=lambda: nvml()) is None
    assert machine.available_device_bytes(found, open_nvml=lambda: None) is None


# NVML


def test_nvml_is_none_where_the_driver_is_missing(monkeypatch):
    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert Nvml.open() is None


def test_nvml_is_none_where_its_library_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml.open() is None


def test_memory_is_without_what_the_driver_reserves():
    assert nvml(Card(A)).total_bytes(A) == 79 * GIB
    assert nvml(Card(A)).used_bytes(A) == 3 * GIB


def test_an_old_driver_counts_what_it_reserves_as_used():
    old = Card(A, refused={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
    assert (nvml(old).total_bytes(A), nvml(old).used_bytes(A)) == (80 * GIB, 4 * GIB)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_what_nvml_refuses_is_none(code):
    functions = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetName"]
    refusing = nvml(Card(A, refused=dict.fromkeys([*functions, "nvmlDeviceGetCudaComputeCapability"], code)))
    assert refusing.total_bytes(A) is None and refusing.used_bytes(A) is None
    assert refusing.processes(A) is None
    assert refusing.process_bytes(A, 10) is None and refusing.foreign_bytes(A, {10}) is None
    assert refusing.gpus()[0].capability is None and refusing.gpus()[0].name


def test_an_unknown_gpu_is_none():
    there = nvml(Card(A))
    assert there.used_bytes("GPU-none") is None and there.processes("GPU-none") is None
    assert there.foreign_bytes("GPU-none", ()) is None


def test_a_library_older_than_its_binding_is_none():
    assert nvml(Card(A, refused={"mismatch": 0})).processes(A) is None


def test_a_process_that_draws_and_computes_is_listed_once():
    card = Card(A, compute=[(10, 2 * GIB), (11, None), (13, None)], graphics=[(10, 2 * GIB), (12, 5 * MIB), (13, GIB)])
    assert dict(nvml(card).processes(A)) == {10: 2 * GIB, 11: None, 12: 5 * MIB, 13: GIB}
    assert len(nvml(card).processes(A)) == 4


def test_a_process_that_is_not_listed_is_unknown():
    there = nvml(Card(A, compute=[(10, 2 * GIB), (11, None)]))
    assert there.process_bytes(A, 10) == 2 * GIB
    assert there.process_bytes(A, 11) is None
    assert there.process_bytes(A, 99) is None


@pytest.mark.parametrize(
    ("compute", "own", "expected"),
    [
        ([(10, 2 * GIB)], {10}, 1 * GIB),  # held by a process that is not listed
        ([(10, 2 * GIB), (20, 1 * GIB)], {10}, 1 * GIB),
        ([(10, 2 * GIB), (20, 1 * GIB)], {10, 20, 30}, 0),
        ([(10, 5 * GIB)], {10}, 0),
        ([(10, 2 * GIB)], set(), 3 * GIB),
        ([], set(), 3 * GIB),
        ([(4711, 2 * GIB)], {10}, None),  # a container: 4711 may be 10
        ([(10, None)], {10}, None),
    ],
)
def test_foreign_bytes_are_what_others_hold(compute, own, expected):
    assert nvml(Card(A, used=3 * GIB, compute=compute)).foreign_bytes(A, own) == expected


# The host


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1000 kB\nMemAvailable:    8388608 kB\n"
NO_LIMIT_V1 = "9223372036854771712\n"


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path):
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert machine.total_host_bytes(root=root) == 16 * GIB
    assert machine.available_host_bytes(root=root) == 8 * GIB


def test_the_tightest_level_of_a_version_2_tree_is_the_limit(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user.slice/job/step\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user.slice/job/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/user.slice/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 5\n",
            "sys/fs/cgroup/user.slice/job/step/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/user.slice/job/step/memory.current": f"{5 * GIB}\n",
        },
    )
    assert machine.total_host_bytes(root=root) == 4 * GIB
    assert machine.available_host_bytes(root=root) == 1 * GIB  # of the step; the job has 3, its file pages given back


def test_a_version_1_tree_is_read_and_no_limit_is_none(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    }
    root = write(tmp_path, files)
    assert machine.total_host_bytes(root=root) == 2 * GIB
    assert machine.available_host_bytes(root=root) == 1 * GIB
    write(tmp_path, {"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": NO_LIMIT_V1})
    assert machine.total_host_bytes(root=root) == 16 * GIB
    assert machine.available_host_bytes(root=root) == 8 * GIB


def test_a_container_finds_its_limit_at_the_mount_though_the_path_is_the_hosts(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/system.slice/docker-abc.scope\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
        },
    )
    assert machine.total_host_bytes(root=root) == GIB


def test_an_outside_cgroup_path_does_not_leave_the_mount(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/../other\n",
            "sys/fs/memory.max": "1\n",
            "sys/fs/cgroup/cgroup.procs": "",
        },
    )
    assert machine.total_host_bytes(root=root) == 16 * GIB


def test_a_full_cgroup_has_nothing_available(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{GIB + 4096}\n",
        },
    )
    assert machine.available_host_bytes(root=root) == 0


def test_file_pages_never_make_more_room_than_the_limit(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{8 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"inactive_file {9 * MIB}\n",  # read a moment later
        },
    )
    assert machine.available_host_bytes(root=root) == GIB


def test_a_host_without_proc_is_refused(tmp_path):
    with pytest.raises(DeviceError, match="Linux"):
        machine.total_host_bytes(root=tmp_path)


def test_this_host_has_room():
    assert 0 < machine.available_host_bytes() <= machine.total_host_bytes()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/a/b/memory.events": "low 0\noom 9\noom_kill 3\noom_group_kill 1\n"}, 3),
        ({"sys/fs/cgroup/a/b/memory.events": "oom_kill 0\n", "sys/fs/cgroup/a/memory.events": "oom_kill 5\n"}, 0),
        ({"sys/fs/cgroup/a/memory.events": "oom_kill 5\n"}, 5),
        ({"sys/fs/cgroup/memory/c/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"}, 7),
        ({"proc/vmstat": "nr_free_pages 1\noom_kill 2\n"}, 2),
        ({"sys/fs/cgroup/a/b/memory.events": "low 0\n", "proc/vmstat": "oom_kill 2\n"}, 2),
        ({"proc/vmstat": "nr_free_pages 1\n"}, None),
        ({}, None),
    ],
)
def test_kills_are_counted_in_the_nearest_cgroup_that_counts(tmp_path, files, expected):
    root = write(tmp_path, {"proc/self/cgroup": "4:memory:/c\n0::/a/b\n", **files})
    assert machine.oom_kills(root=root) == expected


def process(pid, parent, pages, pss_kib=None, name="python"):
    files = {
        f"proc/{pid}/stat": f"{pid} ({name}) S {parent} {pid} 0\n",
        f"proc/{pid}/statm": f"999 {pages} 1 1 0 1 0\n",
    }
    if pss_kib is not None:
        files[f"proc/{pid}/smaps_rollup"] = f"00400000-7fff ---p 00000000 [rollup]\nRss: 1 kB\nPss:  {pss_kib} kB\n"
    return files


def test_one_process_counts_with_its_resident_pages(tmp_path):
    root = write(tmp_path, {**process(10, 1, pages=500, pss_kib=8), **process(11, 1, pages=70)})
    assert machine.tree_bytes(10, root=root) == 500 * PAGE


def test_several_count_with_their_shares_and_grandchildren_belong(tmp_path):
    root = write(
        tmp_path,
        {
            **process(10, 1, pages=5, pss_kib=4000),
            **process(11, 10, pages=5, pss_kib=300, name="a) S 99 (b"),
            **process(12, 11, pages=5, pss_kib=20),
            **process(13, 1, pages=5, pss_kib=1),
        },
    )
    assert machine.tree_bytes(10, root=root) == 4320 * 1024


def test_resident_pages_stand_for_a_share_that_cannot_be_read(tmp_path):
    root = write(tmp_path, {**process(10, 1, pages=5, pss_kib=4000), **process(11, 10, pages=50)})
    assert machine.tree_bytes(10, root=root) == 4000 * 1024 + 50 * PAGE


def test_a_tree_is_never_smaller_than_its_largest_process(tmp_path):
    root = write(tmp_path, {**process(10, 1, pages=10_000, pss_kib=8), **process(11, 10, pages=10, pss_kib=8)})
    assert machine.tree_bytes(10, root=root) == 10_000 * PAGE


def test_a_process_that_vanishes_meanwhile_is_skipped(tmp_path):
    root = write(tmp_path, {**process(10, 1, pages=500), **process(11, 10, pages=70)})
    (root / "proc/11/statm").unlink()
    assert machine.tree_bytes(10, root=root) == 500 * PAGE
    (root / "proc/12").mkdir()  # gone before its parent could be read
    assert machine.tree_bytes(10, root=root) == 500 * PAGE
    assert machine.tree_bytes(77, root=root) == 0


def test_a_dead_child_that_nobody_collected_leaves_its_parent_alone(tmp_path):
    root = write(tmp_path, {**process(10, 1, pages=500, pss_kib=8), **process(11, 10, pages=0, pss_kib=0)})
    assert machine.tree_bytes(10, root=root) == 500 * PAGE


@contextmanager
def child(code):
    """A real Python child that has printed a line and waits."""
    arguments = [sys.executable, "-c", code + "\nprint('ready', flush=True)\ninput()\n"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout.readline() == "ready\n"
            yield running.pid
        finally:
            running.kill()


def test_a_real_child_that_holds_50_mb_is_seen():
    with child("") as empty, child("data = b'x' * 50_000_000") as full:
        growth = machine.tree_bytes(full) - machine.tree_bytes(empty)
        assert 49_000_000 < growth < 60_000_000


def test_a_real_grandchild_is_seen():
    inner = "data = b'x' * 50_000_000; print('ready', flush=True); input()"
    code = (
        "import subprocess, sys\n"
        f"inner = subprocess.Popen([sys.executable, '-c', {inner!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "inner.stdout.readline()"
    )
    with child(code) as outer:
        assert machine.tree_bytes(outer) > 50_000_000


def test_real_shared_pages_are_counted_once():
    code = "import os, time\ndata = b'x' * 100_000_000\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)"
    with child(code) as parent:
        members = machine.process_tree(parent)
        assert len(members) == 2
        assert sum(machine._resident_bytes(machine.ROOT, pid) for pid in members) > 200_000_000
        try:
            assert 100_000_000 < machine.tree_bytes(parent) < 150_000_000
        finally:
            os.kill(members[1], 9)


def test_a_real_process_that_ended_is_nothing():
    with child("") as pid:
        assert machine.tree_bytes(pid) > 0
    assert machine.tree_bytes(pid) == 0
    assert machine.run_delay_seconds(pid) is None


def test_delays_of_all_threads_are_summed(tmp_path):
    files = {"proc/10/task/10/schedstat": "900 1500000000 3\n", "proc/10/task/11/schedstat": "800 250000000 2\n"}
    root = write(tmp_path, files)
    (root / "proc/10/task/12").mkdir()  # ended meanwhile
    assert machine.run_delay_seconds(10, root=root) == 1.75


def test_a_kernel_that_keeps_no_delays_is_unknown(tmp_path):
    root = write(tmp_path, {"proc/10/task/10/schedstat": "0 0 0\n", "proc/11/task/11/other": ""})
    assert machine.run_delay_seconds(10, root=root) is None
    assert machine.run_delay_seconds(11, root=root) is None
    assert machine.run_delay_seconds(12, root=root) is None


def test_two_real_processes_on_one_processor_delay_each_other():
    if machine.run_delay_seconds() is None:
        pytest.skip("this kernel keeps no delays")
    before = os.sched_getaffinity(0)
    spin = [sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"]
    try:
        os.sched_setaffinity(0, {min(before)})
        with subprocess.Popen(spin, stdout=subprocess.PIPE) as rival:
            try:
                rival.stdout.readline()
                start, since = machine.run_delay_seconds(), time.monotonic()
                while time.monotonic() - since < 0.4:
                    pass
                assert machine.run_delay_seconds() - start > 0.05
                assert machine.run_delay_seconds(rival.pid) > 0.05
            finally:
                rival.kill()
    finally:
        os.sched_setaffinity(0, before)


# Identity


def test_the_processor_is_named_and_an_arm_kernel_gives_the_architecture(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t: fpu\n"}
    assert read_machine("cpu", root=write(tmp_path, files)).cpu_name == "AMD EPYC 9654"
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd0c\n"})
    assert read_machine("cpu", root=tmp_path).cpu_name == os.uname().machine


def test_versions_are_those_of_the_installed_libraries():
    torch = pytest.importorskip("torch")
    versions = machine.read_versions()
    assert versions["torch"] == torch.__version__
    assert {"python", "autofit", "transformers", "accelerate"} <= set(versions)


def test_a_machine_survives_the_codec():
    found = read("cuda", Card(A))
    assert codec.decode(codec.encode(found), Machine, "test") == found


def test_the_key_is_the_same_in_another_process_and_while_memory_comes_and_goes(tmp_path):
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    first = read_machine("cpu", root=root)
    write(tmp_path, {"proc/meminfo": MEMINFO.replace("8388608", "4194304").replace("16777216", "16777180")})
    assert read_machine("cpu", root=root).key == first.key

    code = "from autofit.machine import read_machine; print(read_machine('cpu').key)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == read_machine("cpu").key


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"device_name": "NVIDIA H100"},
        {"device_bytes": 40 * GIB},
        {"host_bytes": 3 * GIB},
        {"capability": (9, 0)},
        {"driver": "535.1"},
        {"cpu_name": "another"},
        {"cpu_count": 1000},
        {"versions": {**VERSIONS, "torch": "2.12.0"}},
    ],
)
def test_the_key_differs_where_measurements_may(change):
    found = read("cuda", Card(A))
    assert replace(found, **change).key != found.key


@pytest.mark.parametrize("change", [{"device": "cuda:1"}, {"device_id": B}, {"system": "Linux 7"}])
def test_the_key_is_the_same_for_an_equal_card(change):
    found = read("cuda", Card(A))
    assert replace(found, **change).key == found.key


def test_reading_the_machine_imports_no_torch():
    code = "import sys; from autofit.machine import read_machine; read_machine(); print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
