"""PyTorch's CUDA caching allocator, simulated: how many bytes a sequence of allocations and frees reserves.

A device runs out of memory by what the allocator *reserves*, and that depends on the order of events: blocks are rounded,
cut from segments, given out again by best fit, and segments return to the driver only when an allocation fails. The
rules are those of c10/cuda/CUDACachingAllocator.cpp, whose names the constants below carry.

Covered: one device and one stream, both pools, splitting and merging, `max_split_size_mb`, `roundup_power2_divisions`,
`expandable_segments`, and a cap. Not covered: events and other streams, graph pools, garbage collection by threshold,
`large_segment_size_mb` and `max_non_split_rounding_mb` other than their defaults, and the address space of an expandable
segment, which has no end here and 9/8 of the device there.

Addresses only break ties between free blocks of one size. New segments get increasing ones in order of creation, which is
close enough to what the driver does; it may also reuse addresses that were released.

Sizes within are multiples of 512 bytes. A pool keeps its free blocks as a sorted list of integers, size above address, so
that best fit is one bisection.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.errors import UsageError

MIB = 1 << 20
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: segments of medium requests, pages, and the slack of oversize blocks
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment is made for the request
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge

# The variables that hold settings, the one that counts first: torch reads the first that is set, be it empty.
SETTING_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MOST_DIVISIONS = 1 << 32  # more leave every size that there is as it is, and would overflow

_ADDRESS_BITS = 50  # addresses stay below a pebibyte: far above what any sequence of segments adds up to
_NO_LIMIT = 1 << 62
_LARGE_BASE = 1 << (_ADDRESS_BITS - 1)  # where the large pool's expandable segment begins; the small one's begins at 0
_PAGES = 1 << 22  # of an expandable segment's address range: without end for every device there is
_IN_USE, _UNMAPPED = 0, -1  # what `key` says of a block that is not free


@dataclass(frozen=True)
class AllocatorSettings:
    """What `PYTORCH_ALLOC_CONF` and the memory fraction say. None is PyTorch's default: no limit, no such rounding.

    cap_bytes counts what is reserved. PyTorch holds its memory fraction against the segment that a request would need,
    so that an expandable segment's last page can pass it by less than 20 MiB; here the cap is what the device has, and
    holds exactly.
    """

    cap_bytes: int | None = None
    max_split_bytes: int | None = None  # max_split_size_mb, at least 20 MiB
    roundup_power2_divisions: int | None = None  # one number for all sizes, a power of two; 0 and 1 do nothing
    expandable_segments: bool = False

    def __post_init__(self):
        if self.max_split_bytes is not None and self.max_split_bytes < LARGE_SEGMENT_BYTES:
            raise ValueError(f"max_split_bytes is {self.max_split_bytes}: PyTorch takes {LARGE_SEGMENT_BYTES} or more")
        divisions = self.roundup_power2_divisions or 0
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError(f"roundup_power2_divisions is {divisions}: PyTorch takes powers of two, or 0 for none")


def set_variable(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """(name, value) of the variable that PyTorch would read; None where there is none, or nothing in it."""
    name = next((name for name in SETTING_VARIABLES if name in environ), None)
    return (name, environ[name]) if name is not None and environ[name].strip() else None


def settings_from(environ: Mapping[str, str]) -> AllocatorSettings:
    """What the environment says, as PyTorch reads it; keys that nothing here models are passed over. Raises UsageError."""
    found = set_variable(environ)
    if found is None:
        return AllocatorSettings()
    variable, text = found
    max_split = divisions = None
    expandable = False
    for part in re.split(r",(?![^\[]*\])", "".join(text.split())):  # not at the commas of a list
        name, colon, value = part.partition(":")
        if not part:
            continue
        if not colon or not value:
            raise UsageError(f"{variable}: {part!r} is no setting; write name:value, or unset {variable}")
        if name == "expandable_segments":
            if value not in ("True", "False"):
                raise UsageError(
                    f"{variable}: expandable_segments is {value!r}; write True or False, as PyTorch reads it"
                )
            expandable = value == "True"
        elif name == "max_split_size_mb":
            max_split = _number(variable, name, value) * MIB
            if max_split < LARGE_SEGMENT_BYTES:
                least = LARGE_SEGMENT_BYTES // MIB
                raise UsageError(f"{variable}: max_split_size_mb is {value}; PyTorch takes {least} or more")
        elif name == "roundup_power2_divisions":
            if value.startswith("["):
                raise UsageError(
                    f"{variable}: roundup_power2_divisions by size is not modelled; write one number for all sizes, such "
                    f"as roundup_power2_divisions:4, or unset {variable}"
                )
            divisions = _number(variable, name, value)
            if divisions & (divisions - 1):
                raise UsageError(
                    f"{variable}: roundup_power2_divisions is {value}; PyTorch takes powers of two, or 0 for none"
                )
            divisions = min(divisions, _MOST_DIVISIONS)
    return AllocatorSettings(
        max_split_bytes=max_split, roundup_power2_divisions=divisions, expandable_segments=expandable
    )


def _number(variable: str, name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(f"{variable}: {name} is {text!r}; write a whole number")
    return int(text)


class AllocatorOutOfMemory(Exception):
    """The cap leaves no room, also after everything that could be released was released."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int):
        super().__init__(
            f"no room for {requested_bytes} bytes with {allocated_bytes} allocated and {reserved_bytes} reserved"
        )
        self.requested_bytes = requested_bytes  # after rounding
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class Block:
    """A piece of a segment, and what `Allocator.allocate` hands out. Its size may exceed what was asked for."""

    __slots__ = ("size", "address", "key", "prev", "next", "pool")

    def __init__(self, size: int, address: int, key: int, prev: Any, next: Any, pool: Any):
        self.size = size  # bytes
        self.address = address
        self.key = key  # of a free block: its place in the pool's order; else _IN_USE or _UNMAPPED
        self.prev = prev  # neighbours by address within the segment, or the allocator's edge
        self.next = next
        self.pool = pool


class _Pool:
    __slots__ = ("keys", "free", "least_rest", "base", "page", "unmapped")

    def __init__(self, least_rest: int, base: int, page: int):
        self.keys: list[int] = []  # of the free blocks, sorted
        self.free: dict[int, Block] = {}  # by key
        self.least_rest = least_rest  # bytes that a block must have too many to be split
        self.base = base
        self.page = page
        self.unmapped: list[Block] = []  # by address; expandable segments only

    def add(self, block: Block) -> None:
        block.key = key = block.size << _ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.free[key] = block

    def remove(self, block: Block) -> None:
        key = block.key
        del self.keys[bisect_left(self.keys, key)]
        del self.free[key]


class Allocator:
    """Serves allocations and frees as PyTorch would, and counts."""

    def __init__(self, settings: AllocatorSettings | None = None):
        self.settings = settings = settings or AllocatorSettings()
        self.allocated_bytes = 0  # in blocks given out, whole
        self.reserved_bytes = 0  # in segments, or mapped pages
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0  # allocations that released everything free and tried once more, in vain or not
        self._cap = _NO_LIMIT if settings.cap_bytes is None else settings.cap_bytes
        self._max_split = settings.max_split_bytes or _NO_LIMIT
        self._expandable = settings.expandable_segments
        self._chooses = self._expandable or self._max_split < _NO_LIMIT  # best fit is not the whole rule
        self._split_limit = _NO_LIMIT if self._expandable else self._max_split
        self._next_address = 0
        self._edge = Block(0, 0, _IN_USE, None, None, None)  # stands for no neighbour
        large_rest = MIN_BLOCK_BYTES if self._expandable else SMALL_BYTES + 1
        self._small = _Pool(MIN_BLOCK_BYTES, 0, SMALL_SEGMENT_BYTES)
        self._large = _Pool(large_rest, _LARGE_BASE, LARGE_SEGMENT_BYTES)
        if self._expandable:
            for pool in (self._small, self._large):
                pool.unmapped.append(Block(pool.page * _PAGES, pool.base, _UNMAPPED, self._edge, self._edge, pool))

    def allocate(self, asked_bytes: int) -> Block | None:
        """A block of at least `asked_bytes`, or None for zero bytes. Raises AllocatorOutOfMemory."""
        size = round_size(asked_bytes, self.settings.roundup_power2_divisions)
        return self.take(size) if size else None

    def take(self, size: int) -> Block:
        """`allocate` for a size that is rounded and not zero: the part that a replay runs thousands of times."""
        pool = self._small if size <= SMALL_BYTES else self._large
        keys = pool.keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index < len(keys) and self._chooses:
            index = self._choose(pool, size, index)
        block = pool.free.pop(keys.pop(index)) if index < len(keys) else self._grow(pool, size)
        rest = block.size - size
        if rest >= pool.least_rest and size < self._split_limit:
            address = block.address + size
            key = rest << _ADDRESS_BITS | address
            after = block.next
            remaining = Block(rest, address, key, block, after, pool)
            after.prev = block.next = remaining
            block.size = size
            insort(keys, key)
            pool.free[key] = remaining
        else:
            size += rest
        block.key = _IN_USE
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back; None, the block of zero bytes, is fine."""
        if block is None:
            return
        if block.key != _IN_USE:
            raise ValueError(f"the block at {block.address} is free already")
        pool = block.pool
        keys, free = pool.keys, pool.free
        size = block.size
        self.allocated_bytes -= size
        before = block.prev
        key = before.key
        if key > 0:
            del keys[bisect_left(keys, key)], free[key]
            block.address = before.address
            size += before.size
            block.prev = before = before.prev
            before.next = block
        after = block.next
        key = after.key
        if key > 0:
            del keys[bisect_left(keys, key)], free[key]
            size += after.size
            block.next = after = after.next
            after.prev = block
        block.size = size
        block.key = key = size << _ADDRESS_BITS | block.address
        insort(keys, key)
        free[key] = block

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def empty_cache(self) -> None:
        """Return every wholly free segment, or every free page of an expandable one."""
        for pool in (self._large, self._small):
            for block in list(pool.free.values()):
                if self._expandable:
                    self._unmap(block)
                elif self._is_whole(block):
                    self._release(block)

    def _is_whole(self, block: Block) -> bool:
        return block.prev is self._edge and block.next is self._edge

    def _choose(self, pool: _Pool, size: int, index: int) -> int:
        """Where the free block is that may serve `size`, from the best fit on; the number of free blocks for none."""
        keys, free = pool.keys, pool.free
        if self._expandable:  # a block before unmapped pages counts with them, so that others are used up first
            room = _room_to_expand(free[keys[index]])
            while index + 1 < len(keys) and (room_after := _room_to_expand(free[keys[index + 1]])) < room:
                index, room = index + 1, room_after
        found, limit = free[keys[index]].size, self._max_split
        too_large = found >= limit if size < limit else found >= size + LARGE_SEGMENT_BYTES
        return len(keys) if too_large else index

    def _grow(self, pool: _Pool, size: int) -> Block:
        """New memory for `size`: a segment, or pages. What is free returns to the driver when there is no room."""
        block = self._reserve(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._reserve(pool, size)
        if block is None:
            raise AllocatorOutOfMemory(size, self.allocated_bytes, self.reserved_bytes)
        return block

    def _reserve(self, pool: _Pool, size: int) -> Block | None:
        if size <= SMALL_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self.reserved_bytes + segment > self._cap:
            return None
        if self._expandable:
            return self._expand(pool, size)
        self._count_reserved(segment)
        address = self._next_address
        self._next_address += segment
        return Block(segment, address, _IN_USE, self._edge, self._edge, pool)

    def _count_reserved(self, more_bytes: int) -> None:
        self.reserved_bytes += more_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Release blocks too large to be split until `size` is free, the smallest that is enough or the largest ones.

        Whether it is worth to try again. With expandable segments there are none: PyTorch fails an assertion here.
        """
        limit = self._max_split
        if limit == _NO_LIMIT or self._expandable:
            return False
        index = bisect_left(pool.keys, size << _ADDRESS_BITS)
        if index < len(pool.keys):
            self._release(pool.free[pool.keys[index]])
            return True
        released = 0
        while released < size and pool.keys:
            block = pool.free[pool.keys[-1]]
            if block.size < limit:
                break
            released += block.size
            self._release(block)
        return released >= size

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map pages at the lowest address where `size` fits between blocks in use. What was mapped in vain stays free."""
        for hole in pool.unmapped:
            block = hole.prev if hole.prev.key > 0 else hole
            if _has_room(block, size):
                break
        if block.key == _UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            hole = block.next
            if not self._map(hole, min(hole.size, size - block.size)):
                return None
            block = hole  # it has taken in what lay before
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the beginning of an unmapped block by as many pages as `size` needs."""
        pool = block.pool
        mapped = -(-size // pool.page) * pool.page
        if self.reserved_bytes + mapped > self._cap:
            return False
        place = pool.unmapped.index(block)
        if mapped < block.size:
            pool.unmapped[place] = self._cut(block, mapped, _UNMAPPED)
        else:
            del pool.unmapped[place]
        for neighbour in (block.prev, block.next):
            if neighbour.key > 0:
                pool.remove(neighbour)
                self._absorb(block, neighbour)
        pool.add(block)
        self._count_reserved(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the whole pages out of a free block."""
        pool = block.pool
        start = block.address - pool.base
        begin = -(-start // pool.page) * pool.page
        end = (start + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        block.key = _UNMAPPED
        if begin > start:
            before, block = block, self._cut(block, begin - start, _UNMAPPED)
            pool.add(before)
        if end - begin < block.size:
            pool.add(self._cut(block, end - begin, _UNMAPPED))
        self.reserved_bytes -= block.size
        for neighbour in (block.prev, block.next):
            if neighbour.key == _UNMAPPED:
                pool.unmapped.remove(neighbour)
                self._absorb(block, neighbour)
        insort(pool.unmapped, block, key=lambda one: one.address)

    def _cut(self, block: Block, size: int, key: int) -> Block:
        """Shorten a block to `size`; the rest, which is in no list yet."""
        rest = Block(block.size - size, block.address + size, key, block, block.next, block.pool)
        rest.next.prev = block.next = rest
        block.size = size
        return rest

    def _absorb(self, block: Block, neighbour: Block) -> None:
        if neighbour is block.prev:
            block.address = neighbour.address
            block.prev = neighbour.prev
            block.prev.next = block
        else:
            block.next = neighbour.next
            block.next.prev = block
        block.size += neighbour.size


def round_size(asked_bytes: int, divisions: int | None = None) -> int:
    """What PyTorch makes of a request before it looks for a block."""
    if divisions and divisions > 1 and asked_bytes > MIN_BLOCK_BYTES * divisions:
        step = (1 << (asked_bytes.bit_length() - 1)) // divisions
    else:
        step = MIN_BLOCK_BYTES
    return -(-asked_bytes // step) * step


def round_sizes(asked_bytes: np.ndarray, divisions: int | None = None) -> np.ndarray:
    """`round_size` of every element of an int64 array."""
    steps: Any = MIN_BLOCK_BYTES
    if divisions and divisions > 1:
        floors = np.left_shift(1, np.frexp(asked_bytes.astype(np.float64))[1].astype(np.int64) - 1)
        steps = np.where(asked_bytes > MIN_BLOCK_BYTES * divisions, floors // divisions, MIN_BLOCK_BYTES)
    return -(-asked_bytes // steps) * steps


def _room_to_expand(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after.key == _UNMAPPED else 0)


def _has_room(block: Block, size: int) -> bool:
    """Whether `size` fits from here on in free and unmapped blocks."""
    room = 0
    while block.key != _IN_USE:  # the edge is in use
        room += block.size
        if room >= size:
            return True
        block = block.next
    return False
