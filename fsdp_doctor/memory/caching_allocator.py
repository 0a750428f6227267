"""A model of CUDA's caching allocator (native backend): what it reserves for given requests.

Constants and rules: ``c10/cuda/CUDACachingAllocator.cpp`` and ``.h``, ``CUDAAllocatorConfig.h``,
torch 2.6 - 2.14. Addresses are invented; only their order within a pool matters (best fit takes
the smallest block, the lowest address among equals). Each new segment lies below the earlier ones:
so it was for 376 of 389 large segments of a recorded job.

``garbage_collection_threshold`` acts under a capacity only, as in torch, where it takes
``set_per_process_memory_fraction``. Expandable segments: ``expandable_segments.py``, whose
``make_allocator`` returns the right class for given settings. Not modelled: private pools (CUDA
graphs), other processes, the large-segment size option.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
"""Requests of at most this size come from the small pool."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE_ALLOCATION = 10 << 20
"""Requests from here on get a segment of their own size."""
ROUND_LARGE = 2 << 20
_UNLIMITED = 1 << 62

Pool = tuple[bool, int]
"""(small, stream)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """``PYTORCH_CUDA_ALLOC_CONF``, and how much memory there is."""

    capacity_bytes: int | None = None
    """Memory that may be reserved; None: without limit."""
    max_split_size_bytes: int | None = None
    """``max_split_size_mb``: larger blocks are neither split nor given to small requests."""
    roundup_power2_divisions: int = 0
    """The same division for every size; 0 and 1: off."""
    garbage_collection_threshold: float = 0.0
    """Share of the capacity above which old free segments are given back; 0: off."""
    expandable_segments: bool = False


class OutOfMemoryModelled(Exception):  # noqa: N818 (an outcome, not a mistake of the caller)
    """The request fits neither in what is reserved nor in what is left."""

    def __init__(self, requested_bytes: int, reserved_bytes: int, allocated_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes do not fit: {reserved_bytes} reserved, "
            f"{allocated_bytes} allocated"
        )
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; neighbours in address order are linked."""

    address: int
    size: int
    pool: Pool
    used: bool = False
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None
    streams: set[int] = field(default_factory=set)
    """Other streams that use it (``record_stream``): its end waits for them."""
    searches: int = 0
    """Searches in blocks of its kind (small or large) when it became free; for its age."""
    base: int = 0
    """Where its segment begins."""
    mapped: bool = True
    """False: addresses of an expandable segment without memory."""

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.previous is None and self.next is None


class CachingAllocator:
    """Answers ``allocate`` and ``free`` as the real one does, and counts."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        if self.settings.expandable_segments and type(self) is CachingAllocator:
            raise ValueError("make_allocator returns the allocator for expandable segments")
        self.allocated_bytes = self.reserved_bytes = self.active_bytes = self.requested_bytes = 0
        self.segment_allocations = self.segment_frees = self.retries = 0
        self._limit = self.settings.capacity_bytes or _UNLIMITED
        self._max_split = self.settings.max_split_size_bytes or _UNLIMITED
        self._free: dict[Pool, list[tuple[int, int]]] = {}
        self._at: dict[int, Block] = {}
        self._deferred: list[tuple[int, Block]] = []
        self._searches = [0, 0]
        self._next_address = 1 << 60

    # -- requests -----------------------------------------------------------------------------

    def round_size(self, size: int) -> int:
        """Return the size of the block that a request of ``size`` bytes is looked up with."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return _round_to_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Return a block for ``size`` bytes on ``stream``.

        Raises OutOfMemoryModelled when cached segments were given back and it still does not fit.
        """
        rounded = self.round_size(size)
        pool = (rounded <= SMALL_SIZE, stream)
        block = self._find(pool, rounded)
        if block is None:
            self._collect_garbage()
            block = self._reserve(pool, rounded)
            if block is None and self._release_oversize(pool, rounded):
                block = self._reserve(pool, rounded)
            if block is None:
                self.retries += 1
                self.release_cached()
                block = self._reserve(pool, rounded)
            if block is None:
                raise OutOfMemoryModelled(size, self.reserved_bytes, self.allocated_bytes)
        if self._should_split(block, rounded):
            self._split(block, rounded)
        block.used, block.requested = True, size
        self.allocated_bytes += block.size
        self.active_bytes += block.size
        self.requested_bytes += size
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses the block: when freed, it stays active until it is done."""
        if stream != block.pool[1]:
            block.streams.add(stream)

    def free(self, block: Block, moment: int = 0) -> None:
        """Free a block; one that other streams use waits for ``process_events``.

        ``moment``: any number that does not fall, for ``process_events``.
        """
        if not block.used:
            raise ValueError("the block is free already")
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.used, block.requested = False, 0
        if block.streams:
            self._deferred.append((moment, block))
        else:
            self._return(block)

    def process_events(self, until: int | None = None) -> None:
        """Every stream has done what it had at moment ``until`` (None: everything): what was freed
        before can be used again.
        """
        while self._deferred and (until is None or self._deferred[0][0] < until):
            _, block = self._deferred.pop(0)
            block.streams.clear()
            self._return(block)

    def release_cached(self) -> int:
        """Give free segments back (``empty_cache``); return their bytes."""
        before = self.reserved_bytes
        self.process_events()
        self._release_free()
        return before - self.reserved_bytes

    def releasable_bytes(self) -> int:
        """What ``release_cached`` would give back now."""
        return sum(block.size for block in self._whole_free())

    def _release_free(self) -> None:
        for block in self._whole_free():
            self._give_back(block)

    def _whole_free(self) -> list[Block]:
        blocks = [self._at[address] for free in self._free.values() for _, address in free]
        return [block for block in blocks if block.whole]

    def adopt(self, size: int, stream: int, pieces: list[tuple[int, int, bool]]) -> list[Block]:
        """Add a segment that exists already: ``pieces`` are (size, requested, used) in order.

        A segment of 2 MiB is of the small pool. Returns its blocks.
        """
        pool = (size == SMALL_SEGMENT, stream)
        base = address = self._new_address(size)
        self.reserved_bytes += size
        blocks: list[Block] = []
        for piece, requested, used in pieces:
            block = Block(address, piece, pool, used=used, requested=requested, base=base)
            self._at[address] = block
            if blocks:
                block.previous, blocks[-1].next = blocks[-1], block
            blocks.append(block)
            address += piece
            if used:
                self.allocated_bytes += piece
                self.active_bytes += piece
                self.requested_bytes += requested
            else:
                self._insert(block)
        return blocks

    # -- free lists ---------------------------------------------------------------------------

    def _insert(self, block: Block) -> None:
        block.searches = self._searches[block.pool[0]]
        insort(self._free.setdefault(block.pool, []), (block.size, block.address))

    def _remove(self, block: Block) -> None:
        blocks = self._free[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def _find(self, pool: Pool, size: int) -> Block | None:
        self._searches[pool[0]] += 1
        blocks = self._free.get(pool)
        if not blocks:
            return None
        index = bisect_left(blocks, (size, 0))
        if index == len(blocks):
            return None
        index = self._fitting(pool, index)
        block = self._at[blocks[index][1]]
        if size < self._max_split <= block.size:
            return None
        if size >= self._max_split and block.size >= size + LARGE_SEGMENT:
            return None
        del blocks[index]
        return block

    def _fitting(self, pool: Pool, index: int) -> int:  # noqa: ARG002
        """Return which free block to take when the one at ``index`` is the smallest that fits."""
        return index

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool[0]:
            return rest >= MIN_BLOCK
        return size < self._max_split and rest > SMALL_SIZE

    def _split(self, block: Block, size: int) -> None:
        self._insert(self._cut(block, size))

    def _cut(self, block: Block, size: int) -> Block:
        """Leave a block ``size`` bytes and return the rest, which is in no list yet."""
        rest = Block(block.address + size, block.size - size, block.pool, base=block.base)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._at[rest.address] = rest
        return rest

    def _return(self, block: Block) -> None:
        """Make a block available, joined with free neighbours."""
        self.active_bytes -= block.size
        before, after = block.previous, block.next
        if before is not None and before.mapped and self._is_free(before):
            self._remove(before)
            block = self._join(before, block)
        if after is not None and after.mapped and self._is_free(after):
            self._remove(after)
            block = self._join(block, after)
        self._insert(block)

    @staticmethod
    def _is_free(block: Block) -> bool:
        return not block.used and not block.streams

    def _join(self, low: Block, high: Block) -> Block:
        low.size += high.size
        low.next = high.next
        if high.next is not None:
            high.next.previous = low
        del self._at[high.address]
        return low

    # -- segments -----------------------------------------------------------------------------

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        segment = segment_size(size)
        if self.reserved_bytes + segment > self._limit:
            return None
        address = self._new_address(segment)
        block = Block(address, segment, pool, base=address)
        self._at[address] = block
        self.reserved_bytes += segment
        self.segment_allocations += 1
        return block

    def _new_address(self, size: int) -> int:
        """Below every earlier segment, as the driver mostly places them."""
        self._next_address -= size + ROUND_LARGE
        return self._next_address

    def _give_back(self, block: Block) -> None:
        self._remove(block)
        del self._at[block.address]
        self.reserved_bytes -= block.size
        self.segment_frees += 1

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With ``max_split_size``: give back one block that is large enough, or the largest ones
        until they are; tell whether that much came free (``release_available_cached_blocks``).
        """
        if self._max_split == _UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        blocks = self._free.get(pool, [])
        index = bisect_left(blocks, (wanted, 0))
        if index < len(blocks):
            self._give_back(self._at[blocks[index][1]])
            return True
        released = 0
        while blocks and released < wanted and blocks[-1][0] >= self._max_split:
            released += blocks[-1][0]
            self._give_back(self._at[blocks[-1][1]])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back large segments at least as old as the average, again until under the threshold.

        torch does so only where ``set_per_process_memory_fraction`` set a limit.
        """
        threshold = self.settings.garbage_collection_threshold
        if not threshold or self.settings.capacity_bytes is None:
            return
        target = self.reserved_bytes - int(threshold * self._limit)
        freed = 0
        while target > freed:
            large = [self._at[a] for p, blocks in self._free.items() if not p[0] for _, a in blocks]
            whole = [block for block in large if block.whole]
            if not whole:
                return
            ages = {block: self._searches[0] - block.searches for block in whole}
            average = sum(ages.values()) / len(ages)
            for block, age in ages.items():
                if age >= average:
                    freed += block.size
                    self._give_back(block)


def segment_size(size: int) -> int:
    """Return the size of the segment that is reserved for a block of ``size`` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def _round_to_division(size: int, divisions: int) -> int:
    if size & (size - 1) == 0:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if not step:
        return floor << 1
    return -(-size // step) * step
