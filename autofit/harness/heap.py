"""Bytes of host memory that this process has in use, as its allocators count them, not as the system does.

Resident memory swings by 20 MB between equal evaluations of a small model, since malloc keeps what is freed. What malloc has
given out repeats to 5 kB per evaluation and 4 kB per step (seven kinds of workloads, two seeds each). Small Python objects
lie in arenas of their own, and are told by their number. Not here: mapped files, shared and pinned memory.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

BLOCK_BYTES = 64  # of a small Python object: a float takes 24, the mean of those that transformers makes is 95
MiB = 2**20


def heap_bytes() -> int | None:
    """In use by all threads of this process; None where malloc is not glibc's, or too old to tell. Takes 0.1 ms."""
    information = _mallinfo()
    if information is None:
        return None
    return _given_out(information()) + BLOCK_BYTES * sys.getallocatedblocks()


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _given_out(told: _Mallinfo2) -> int:
    return told.uordblks + told.hblkhd


@functools.cache
def _mallinfo() -> Callable[[], _Mallinfo2] | None:
    """glibc's `mallinfo2`, where it sees what is allocated; another malloc may have taken its place."""
    library = ctypes.CDLL(None)
    try:
        information = library.mallinfo2
        information.restype = _Mallinfo2
        before = _given_out(information())
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        block = library.malloc(MiB)
        grown = _given_out(information()) - before
        library.free(block)
    except AttributeError:
        return None
    return information if grown >= MiB else None
