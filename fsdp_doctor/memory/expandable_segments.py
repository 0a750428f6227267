"""The model of the caching allocator with ``expandable_segments:True``.

Each pool has one long range of addresses, mapped page by page: 2 MiB for small blocks, 20 MiB for
large ones (``ExpandableSegment``, ``find_expandable_block``, ``map_block`` and ``unmap_block`` of
``c10/cuda/CUDACachingAllocator.cpp``, torch 2.1 - 2.14). What cannot be served from mapped free
memory takes the lowest place where free and unmapped memory together are long enough. Giving back
cached memory unmaps every whole page of every free block, wherever it lies.

Not modelled: that a range ends (9/8 of the GPU's memory each).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from fsdp_doctor.memory.caching_allocator import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL_SEGMENT,
    AllocatorSettings,
    Block,
    CachingAllocator,
    Pool,
    segment_size,
)

RANGE = 1 << 46
"""Addresses of a pool; never used up."""


def make_allocator(settings: AllocatorSettings | None = None) -> CachingAllocator:
    """Return the allocator that ``settings`` ask for."""
    if settings is not None and settings.expandable_segments:
        return ExpandableAllocator(settings)
    return CachingAllocator(settings)


class ExpandableAllocator(CachingAllocator):
    """Maps and unmaps pages instead of taking and giving back segments.

    ``segment_allocations`` and ``segment_frees`` count mappings, as torch's ``num_device_alloc``
    and ``num_device_free`` do.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self._unmapped: dict[Pool, list[int]] = {}

    def releasable_bytes(self) -> int:
        """What ``release_cached`` would give back now."""
        blocks = [self._at[a] for free in self._free.values() for _, a in free]
        return sum(high - low for low, high in map(_whole_pages, blocks))

    def _release_free(self) -> None:
        for block in [self._at[a] for free in self._free.values() for _, a in free]:
            self._unmap(block)

    def _fitting(self, pool: Pool, index: int) -> int:
        """A block that can grow counts as large as it can become."""
        blocks = self._free[pool]
        while index + 1 < len(blocks):
            here, following = (_with_room(self._at[blocks[i][1]]) for i in (index, index + 1))
            if following >= here:
                break
            index += 1
        return index

    def _should_split(self, block: Block, size: int) -> bool:
        return block.size - size >= MIN_BLOCK

    def _release_oversize(self, pool: Pool, size: int) -> bool:  # noqa: ARG002
        return False

    def _collect_garbage(self) -> None:
        """It looks for whole segments, and there are none."""

    # -- pages --------------------------------------------------------------------------------

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        # torch asks for as much room as a segment of its own would take
        if self.reserved_bytes + segment_size(size) > self._limit:
            return None
        block = self._find_room(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            beyond = block.next
            assert beyond is not None
            block = self._map(beyond, min(beyond.size, size - block.size))
        self._remove(block)
        return block

    def _find_room(self, pool: Pool, size: int) -> Block:
        """Return the lowest block from which free and unmapped ones reach far enough."""
        for address in self._unmapped.get(pool, ()):
            block: Block | None = self._at[address]
            assert block is not None
            if block.previous is not None and self._is_free(block.previous):
                block = block.previous
            first, room = block, 0
            while block is not None and room < size and self._is_free(block):
                room += block.size
                block = block.next
            if room >= size:
                return first
        address = self._new_address(RANGE)
        whole = Block(address, RANGE, pool, base=address, mapped=False)
        self._at[address] = whole
        self._unmapped[pool] = [address]
        return whole

    def _map(self, block: Block, size: int) -> Block:
        """Map the pages that ``size`` bytes take; return them, joined with free neighbours."""
        page = _page(block)
        size = -(-size // page) * page
        self._unmapped[block.pool].remove(block.address)
        block.mapped = True
        if size < block.size:
            rest = self._cut(block, size)
            rest.mapped = False
            insort(self._unmapped[block.pool], rest.address)
        self.reserved_bytes += size
        self.segment_allocations += 1
        return self._settle(block)

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block."""
        low, high = _whole_pages(block)
        if low == high:
            return
        self._remove(block)
        before, pages = block, block
        if low > block.address - block.base:
            pages = self._cut(block, low - (block.address - block.base))
            self._insert(before)
        if high < pages.address - pages.base + pages.size:
            self._insert(self._cut(pages, high - low))
        pages.mapped = False
        self.reserved_bytes -= high - low
        self.segment_frees += 1
        self._settle(pages)

    def _settle(self, block: Block) -> Block:
        """Join a block with free neighbours that are mapped if it is; list and return it."""
        before, after = block.previous, block.next
        if before is not None and self._is_free(before) and before.mapped == block.mapped:
            self._unlist(before)
            block = self._join(before, block)
        if after is not None and self._is_free(after) and after.mapped == block.mapped:
            self._unlist(after)
            block = self._join(block, after)
        if block.mapped:
            self._insert(block)
        else:
            insort(self._unmapped[block.pool], block.address)
        return block

    def _unlist(self, block: Block) -> None:
        if block.mapped:
            self._remove(block)
        else:
            places = self._unmapped[block.pool]
            del places[bisect_left(places, block.address)]


def _page(block: Block) -> int:
    return SMALL_SEGMENT if block.pool[0] else LARGE_SEGMENT


def _whole_pages(block: Block) -> tuple[int, int]:
    """Return where the whole pages of a block begin and end, counted from its range's begin."""
    page, begin = _page(block), block.address - block.base
    low, high = -(-begin // page) * page, (begin + block.size) // page * page
    return (low, high) if low < high else (0, 0)


def _with_room(block: Block) -> int:
    """The size that a free block can grow to."""
    beyond = block.next
    return block.size + (beyond.size if beyond is not None and not beyond.mapped else 0)
