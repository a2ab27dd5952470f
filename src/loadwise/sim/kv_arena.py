"""One memory for the KV blocks of several engines on a GPU.

Each engine has its own blocks, of its own size and with its own names; what they share is the memory behind them. A
block takes memory while somebody uses it, and while its content waits to be found again. Whoever needs memory gets that
of the content unused for longest, whosever it is. What is in use is never taken away: an engine that finds no memory
lets nobody in, or preempts among its own. (How real engines share one cache is not standardised; this is the rule that
vLLM's own free queue follows, over the engines together.)
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from loadwise.kernel.errors import LawBroken

from .kv_blocks import BlockPool


class KvArena:
    """Memory of `capacity_bytes`, and the pools that live in it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Of blocks that somebody uses."""
        self.cached_bytes = 0
        """Of blocks that nobody uses and that can be found."""
        self.pools: dict[str, ArenaPool] = {}
        self._serial = 0

    def open(self, name: str, block_bytes: int, freed: Callable[[], None] = lambda: None) -> "ArenaPool":
        """A new pool under a name; an older one of that name gives everything back.

        Args:
            freed: Called when memory of this pool became free for others.
        """
        old = self.pools.pop(name, None)
        if old is not None:
            self.used_bytes -= old.n_used * old.block_bytes
            self.cached_bytes -= old.n_cached * old.block_bytes
        self.pools[name] = ArenaPool(self, block_bytes, freed)
        return self.pools[name]

    def next_serial(self) -> int:
        """Of an event, in order."""
        self._serial += 1
        return self._serial

    def make_room(self, n_bytes: int) -> None:
        """Forget the content unused for longest until so much memory is free.

        Raises:
            LawBroken: all of it is in use.
        """
        while self.used_bytes + self.cached_bytes + n_bytes > self.capacity_bytes:
            oldest = min((pool for pool in self.pools.values() if pool.n_cached), key=ArenaPool.oldest, default=None)
            if oldest is None:
                raise LawBroken(
                    "L4", f"{n_bytes} bytes are taken, {self.used_bytes} of {self.capacity_bytes} are in use"
                )
            oldest.forget_oldest()

    def check(self) -> None:
        """Raise `LawBroken` where the memory is overcommitted, or its books do not balance."""
        used = sum(pool.n_used * pool.block_bytes for pool in self.pools.values())
        cached = sum(pool.n_cached * pool.block_bytes for pool in self.pools.values())
        if (used, cached) != (self.used_bytes, self.cached_bytes):
            raise LawBroken(
                "L4", f"pools use {used} and cache {cached} bytes, counted {self.used_bytes}, {self.cached_bytes}"
            )
        if used + cached > self.capacity_bytes:
            raise LawBroken("L4", f"{used + cached} bytes are taken of {self.capacity_bytes} that engines share")


class ArenaPool(BlockPool):
    """One engine's blocks in a shared memory; there are as many as would fit if it were alone."""

    def __init__(self, arena: KvArena, block_bytes: int, freed: Callable[[], None]) -> None:
        super().__init__(arena.capacity_bytes // block_bytes)
        self.block_bytes = block_bytes
        self.n_used = 0
        self._arena = arena
        self._freed = freed
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Free blocks with content, oldest first, with the serial of when they became free."""

    @property
    def n_cached(self) -> int:
        """Free blocks whose content takes memory."""
        return len(self._cached)

    @property
    def n_free(self) -> int:
        """Blocks that could be taken now: what others use is not to be had."""
        arena = self._arena
        return min(len(self._free), (arena.capacity_bytes - arena.used_bytes) // self.block_bytes)

    @property
    def is_starved(self) -> bool:
        """Whether others use memory, so that waiting for them may help."""
        return self._arena.used_bytes > self.n_used * self.block_bytes

    def oldest(self) -> int:
        """When the block unused for longest became free."""
        return next(iter(self._cached.values()))

    def forget_oldest(self) -> None:
        """The content unused for longest is gone, and its memory free."""
        block, _ = self._cached.popitem(last=False)
        self.unname(block)
        self._free.move_to_end(block, last=False)
        self._arena.cached_bytes -= self.block_bytes

    def take(self, n: int) -> list[int]:
        if n > self.n_free:
            raise LawBroken("L4", f"{n} blocks are taken, {self.n_free} of {self.n_blocks} are free")
        taken = []
        for _ in range(n):
            block = next(iter(self._free))
            if block in self._cached:
                self._uncache(block)
            else:
                self._arena.make_room(self.block_bytes)
            taken += super().take(1)
            self._use(1)
        return taken

    def touch(self, block: int) -> None:
        if self.is_free(block):
            self._uncache(block)
            self._use(1)
        super().touch(block)

    def give_back(self, blocks: Iterable[int]) -> None:
        n_before = self.n_used
        for block in blocks:
            super().give_back([block])
            if self.is_free(block):
                self._use(-1)
                if self.is_named(block):
                    self._cached[block] = self._arena.next_serial()
                    self._arena.cached_bytes += self.block_bytes
        if self.n_used < n_before:
            self._freed()

    def _uncache(self, block: int) -> None:
        del self._cached[block]
        self._arena.cached_bytes -= self.block_bytes

    def _use(self, n: int) -> None:
        self.n_used += n
        self._arena.used_bytes += n * self.block_bytes
