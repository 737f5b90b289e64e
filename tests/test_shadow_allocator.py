"""The simulated caching allocator: each rule by numbers worked out by hand, and all of them against slow models."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.errors import UsageError
from autofit.harness.shadow.allocator import (
    MIB,
    Allocator,
    AllocatorOutOfMemory,
    AllocatorSettings,
    Block,
    round_size,
    round_sizes,
    set_variable,
    settings_from,
)


def make(**settings_: object) -> Allocator:
    return Allocator(AllocatorSettings(**settings_))


def counts(allocator: Allocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


# ---- rounding and segments ----


@pytest.mark.parametrize(("asked", "given_"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024)])
def test_sizes_are_rounded_up_to_512_bytes(asked, given_):
    allocator = make()
    allocator.allocate(asked)
    assert allocator.allocated_bytes == given_


def test_nothing_is_taken_for_zero_bytes():
    allocator = make()
    handle = allocator.allocate(0)
    assert counts(allocator) == (0, 0)
    allocator.free(handle)
    allocator.free(handle)
    assert counts(allocator) == (0, 0)


@pytest.mark.parametrize(
    ("asked", "divisions", "given_"),
    [
        (1200 * 1024, 4, 1280 * 1024),
        (1280 * 1024, 4, 1280 * 1024),
        (1280 * 1024 + 1, 4, 1536 * 1024),
        (1900 * 1024, 4, 2048 * 1024),
        (2048 * 1024, 4, 2048 * 1024),
        (1100, 4, 1536),  # up to 512 × 4 bytes there are no divisions
        (2048, 4, 2048),
        (2049, 4, 2560),
        (1200 * 1024, 1, 1200 * 1024),
        (1200 * 1024 + 1, None, 1200 * 1024 + 512),
        (3000, 2, 3072),
        (3100, 2, 4096),
    ],
)
def test_sizes_are_rounded_to_divisions_between_powers_of_two(asked, divisions, given_):
    assert round_size(asked, divisions) == given_
    assert round_sizes(np.array([asked]), divisions).tolist() == [given_]


@given(st.lists(st.integers(0, 1 << 45)), st.sampled_from([None, 0, 1, 2, 8, 32]))
def test_rounding_an_array_is_rounding_each_of_it(sizes, divisions):
    rounded = [round_size(size, divisions) for size in sizes]
    assert round_sizes(np.array(sizes, dtype=np.int64), divisions).tolist() == rounded
    assert all(size <= up and up % 512 == 0 for size, up in zip(sizes, rounded, strict=True))


def test_divisions_that_are_no_power_of_two_are_refused():
    with pytest.raises(ValueError, match="powers of two"):
        AllocatorSettings(roundup_power2_divisions=3)


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_a_new_segment_has_the_size_of_its_class(asked, segment):
    allocator = make()
    allocator.allocate(asked)
    assert allocator.reserved_bytes == segment


def test_small_and_large_requests_never_share_a_segment():
    allocator = make()
    allocator.allocate(2 * MIB)  # 18 MiB of its segment are free
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(MIB)  # the other half of the small segment
    assert counts(allocator) == (4 * MIB, 22 * MIB)


# ---- fitting, splitting, merging ----


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = make()
    large, middle, small = (allocator.allocate(size * MIB) for size in (40, 30, 20))
    for block in (large, middle, small):
        allocator.free(block)
    assert allocator.allocate(25 * MIB).address == 40 * MIB  # the segment of 30 begins after that of 40
    assert allocator.reserved_bytes == 90 * MIB


def test_of_free_blocks_of_one_size_the_lowest_address_is_taken():
    allocator = make()
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(second)
    allocator.free(first)
    assert [allocator.allocate(30 * MIB).address for _ in range(2)] == [0, 30 * MIB]


@pytest.mark.parametrize(("asked", "counted"), [(13 * MIB, 14 * MIB), (13 * MIB - 512, 13 * MIB - 512)])
def test_a_large_block_is_split_when_more_than_a_mebibyte_is_left_and_else_counts_whole(asked, counted):
    allocator = make()
    allocator.free(allocator.allocate(14 * MIB))
    allocator.allocate(asked)
    assert counts(allocator) == (counted, 14 * MIB)


def test_a_small_block_is_split_down_to_512_bytes():
    allocator = make()
    blocks = [allocator.allocate(MIB), allocator.allocate(MIB - 512), allocator.allocate(512)]
    assert [block.address for block in blocks] == [0, MIB, 2 * MIB - 512]
    assert counts(allocator) == (2 * MIB, 2 * MIB)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_freed_neighbours_become_one_block(order):
    allocator = make()
    blocks = [allocator.allocate(size * MIB) for size in (6, 6, 8)]
    assert allocator.reserved_bytes == 20 * MIB
    for index in order:
        allocator.free(blocks[index])
    allocator.allocate(20 * MIB)
    assert counts(allocator) == (20 * MIB, 20 * MIB)


def test_blocks_of_two_segments_do_not_merge():
    allocator = make()
    for block in [allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)]:
        allocator.free(block)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_a_block_between_two_in_use_is_not_merged_with_them():
    allocator = make()
    _, middle, _ = (allocator.allocate(size * MIB) for size in (6, 6, 8))
    allocator.free(middle)
    allocator.allocate(6 * MIB + 512)
    assert allocator.reserved_bytes == 40 * MIB


def test_freeing_twice_is_an_error():
    allocator = make()
    block = allocator.allocate(512)
    allocator.free(block)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)


# ---- peaks, and giving memory back ----


def test_peaks_stay_until_they_are_reset_to_what_is_held():
    allocator = make()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(12 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MIB, 30 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (12 * MIB, 30 * MIB)


def test_emptying_the_cache_returns_wholly_free_segments_and_no_others():
    allocator = make()
    kept = allocator.allocate(12 * MIB)
    part = [allocator.allocate(6 * MIB) for _ in range(2)]
    allocator.allocate(512)
    allocator.free(part[0])
    allocator.empty_cache()
    assert allocator.reserved_bytes == (12 + 20 + 2) * MIB
    allocator.free(kept)
    allocator.free(part[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.retries == 0


def test_at_the_cap_free_segments_are_released_and_the_allocation_tried_again():
    allocator = make(cap_bytes=60 * MIB)
    allocator.allocate(20 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(32 * MIB)  # does not fit the 30, and 50 + 32 exceeds the cap
    assert counts(allocator) == (52 * MIB, 52 * MIB)
    assert allocator.retries == 1
    assert allocator.peak_reserved_bytes == 52 * MIB


def test_the_cap_itself_may_be_reserved():
    allocator = make(cap_bytes=30 * MIB)
    allocator.allocate(30 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (30 * MIB, 0)


def test_out_of_memory_tells_what_was_asked_and_held():
    allocator = make(cap_bytes=60 * MIB)
    for _ in range(3):
        allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(6 * MIB)  # pins its segment of 20 MiB
    allocator.allocate(20 * MIB)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.allocate(21 * MIB)
    assert (caught.value.requested_bytes, caught.value.allocated_bytes) == (21 * MIB, 26 * MIB)
    assert caught.value.reserved_bytes == 40 * MIB
    assert allocator.retries == 1
    allocator.allocate(20 * MIB)  # a failure breaks nothing
    assert allocator.reserved_bytes == 60 * MIB


def test_a_fragmented_segment_makes_a_request_fail_that_would_fit_its_free_bytes():
    allocator = make(cap_bytes=20 * MIB)
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.free(block)
    assert allocator.allocated_bytes == 8 * MIB
    with pytest.raises(AllocatorOutOfMemory):
        allocator.allocate(8 * MIB)


# ---- max_split_size ----


def test_a_limit_below_what_pytorch_takes_is_refused():
    with pytest.raises(ValueError, match="20971520 or more"):
        AllocatorSettings(max_split_bytes=20 * MIB - 1)


def test_an_oversize_block_is_not_given_to_a_request_below_the_limit():
    allocator = make(max_split_bytes=32 * MIB)
    allocator.free(allocator.allocate(32 * MIB))
    allocator.allocate(31 * MIB)
    assert allocator.reserved_bytes == 64 * MIB


def test_a_block_below_the_limit_is_split_as_ever():
    allocator = make(max_split_bytes=32 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(20 * MIB)
    allocator.allocate(10 * MIB)
    assert counts(allocator) == (30 * MIB, 30 * MIB)


@pytest.mark.parametrize(("cached", "counted", "reserved"), [(58, 58, 58), (60, 40, 100)])
def test_an_oversize_block_serves_oversize_requests_whole_with_less_than_20_mib_to_spare(cached, counted, reserved):
    allocator = make(max_split_bytes=32 * MIB)
    allocator.free(allocator.allocate(cached * MIB))
    allocator.allocate(40 * MIB)
    assert counts(allocator) == (counted * MIB, reserved * MIB)


def test_at_the_cap_one_oversize_block_that_is_enough_is_released_and_no_other():
    allocator = make(max_split_bytes=32 * MIB, cap_bytes=240 * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (30, 70, 100)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(48 * MIB)  # 70 and 100 have too much to spare; 70 is the smallest that is enough
    assert counts(allocator) == (48 * MIB, 178 * MIB)
    assert allocator.retries == 0


def test_at_the_cap_the_largest_oversize_blocks_are_released_until_it_is_enough():
    allocator = make(max_split_bytes=32 * MIB, cap_bytes=200 * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (30, 40, 50, 60)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(100 * MIB)  # 60 and 50 go, 40 and 30 stay
    assert counts(allocator) == (100 * MIB, 170 * MIB)
    assert allocator.retries == 0


def test_at_the_cap_everything_is_released_when_oversize_blocks_are_not_enough():
    allocator = make(max_split_bytes=32 * MIB, cap_bytes=100 * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (30, 40)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(64 * MIB)  # the 40 go first: that would leave room, but PyTorch counts what it released
    assert counts(allocator) == (64 * MIB, 64 * MIB)
    assert allocator.retries == 1


# ---- expandable segments ----


def test_an_expandable_segment_grows_by_pages_and_is_split_at_512_bytes():
    allocator = make(expandable_segments=True)
    first = allocator.allocate(11 * MIB + 512)
    assert counts(allocator) == (11 * MIB + 512, 20 * MIB)
    second = allocator.allocate(21 * MIB)  # continues in the first page
    assert second.address == first.address + 11 * MIB + 512
    assert counts(allocator) == (32 * MIB + 512, 40 * MIB)
    allocator.allocate(1)
    assert allocator.reserved_bytes == 42 * MIB  # the small pool has pages of 2 MiB


def test_requests_that_grow_reuse_an_expandable_segment_and_pile_up_otherwise():
    reserved = {}
    for expandable in (False, True):
        allocator = make(expandable_segments=expandable)
        for size in range(40, 100, 10):
            allocator.free(allocator.allocate(size * MIB))
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: (40 + 50 + 60 + 70 + 80 + 90) * MIB, True: 100 * MIB}


def test_a_block_before_unmapped_pages_is_used_last():
    allocator = make(expandable_segments=True)
    hole, _, end = (allocator.allocate(size * MIB) for size in (14, 16, 10))
    allocator.free(hole)
    allocator.free(end)  # 10 MiB at the end of 40 MiB
    assert allocator.allocate(8 * MIB).address == hole.address  # best fit by bytes alone would take the end


def test_pages_unmapped_at_different_times_are_one_stretch_to_expand_into():
    allocator = make(expandable_segments=True)
    low, _, end, last = (allocator.allocate(size * MIB) for size in (34, 16, 10, 20))
    allocator.free(last)
    allocator.empty_cache()  # the page behind `end` joins what was never mapped
    allocator.free(low)
    allocator.free(end)
    assert allocator.allocate(8 * MIB).address == low.address


def test_of_blocks_of_one_size_in_an_expandable_segment_the_lowest_is_taken():
    allocator = make(expandable_segments=True)
    first, _, second, _ = (allocator.allocate(size * MIB) for size in (30, 10, 30, 10))
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(30 * MIB).address == first.address


def test_at_the_cap_free_pages_are_unmapped_and_mapped_again_elsewhere():
    allocator = make(expandable_segments=True, cap_bytes=80 * MIB)
    blocks = [allocator.allocate(20 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    moved = allocator.allocate(40 * MIB)  # no 40 MiB in one piece are free: both pages move to the end
    assert moved.address == blocks[3].address + 20 * MIB
    assert counts(allocator) == (80 * MIB, 80 * MIB)
    assert allocator.retries == 1


def test_only_whole_free_pages_are_unmapped():
    allocator = make(expandable_segments=True)
    blocks = [allocator.allocate(size * MIB) for size in (5, 50, 5)]
    allocator.free(blocks[1])  # from 5 to 55: the pages 20 to 40 are whole
    allocator.empty_cache()
    assert counts(allocator) == (10 * MIB, 40 * MIB)
    filled = allocator.allocate(50 * MIB)
    assert filled.address == blocks[0].address + 5 * MIB  # the lowest address with room, the hole mapped again
    assert counts(allocator) == (60 * MIB, 60 * MIB)


def test_a_cap_holds_for_the_last_page_too():
    allocator = make(expandable_segments=True, cap_bytes=30 * MIB)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.allocate(21 * MIB)  # two pages of 20 MiB
    assert allocator.reserved_bytes == 0
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_with_a_split_limit_an_expandable_segment_is_still_split_and_never_released_as_oversize():
    allocator = make(expandable_segments=True, max_split_bytes=32 * MIB, cap_bytes=60 * MIB)
    first = allocator.allocate(35 * MIB)
    assert counts(allocator) == (35 * MIB, 40 * MIB)
    allocator.free(first)
    second = allocator.allocate(60 * MIB)
    assert second.address == first.address
    assert counts(allocator) == (60 * MIB, 60 * MIB)
    assert allocator.retries == 1


# ---- against slow models of the same rules ----


class SegmentModel:
    """Segments as lists of pieces, searched from end to end: [address, size, handle or None]."""

    def __init__(self, rules: AllocatorSettings):
        self.rules, self.segments, self.end, self.retries = rules, [], 0, 0
        self.limit = rules.max_split_bytes or 1 << 60

    def counts(self) -> tuple[int, int]:
        pieces = [piece for _, segment in self.segments for piece in segment]
        return sum(p[1] for p in pieces if p[2] is not None), sum(p[1] for p in pieces)

    def allocate(self, asked: int, handle: int) -> int | None:
        size = round_size(asked, self.rules.roundup_power2_divisions)
        small = size <= MIB
        fitting = [
            (piece[1], piece[0], segment, place)
            for is_small, segment in self.segments
            for place, piece in enumerate(segment)
            if is_small == small and piece[2] is None and piece[1] >= size
        ]
        found = min(fitting, key=lambda one: one[:2], default=None)
        if found and (found[0] >= self.limit if size < self.limit else found[0] >= size + 20 * MIB):
            found = None
        if found is None:
            segment = self.reserve(size, small)
            if segment is None:
                return None
            place = 0
        else:
            _, _, segment, place = found
        piece = segment[place]
        rest = piece[1] - size
        if rest >= 512 if small else rest > MIB and size < self.limit:
            segment.insert(place + 1, [piece[0] + size, rest, None])
            piece[1] = size
        piece[2] = handle
        return piece[0]

    def reserve(self, size: int, small: bool) -> list | None:
        bytes_ = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        cap = self.rules.cap_bytes
        for attempt in ("at once", "oversize", "all"):
            if (
                attempt == "oversize"
                and self.limit < 1 << 60
                and not self.release_oversize(max(size, self.limit), small)
            ):
                continue
            if attempt == "all":
                self.retries += 1
                self.empty_cache()
            if cap is None or self.counts()[1] + bytes_ <= cap:
                self.segments.append((small, [[self.end, bytes_, None]]))
                self.end += bytes_
                return self.segments[-1][1]
        return None

    def release_oversize(self, size: int, small: bool) -> bool:
        whole = [s for s in self.segments if s[0] == small and len(s[1]) == 1 and s[1][0][2] is None]
        whole = sorted((s for s in whole if s[1][0][1] >= self.limit), key=lambda s: (s[1][0][1], s[1][0][0]))
        enough = [s for s in whole if s[1][0][1] >= size][:1]
        released = 0
        for segment in enough or whole[::-1]:
            if released < size:
                released += segment[1][0][1]
                self.segments.remove(segment)
        return released >= size

    def free(self, handle: int) -> None:
        for _, segment in self.segments:
            for piece in segment:
                if piece[2] == handle:
                    piece[2] = None
            place = 0
            while place + 1 < len(segment):
                if segment[place][2] is None and segment[place + 1][2] is None:
                    segment[place][1] += segment.pop(place + 1)[1]
                else:
                    place += 1

    def empty_cache(self) -> None:
        self.segments = [s for s in self.segments if len(s[1]) > 1 or s[1][0][2] is not None]


class PageModel:
    """Expandable segments as sets of mapped pages and lists of used ranges, with free ranges found anew each time."""

    def __init__(self, rules: AllocatorSettings):
        self.cap, self.retries = rules.cap_bytes or 1 << 60, 0
        self.divisions = rules.roundup_power2_divisions
        self.mapped = {2 * MIB: set(), 20 * MIB: set()}  # by page size, which tells the pool
        self.used = {2 * MIB: {}, 20 * MIB: {}}  # handle -> (start, end)

    def counts(self) -> tuple[int, int]:
        return (
            sum(end - start for used in self.used.values() for start, end in used.values()),
            sum(page * len(mapped) for page, mapped in self.mapped.items()),
        )

    def free_ranges(self, page: int) -> list[tuple[int, int]]:
        cuts = sorted(self.used[page].values())
        ranges = []
        for number in sorted(self.mapped[page]):
            begin, end = number * page, (number + 1) * page
            for start, stop in cuts:
                if start <= begin < stop:
                    begin = min(stop, end)
                elif begin < start < end:
                    ranges.append((begin, start))
                    begin = min(stop, end)
            if begin < end:
                ranges.append((begin, end))
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        return merged

    def hole_after(self, page: int, position: int) -> int:
        """Bytes that are not mapped from here to the next mapped page."""
        mapped = self.mapped[page]
        if position % page or position // page in mapped:
            return 0
        later = [number for number in mapped if number > position // page]
        return min(later) * page - position if later else 1 << 60

    def allocate(self, asked: int, handle: int) -> int | None:
        size = round_size(asked, self.divisions)
        page = 2 * MIB if size <= MIB else 20 * MIB
        ranges = sorted(((stop - start, start) for start, stop in self.free_ranges(page)))
        fitting = [(length, start) for length, start in ranges if length >= size]
        begin = None
        if fitting:
            rooms = [length + self.hole_after(page, start + length) for length, start in fitting]
            chosen = 0
            while chosen + 1 < len(rooms) and rooms[chosen + 1] < rooms[chosen]:
                chosen += 1
            begin = fitting[chosen][1]
        else:
            begin = self.grow(page, size)
            if begin is None:
                self.retries += 1
                self.empty_cache()
                begin = self.grow(page, size)
        if begin is not None:
            self.used[page][handle] = (begin, begin + size)
        return begin

    def grow(self, page: int, size: int) -> int | None:
        class_ = 2 * MIB if page == 2 * MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.counts()[1] + class_ > self.cap:
            return None
        begin = self.find(page, size)
        position = begin
        while position < begin + size:
            number = position // page
            if number not in self.mapped[page]:  # one hole is mapped at a time, all its pages or none
                length = min(self.hole_after(page, position), begin + size - position)
                pages = range(number, number + -(-length // page))
                if self.counts()[1] + page * len(pages) > self.cap:
                    return None
                self.mapped[page].update(pages)
            position = (number + 1) * page
        return begin

    def find(self, page: int, size: int) -> int:
        """The lowest place before or in a hole from which on `size` is free or not mapped."""
        ends = {stop: start for start, stop in self.free_ranges(page)}
        number = 0
        while True:
            hole = number * page
            if number not in self.mapped[page] and (number == 0 or number - 1 in self.mapped[page]):
                begin = ends.get(hole, hole)
                if all(stop <= begin or start >= begin + size for start, stop in self.used[page].values()):
                    return begin
            number += 1

    def free(self, handle: int) -> None:
        for used in self.used.values():
            used.pop(handle, None)

    def empty_cache(self) -> None:
        for page, mapped in self.mapped.items():
            for start, stop in self.free_ranges(page):
                mapped.difference_update(range(-(-start // page), stop // page))


SIZES = st.one_of(
    st.integers(1, 3 * MIB),
    st.sampled_from([512, MIB - 512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 20 * MIB, 32 * MIB, 40 * MIB]),
    st.integers(1, 60).map(lambda n: n * MIB),
    st.integers(1, 60 * MIB),
)
STEPS = st.lists(
    st.one_of(
        SIZES,
        SIZES,
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.sampled_from(["empty", ("free", 0), ("free", 1)]),
    ),
    min_size=10,
    max_size=80,
)
CAPS = st.one_of(st.none(), st.integers(1, 300).map(lambda n: n * MIB))
RULES = st.one_of(
    st.builds(
        AllocatorSettings,
        cap_bytes=CAPS,
        max_split_bytes=st.sampled_from([None, 20 * MIB, 32 * MIB, 50 * MIB]),
        roundup_power2_divisions=st.sampled_from([None, 4]),
    ),
    st.builds(
        AllocatorSettings,
        cap_bytes=CAPS,
        roundup_power2_divisions=st.sampled_from([None, 4]),
        expandable_segments=st.just(True),
    ),
)


def run(allocator: Allocator, steps: list, watch=lambda live: None) -> list[Block]:
    """Do the steps, failed allocations skipped; the blocks that are alive at the end."""
    live: list[Block] = []
    for step in steps:
        if isinstance(step, int):
            try:
                live.append(allocator.allocate(step))
            except AllocatorOutOfMemory as error:
                assert error.reserved_bytes == allocator.reserved_bytes
        elif step == "empty":
            allocator.empty_cache()
        elif live:
            allocator.free(live.pop(step[1] % len(live)))
        watch(live)
    return live


@settings(max_examples=300, deadline=None)
@given(RULES, STEPS)
def test_addresses_and_counts_are_those_of_a_slow_model(rules, steps):
    allocator = Allocator(rules)
    model = PageModel(rules) if rules.expandable_segments else SegmentModel(rules)
    live: list[tuple[int, Block]] = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            expected = model.allocate(step, number)
            try:
                block = allocator.allocate(step)
            except AllocatorOutOfMemory:
                assert expected is None
            else:
                live.append((number, block))
                assert expected == block.address - (block.pool.base if rules.expandable_segments else 0)
        elif step == "empty":
            allocator.empty_cache()
            model.empty_cache()
        elif live:
            handle, block = live.pop(step[1] % len(live))
            allocator.free(block)
            model.free(handle)
        assert (*counts(allocator), allocator.retries) == (*model.counts(), model.retries)


@settings(max_examples=150, deadline=None)
@given(RULES, STEPS)
def test_no_two_live_blocks_overlap_and_live_bytes_are_reserved_under_the_cap(rules, steps):
    allocator = Allocator(rules)
    peaks = [(0, 0)]

    def watch(live):
        ranges = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
        assert sum(block.size for block in live) == allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= (rules.cap_bytes or 1 << 60)
        peak = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        assert all(before <= after for before, after in zip(peaks[-1], peak, strict=True))
        assert all(now <= most for now, most in zip(counts(allocator), peak, strict=True))
        peaks.append(peak)

    run(allocator, steps, watch)


@settings(max_examples=150, deadline=None)
@given(RULES, STEPS, st.randoms())
def test_when_everything_is_freed_in_any_order_nothing_stays_reserved(rules, steps, random):
    allocator = Allocator(rules)
    live = run(allocator, steps)
    random.shuffle(live)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert counts(allocator) == (0, 0)


@settings(max_examples=50, deadline=None)
@given(RULES, STEPS)
def test_the_same_steps_give_the_same_addresses(rules, steps):
    def once():
        allocator = Allocator(rules)
        return [(block.address, block.size) for block in run(allocator, steps)], counts(allocator), allocator.retries

    assert once() == once()


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_a_cap_at_the_peak_reserved_without_one_changes_nothing(steps):
    free = make()
    run(free, steps)
    capped = make(cap_bytes=free.peak_reserved_bytes)
    run(capped, steps)
    assert counts(capped) == counts(free)
    assert capped.retries == 0


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_expandable_segments_with_a_split_limit_stay_consistent(steps):
    allocator = make(expandable_segments=True, max_split_bytes=32 * MIB, cap_bytes=200 * MIB)
    for block in run(allocator, steps):
        allocator.free(block)
    allocator.empty_cache()
    assert counts(allocator) == (0, 0)


# ---- settings of the environment ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False", {}),
        (" max_split_size_mb : 128 ,", {"max_split_bytes": 128 * MIB}),
        ("max_split_size_mb:20", {"max_split_bytes": 20 * MIB}),
        ("roundup_power2_divisions:8", {"roundup_power2_divisions": 8}),
        ("roundup_power2_divisions:0", {"roundup_power2_divisions": 0}),
        (
            "garbage_collection_threshold:0.6,max_split_size_mb:64,backend:native,some_list:[256:1,>:4],expandable_segments:True",
            {"max_split_bytes": 64 * MIB, "expandable_segments": True},
        ),
    ],
)
def test_settings_of_the_environment_are_read_as_pytorch_does(text, expected):
    assert settings_from({"PYTORCH_CUDA_ALLOC_CONF": text}) == AllocatorSettings(**expected)


def test_the_older_name_counts_before_the_newer_one_and_neither_is_needed():
    older, newer = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    assert settings_from({}) == AllocatorSettings() and set_variable({}) is None
    assert settings_from({newer: "expandable_segments:True"}).expandable_segments
    both = {newer: "expandable_segments:True", older: "max_split_size_mb:99"}
    assert settings_from(both) == AllocatorSettings(max_split_bytes=99 * MIB)
    assert set_variable(both) == (older, "max_split_size_mb:99")
    assert settings_from({newer: "expandable_segments:True", older: ""}) == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("expandable_segments", "'expandable_segments' is no setting; write name:value"),
        ("expandable_segments:", "is no setting"),
        ("expandable_segments:true", "expandable_segments is 'true'; write True or False"),
        ("max_split_size_mb:many", "max_split_size_mb is 'many'; write a whole number"),
        ("max_split_size_mb:-1", "max_split_size_mb is '-1'; write a whole number"),
        ("max_split_size_mb:19", "max_split_size_mb is 19; PyTorch takes 20 or more"),
        ("max_split_size_mb:" + "9" * 5000, "write a whole number"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions is 3; PyTorch takes powers of two"),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", "by size is not modelled; write one number for all sizes"),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_bad_setting_of_the_environment_is_one_line_that_names_the_variable(variable, text, expected):
    with pytest.raises(UsageError) as caught:
        settings_from({variable: text})
    assert str(caught.value).startswith(f"{variable}: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="abcdexpandable_segments:,[]0123456789TrueFalse ", max_size=60))
def test_any_text_is_settings_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        settings_from({"PYTORCH_ALLOC_CONF": text})


@pytest.mark.parametrize("divisions", [2**40, 2**59])
def test_divisions_finer_than_any_size_change_nothing(divisions):
    settings_ = settings_from({"PYTORCH_ALLOC_CONF": f"roundup_power2_divisions:{divisions}"})
    assert round_sizes(np.array([1000, 2**40 + 1]), settings_.roundup_power2_divisions).tolist() == [1024, 2**40 + 512]
