"""What requests hold of the block pool: full attention, and the checkpoints of linear-attention state.

Semantics of vLLM V1 (`kv_cache_manager.py`, `single_type_kv_cache_manager.py`, mamba cache mode "align"). A hybrid
model has one group of full-attention layers and `n_state_groups` groups of layers whose memory is a state of fixed
size; vLLM makes their pages equally large, so one block holds `block_size` tokens of attention or one state. A request
keeps its running state of each group in the block of the tokens it is at. When it passes into the next block it takes a
new state block, copies, and gives the old one back a step later; if the old one stood exactly at a block's end it has a
name and serves as a checkpoint. Hence a prefix is found only up to a boundary whose attention blocks and states of all
groups are still there, and prefill chunks are cut at such boundaries. That a running request of a hybrid model costs
several thousand tokens more than its context is not set anywhere: it follows.
"""

import msgspec

from .content import Line, block_name
from .kv_blocks import BlockPool

_GROUP_BITS = 3
MAX_STATE_GROUPS = (1 << _GROUP_BITS) - 1


class Held:
    """One request's blocks."""

    __slots__ = ("attention", "last_state", "n_dropped", "n_named", "n_states", "states")

    def __init__(self, n_state_groups: int) -> None:
        self.attention: list[int] = []
        self.states: list[list[int | None]] = [[] for _ in range(n_state_groups)]
        """By group, as long as `attention`; None where there never was, or is no longer, a state."""
        self.last_state: int | None = None
        """Where the states stood before the newest ones were taken."""
        self.n_named = 0
        self.n_dropped = 0
        """Blocks before which no state is held any more."""
        self.n_states = 0
        """States of each group; groups hold theirs at the same places."""

    def clear(self) -> None:
        """Hold nothing."""
        self.attention = []
        self.states = [[] for _ in self.states]
        self.last_state = None
        self.n_named = self.n_dropped = self.n_states = 0

    def blocks(self) -> list[int]:
        """All of them, in the order in which they are given back: states, then the context's tail first."""
        states = [block for group in self.states for block in reversed(group) if block is not None]
        return states + self.attention[::-1]


class Hit(msgspec.Struct, frozen=True):
    """The longest reusable beginning of a prompt."""

    attention: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    n_attention: int = 0
    """Blocks of attention alone that are there; more than can be used where states are missing."""
    is_fresh: bool = False
    """A state in it is only being computed in this very step, so it cannot be used before the next."""


class KvCache:
    """All blocks of one engine."""

    def __init__(self, pool: BlockPool, block_size: int, n_state_groups: int = 0, *, has_prefix_cache: bool = True):
        self.pool = pool
        self.block_size = block_size
        self.n_state_groups = n_state_groups
        self.has_prefix_cache = has_prefix_cache
        self._states_named_now: set[int] = set()

    def begin_step(self) -> None:
        """States that were computed in the last step may be used from now on."""
        self._states_named_now.clear()

    def blocks_of(self, n_tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-n_tokens // self.block_size)

    def most_blocks(self, n_tokens: int) -> int:
        """What a request of so many computed tokens can hold at most while it runs."""
        return self.blocks_of(n_tokens) + 2 * self.n_state_groups

    def find(self, line: Line, n_tokens: int) -> Hit:
        """What is there of a prompt of `n_tokens`; its last token is always computed anew."""
        if not self.has_prefix_cache:
            return Hit()
        attention: list[int] = []
        for i in range((n_tokens - 1) // self.block_size):
            block = self.pool.find(block_name(line, i) << _GROUP_BITS)
            if block is None:
                break
            attention.append(block)
        if not self.n_state_groups:
            return Hit(tuple(attention), n_attention=len(attention))
        for n in range(len(attention), 0, -1):
            states = [
                self.pool.find(block_name(line, n - 1) << _GROUP_BITS | g + 1) for g in range(self.n_state_groups)
            ]
            found = tuple(block for block in states if block is not None)
            if len(found) == self.n_state_groups:
                is_fresh = any(block in self._states_named_now for block in found)
                return Hit(tuple(attention[:n]), found, len(attention), is_fresh)
        return Hit(n_attention=len(attention))

    def n_needed(self, hit: Hit, n_tokens: int) -> int:
        """Free blocks that a request entering with `hit` and `n_tokens` uses up; found blocks that queue count too."""
        n_new = self.blocks_of(n_tokens) - len(hit.attention)
        n_queueing = sum(self.pool.is_free(block) for block in (*hit.attention, *hit.states))
        return n_new + n_queueing + (self.n_state_groups if n_new else 0)

    def enter(self, held: Held, hit: Hit) -> None:
        """Take what was found."""
        for block in (*hit.attention, *hit.states):
            self.pool.touch(block)
        n = len(hit.attention)
        held.attention = list(hit.attention)
        held.n_named = n
        if n and self.n_state_groups:
            held.states = [[*[None] * (n - 1), block] for block in hit.states]
            held.last_state = n - 1
            held.n_states = 1

    def grow(self, held: Held, line: Line, n_computed: int, n_new: int, checkpoint: int = 0) -> bool:
        """Room for `n_new` tokens after `n_computed`, and names for the blocks that become full. False: there is none.

        States that are not needed any more are given back in either case.

        Args:
            checkpoint: Blocks up to the last boundary of the request's prompt at which another could resume.
        """
        n_full = (n_computed + n_new) // self.block_size
        n_blocks = len(held.attention)
        # The usual decode step moves nothing: room is there, no block becomes full, one state is held, at the end.
        is_still = held.n_states <= 1 and n_full <= held.n_named and (n_full != checkpoint or n_full < n_blocks)
        if is_still and n_computed + n_new <= n_blocks * self.block_size:
            return True
        self._drop_states(held, n_computed)
        n_required = self.blocks_of(n_computed + n_new)
        n_more = n_required - len(held.attention)
        if n_more > 0:
            n_states = 0 if held.attention and not self.has_prefix_cache else self.n_state_groups
            if n_more + n_states > self.pool.n_free:
                return False
            self._take(held, n_required, n_more)
        if self.has_prefix_cache:
            self._name(held, line, n_full)
            if n_full and n_full == checkpoint:
                # vLLM says so once more in the step after, so nobody else resumes there before the one after that.
                states = (group[n_full - 1] for group in held.states)
                self._states_named_now.update(block for block in states if block is not None)
        return True

    def give_back(self, held: Held) -> None:
        """Everything a request holds; what has names can be found again."""
        self.pool.give_back(held.blocks())
        held.clear()

    def unname_after(self, held: Held, n_computed: int) -> None:
        """Withdraw the names of blocks that were full only if this step had computed them."""
        for i in range(n_computed // self.block_size, held.n_named):
            for block in (held.attention[i], *(group[i] for group in held.states)):
                if block is not None:
                    self.pool.unname(block)

    def _take(self, held: Held, n_required: int, n_more: int) -> None:
        was = len(held.attention)
        for group in held.states:
            # Without a prefix cache no checkpoint is of use, and the one state stays where it is.
            state = group.pop() if was and not self.has_prefix_cache else self.pool.take(1)[0]
            group.extend([None] * (n_required - 1 - len(group)))
            group.append(state)
        if self.n_state_groups and (not was or self.has_prefix_cache):
            held.n_states += 1
        if was:
            held.last_state = was - 1
        held.attention.extend(self.pool.take(n_more))

    def _drop_states(self, held: Held, n_computed: int) -> None:
        if held.n_states <= 1 or not self.has_prefix_cache:
            return
        n_passed = max(n_computed - 1, 0) // self.block_size
        group = held.states[0]
        gone = [i for i in range(min(n_passed, len(group)) - 1, held.n_dropped - 1, -1) if group[i] is not None]
        last = held.last_state
        is_last_gone = last is not None and last < self.blocks_of(n_computed) - 1 and group[last] is not None
        if last is not None and is_last_gone and last not in gone:
            gone.append(last)
        for group in held.states:
            self.pool.give_back([block for i in gone if (block := group[i]) is not None])
            for i in gone:
                group[i] = None
        held.n_states -= len(gone)
        held.n_dropped = min(max(n_passed, held.n_dropped), len(held.attention))

    def _name(self, held: Held, line: Line, n_full: int) -> None:
        for i in range(held.n_named, n_full):
            name = block_name(line, i) << _GROUP_BITS
            self.pool.name(held.attention[i], name)
            for g, group in enumerate(held.states):
                block = group[i]
                if block is not None:
                    self.pool.name(block, name | g + 1)
                    self._states_named_now.add(block)
        held.n_named = max(held.n_named, n_full)
