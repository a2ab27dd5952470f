"""The block pool against a model that is too simple to be wrong."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadwise.kernel.errors import LawBroken
from loadwise.sim.kv_blocks import BlockPool

N_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Blocks are taken, named, found, shared and given back in any order; a list plays the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS)
        self.queue = list(range(N_BLOCKS))
        self.holders: list[list[int]] = []
        self.name_of: dict[int, int] = {}

    @rule(n=st.integers(1, N_BLOCKS), names=st.lists(st.integers(0, 4), min_size=N_BLOCKS, max_size=N_BLOCKS))
    def take(self, n: int, names: list[int]) -> None:
        """Whoever takes gets the head of the queue, whose names are then forgotten; too many are refused."""
        if n > len(self.queue):
            with pytest.raises(LawBroken):
                self.pool.take(n)
            return
        expected, self.queue = self.queue[:n], self.queue[n:]
        assert self.pool.take(n) == expected
        for block, name in zip(expected, names, strict=False):
            self.name_of.pop(block, None)
            if name:
                self.pool.name(block, name)
                self.name_of[block] = name
        self.holders.append(expected)

    @rule(name=st.integers(1, 4))
    def share(self, name: int) -> None:
        """What is found holds the content that was asked for, and may queue anywhere or be in use."""
        block = self.pool.find(name)
        assert (block is None) == (name not in self.name_of.values())
        if block is not None:
            assert self.name_of[block] == name
            self.pool.touch(block)
            if block in self.queue:
                self.queue.remove(block)
            self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Blocks without users queue up in the order in which they come, nameless ones in front, names intact."""
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.give_back(reversed(blocks))
        in_use = {block for holder in self.holders for block in holder}
        free = [block for block in reversed(blocks) if block not in in_use]
        self.queue = [block for block in free[::-1] if block not in self.name_of] + self.queue
        self.queue += [block for block in free if block in self.name_of]

    @invariant()
    def agrees(self) -> None:
        """Free blocks, users and names are those of the model."""
        assert self.pool.n_free == len(self.queue)
        assert self.pool.n_named == len(self.name_of)
        held: dict[int, int] = {}
        for holder in self.holders:
            for block in holder:
                held[block] = held.get(block, 0) + 1
        self.pool.check(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_block_is_not_given_back_twice() -> None:
    """Giving back what nobody holds breaks a law, and so do books that do not agree."""
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.give_back([block])
    with pytest.raises(LawBroken):
        pool.give_back([block])
    with pytest.raises(LawBroken):
        BlockPool(1).check({0: 1})
