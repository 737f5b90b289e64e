"""Memory that cuBLAS works in, which torch takes from its own caching allocator at the first matrix product.

Not here: how many there are (one per handle and stream), and when they appear in a run.
"""

import os
import re
from collections.abc import Mapping

_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
_MIB = 2**20


def cublas_workspace_bytes(capability: tuple[int, int], environ: Mapping[str, str] = os.environ) -> int:
    """Bytes of one workspace on a card of this compute capability.

    torch asks its allocator for as much as cuBLAS would take by itself, two buffers of 4096 KiB and eight of 16 KiB,
    8.125 MiB, and for 32 MiB from capability 9.0 on (`parseChosenWorkspaceSize` in
    aten/src/ATen/cuda/CublasHandlePool.cpp: majors 9, 10 and 12; former versions only 9.0, so that they take 8.125 MiB
    on newer cards). Memory snapshots show blocks of 8519680 bytes, which is 8.125 MiB.

    CUBLAS_WORKSPACE_CONFIG replaces the default: the sum over all `:SIZE:COUNT` in it, sizes in KiB, so `:4096:8` is
    eight buffers of 4096 KiB. torch warns of a text without any such pair and keeps the default.
    """
    buffers = re.findall(r":([0-9]+):([0-9]+)", environ.get(_CONFIG, ""))
    if buffers:
        return sum(int(size_kib) * 1024 * int(count) for size_kib, count in buffers)
    return 32 * _MIB if capability >= (9, 0) else 2 * 4096 * 1024 + 8 * 16 * 1024
