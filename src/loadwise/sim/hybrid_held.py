"""What calls of the hybrid core hold: attention and checkpoints of state. The same as `kv_cache`, on an array."""

from .compiled import compilable
from .fast_state import Words
from .hybrid_pool import find_block, give_back, name_block, take_block, touch_block
from .hybrid_state import (
    BLOCK_BITS,
    FOUND,
    FREE_ROWS,
    GONE,
    GROUP_BITS,
    GROUPS,
    IS_FRESH,
    LAST_STATE,
    LINE,
    N_ATTENTION,
    N_COMPUTED,
    N_DROPPED,
    N_FOUND,
    N_FREE,
    N_FREE_ROWS,
    N_HELD,
    N_LINE,
    N_NAMED,
    N_STATES,
    ROW,
    ROW_SIZE,
    SERIAL,
    SIZE,
    STAMP,
    TOKENS_PROMPT,
    USERS,
)


@compilable
def name_of(m: Words, lines: Words, call: int, i: int) -> int:
    """The name of block `i` of a call's line, for attention; a group's states add its number, from 1."""
    run = m[call + LINE] + 2 * (m[call + N_LINE] - 1)
    while lines[run] > i:
        run -= 2
    return ((lines[run + 1] << BLOCK_BITS) | i) << GROUP_BITS


@compilable
def blocks_of(m: Words, n_tokens: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return (n_tokens + m[SIZE] - 1) // m[SIZE]


@compilable
def find(m: Words, lines: Words, call: int, n_tokens: int) -> None:
    """What is there of a prompt; its last token is always computed anew."""
    found, groups = m[FOUND], m[GROUPS]
    n = 0
    for i in range((n_tokens - 1) // m[SIZE]):
        block = find_block(m, name_of(m, lines, call, i))
        if block == 0:
            break
        m[found + i] = block
        n += 1
    m[N_ATTENTION] = n
    m[IS_FRESH] = 0
    states = found + m[ROW_SIZE]
    while n > 0 and groups > 0:
        name = name_of(m, lines, call, n - 1)
        n_states = 0
        is_fresh = 0
        for g in range(groups):
            block = find_block(m, name + g + 1)
            if block:
                m[states + g] = block
                n_states += 1
                if m[block + STAMP] == m[SERIAL]:
                    is_fresh = 1
        if n_states == groups:
            m[IS_FRESH] = is_fresh
            break
        n -= 1
    m[N_FOUND] = n


@compilable
def n_needed(m: Words, n_tokens: int) -> int:
    """Free blocks that a call entering with what was found uses up; found blocks that queue count too."""
    found, n, groups = m[FOUND], m[N_FOUND], m[GROUPS]
    needed = blocks_of(m, n_tokens) - n
    if needed > 0:
        needed += groups
    for i in range(n):
        if m[m[found + i] + USERS] == 0:
            needed += 1
    if n > 0:
        for g in range(groups):
            if m[m[found + m[ROW_SIZE] + g] + USERS] == 0:
                needed += 1
    return needed


@compilable
def enter(m: Words, call: int) -> None:
    """Take what was found."""
    found, n, groups, size = m[FOUND], m[N_FOUND], m[GROUPS], m[ROW_SIZE]
    m[N_FREE_ROWS] -= 1
    row = m[m[FREE_ROWS] + m[N_FREE_ROWS]]
    m[call + ROW] = row
    m[call + N_HELD] = m[call + N_NAMED] = n
    m[call + N_DROPPED] = m[call + N_STATES] = 0
    m[call + LAST_STATE] = -1
    for i in range(n):
        touch_block(m, m[found + i])
        m[row + i] = m[found + i]
    if n == 0 or groups == 0:
        return
    for g in range(groups):
        states = row + (1 + g) * size
        for i in range(n - 1):
            m[states + i] = 0
        touch_block(m, m[found + size + g])
        m[states + n - 1] = m[found + size + g]
    m[call + LAST_STATE] = n - 1
    m[call + N_STATES] = 1


@compilable
def leave_row(m: Words, call: int) -> None:
    """Everything a call holds is given back: states, then the context, its tail first."""
    row, n, size = m[call + ROW], m[call + N_HELD], m[ROW_SIZE]
    for g in range(m[GROUPS]):
        states = row + (1 + g) * size
        for i in range(n - 1, -1, -1):
            if m[states + i]:
                give_back(m, m[states + i])
    for i in range(n - 1, -1, -1):
        give_back(m, m[row + i])
    m[m[FREE_ROWS] + m[N_FREE_ROWS]] = row
    m[N_FREE_ROWS] += 1
    m[call + ROW] = 0
    m[call + N_HELD] = m[call + N_NAMED] = m[call + N_DROPPED] = m[call + N_STATES] = 0
    m[call + LAST_STATE] = -1


@compilable
def grow(m: Words, lines: Words, call: int, n_new: int) -> bool:
    """Room for `n_new` more tokens, and names for the blocks that become full. False: there is none."""
    size, n_computed, n_blocks = m[SIZE], m[call + N_COMPUTED], m[call + N_HELD]
    n_full = (n_computed + n_new) // size
    checkpoint = (m[call + TOKENS_PROMPT] - 1) // size
    is_still = m[call + N_STATES] <= 1 and n_full <= m[call + N_NAMED]
    if is_still and (n_full != checkpoint or n_full < n_blocks) and n_computed + n_new <= n_blocks * size:
        return True
    drop_states(m, call, n_computed)
    n_required = blocks_of(m, n_computed + n_new)
    if n_required > n_blocks:
        if n_required - n_blocks + m[GROUPS] > m[N_FREE]:
            return False
        take(m, call, n_required)
    name(m, lines, call, n_full)
    if n_full > 0 and n_full == checkpoint:
        # vLLM says so once more in the step after, so nobody else resumes there before the one after that.
        for g in range(m[GROUPS]):
            block = m[m[call + ROW] + (1 + g) * m[ROW_SIZE] + n_full - 1]
            if block:
                m[block + STAMP] = m[SERIAL]
    return True


@compilable
def take(m: Words, call: int, n_required: int) -> None:
    """New blocks: first a state of each group, then attention."""
    row, was, size = m[call + ROW], m[call + N_HELD], m[ROW_SIZE]
    for g in range(m[GROUPS]):
        states = row + (1 + g) * size
        for i in range(was, n_required - 1):
            m[states + i] = 0
        m[states + n_required - 1] = take_block(m)
    if m[GROUPS]:
        m[call + N_STATES] += 1
    if was:
        m[call + LAST_STATE] = was - 1
    for i in range(was, n_required):
        m[row + i] = take_block(m)
    m[call + N_HELD] = n_required


@compilable
def drop_states(m: Words, call: int, n_computed: int) -> None:
    """States that are not needed any more are given back."""
    if m[call + N_STATES] <= 1:
        return
    held, last, first = m[call + N_HELD], m[call + LAST_STATE], m[call + ROW] + m[ROW_SIZE]
    n_passed = max(n_computed - 1, 0) // m[SIZE]
    gone = m[GONE]
    n = 0
    has_last = False
    for i in range(min(n_passed, held) - 1, m[call + N_DROPPED] - 1, -1):
        if m[first + i]:
            m[gone + n] = i
            n += 1
            has_last = has_last or i == last
    if 0 <= last < blocks_of(m, n_computed) - 1 and m[first + last] and not has_last:
        m[gone + n] = last
        n += 1
    for g in range(m[GROUPS]):
        states = first + g * m[ROW_SIZE]
        for k in range(n):
            i = m[gone + k]
            give_back(m, m[states + i])
            m[states + i] = 0
    m[call + N_STATES] -= n
    m[call + N_DROPPED] = min(max(n_passed, m[call + N_DROPPED]), held)


@compilable
def name(m: Words, lines: Words, call: int, n_full: int) -> None:
    """Blocks that have become full get their names, and so do states at their ends."""
    row, size = m[call + ROW], m[ROW_SIZE]
    for i in range(m[call + N_NAMED], n_full):
        base = name_of(m, lines, call, i)
        name_block(m, m[row + i], base)
        for g in range(m[GROUPS]):
            block = m[row + (1 + g) * size + i]
            if block:
                name_block(m, block, base + g + 1)
                m[block + STAMP] = m[SERIAL]
    m[call + N_NAMED] = max(m[call + N_NAMED], n_full)
