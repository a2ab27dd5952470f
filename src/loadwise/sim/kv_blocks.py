"""The pool of KV blocks: reference counts, names of full blocks, and the queue in which free ones wait to be reused.

As in vLLM V1 (`v1/core/block_pool.py`, 0.32): a freed block keeps its name and goes to the end of the queue, or to its
front if it has none; whoever needs a block takes the first of the queue, and only then its name is forgotten (lazy,
least recently used eviction). A block that is found by name while it waits leaves the queue from wherever it stands.
Equal content computed twice stays twice.
"""

from collections import OrderedDict
from collections.abc import Iterable

from loadwise.kernel.errors import LawBroken


class BlockPool:
    """`n_blocks` usable blocks, numbered from 0. (vLLM keeps one more for itself, its null block.)"""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._n_users = [0] * n_blocks
        self._name: list[int | None] = [None] * n_blocks
        self._blocks_by_name: dict[int, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))

    @property
    def n_free(self) -> int:
        """Blocks that nobody uses, those with reusable content included."""
        return len(self._free)

    @property
    def n_named(self) -> int:
        """Blocks whose content can be found."""
        return sum(len(blocks) for blocks in self._blocks_by_name.values())

    def find(self, name: int) -> int | None:
        """A block of this content, or None."""
        blocks = self._blocks_by_name.get(name)
        return None if blocks is None else next(iter(blocks))

    def is_free(self, block: int) -> bool:
        """Whether nobody uses it."""
        return self._n_users[block] == 0

    def take(self, n: int) -> list[int]:
        """The first `n` blocks of the queue; their content is gone.

        Raises:
            LawBroken: there are not so many.
        """
        if n > len(self._free):
            raise LawBroken("L4", f"{n} blocks are taken, {len(self._free)} of {self.n_blocks} are free")
        taken = []
        for _ in range(n):
            block, _ = self._free.popitem(last=False)
            self.unname(block)
            self._n_users[block] = 1
            taken.append(block)
        return taken

    def touch(self, block: int) -> None:
        """One more user of a block that was found."""
        if self._n_users[block] == 0:
            del self._free[block]
        self._n_users[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less of each; those without users queue up in this order, nameless ones in front."""
        for block in blocks:
            if self._n_users[block] < 1:
                raise LawBroken("L4", f"block {block} is given back by nobody")
            self._n_users[block] -= 1
            if self._n_users[block] == 0:
                self._free[block] = None
                if self._name[block] is None:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, name: int) -> None:
        """Say what a block that is full holds."""
        self._name[block] = name
        self._blocks_by_name.setdefault(name, {})[block] = None

    def unname(self, block: int) -> None:
        """Forget what a block holds."""
        name, self._name[block] = self._name[block], None
        if name is not None:
            blocks = self._blocks_by_name[name]
            del blocks[block]
            if not blocks:
                del self._blocks_by_name[name]

    def is_named(self, block: int) -> bool:
        """Whether its content can be found."""
        return self._name[block] is not None

    def check(self, n_held_by_block: dict[int, int]) -> None:
        """Raise `LawBroken` where users, queue and names do not agree with what requests hold."""
        for block in range(self.n_blocks):
            n_users = self._n_users[block]
            if n_users != n_held_by_block.get(block, 0):
                raise LawBroken("L4", f"block {block} has {n_users} users, {n_held_by_block.get(block, 0)} hold it")
            if (n_users == 0) != (block in self._free):
                raise LawBroken("L4", f"block {block} has {n_users} users and queues: {block in self._free}")
            name = self._name[block]
            if name is not None and block not in self._blocks_by_name.get(name, {}):
                raise LawBroken("L4", f"block {block} cannot be found by its name")
        if self.n_named != sum(name is not None for name in self._name):
            raise LawBroken("L4", f"{self.n_named} blocks can be found, not all of them have a name")
