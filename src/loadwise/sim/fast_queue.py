"""The fast core's containers: linked lists of agents, heaps, and the queue of free blocks as segments."""

from .compiled import compilable
from .fast_state import (
    AFTER,
    BEFORE,
    BLOCK_SIZE,
    DUE,
    FINISH,
    FREE,
    LEFT,
    LOOSE,
    N_BLOCKS,
    N_DECODING,
    N_DUE,
    N_LEFT,
    N_NODE,
    NODES,
    ORDER,
    QUEUE,
    RIGHT,
    SHARED_BLOCKS,
    Reals,
    Words,
)


@compilable
def unlink(m: Words, agent: int) -> None:
    """Take an agent out of its list."""
    after, before = m[agent + AFTER], m[agent + BEFORE]
    m[before + AFTER] = after
    m[after + BEFORE] = before


@compilable
def link_before(m: Words, agent: int, other: int) -> None:
    """Put an agent before another, or before a list's own end: last."""
    before = m[other + BEFORE]
    m[agent + BEFORE] = before
    m[agent + AFTER] = other
    m[before + AFTER] = agent
    m[other + BEFORE] = agent


@compilable
def push_due(m: Words, f: Reals, at_s: float, agent: int) -> None:
    """An agent will ask at an instant. Ties go to the lower handle."""
    base, i = m[DUE], m[N_DUE]
    m[N_DUE] = i + 1
    while i > 0:
        up = (i - 1) >> 1
        other = f[base + 2 * up]
        if other < at_s or (other == at_s and m[base + 2 * up + 1] < agent):
            break
        f[base + 2 * i] = other
        m[base + 2 * i + 1] = m[base + 2 * up + 1]
        i = up
    f[base + 2 * i] = at_s
    m[base + 2 * i + 1] = agent


@compilable
def pop_due(m: Words, f: Reals) -> int:
    """The agent that is due first."""
    base, n = m[DUE], m[N_DUE] - 1
    m[N_DUE] = n
    first = m[base + 1]
    at_s, agent = f[base + 2 * n], m[base + 2 * n + 1]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        x = f[base + 2 * down]
        if down + 1 < n:
            y = f[base + 2 * down + 2]
            if y < x or (y == x and m[base + 2 * down + 3] < m[base + 2 * down + 1]):
                down += 1
                x = y
        if x > at_s or (x == at_s and m[base + 2 * down + 1] > agent):
            break
        f[base + 2 * i] = x
        m[base + 2 * i + 1] = m[base + 2 * down + 1]
        i = down
    f[base + 2 * i] = at_s
    m[base + 2 * i + 1] = agent
    return first


@compilable
def is_sooner(m: Words, one: int, other: int) -> bool:
    """Whether one decoding agent finishes before another: by counter, then by entry."""
    x, y = m[one + N_LEFT], m[other + N_LEFT]
    return x < y or (x == y and m[one + ORDER] < m[other + ORDER])


@compilable
def push_finish(m: Words, engine: int, agent: int) -> None:
    """An agent begins to decode."""
    n = m[engine + N_DECODING]
    m[engine + N_DECODING] = n + 1
    sift_up(m, m[engine + FINISH], n, agent)


@compilable
def sift_up(m: Words, base: int, i: int, agent: int) -> None:
    """Put an agent at place `i` of a heap or above."""
    while i > 0:
        up = (i - 1) >> 1
        other = m[base + up]
        if is_sooner(m, other, agent):
            break
        m[base + i] = other
        i = up
    m[base + i] = agent


@compilable
def remove_finish(m: Words, engine: int, agent: int) -> None:
    """Take an agent out of its engine's heap."""
    base, n = m[engine + FINISH], m[engine + N_DECODING] - 1
    m[engine + N_DECODING] = n
    i = 0
    while m[base + i] != agent:
        i += 1
    last = m[base + n]
    if last == agent:
        return
    if i > 0 and is_sooner(m, last, m[base + ((i - 1) >> 1)]):
        sift_up(m, base, i, last)
        return
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        if down + 1 < n and is_sooner(m, m[base + down + 1], m[base + down]):
            down += 1
        other = m[base + down]
        if is_sooner(m, last, other):
            break
        m[base + i] = other
        i = down
    m[base + i] = last


@compilable
def evict(m: Words, engine: int, n: int) -> None:
    """Take `n` blocks from the front of the queue: nameless ones first, then the longest unused."""
    m[engine + FREE] -= n
    loose = min(n, m[engine + LOOSE])
    m[engine + LOOSE] -= loose
    n -= loose
    queue = m[engine + QUEUE]
    while n > 0:
        node = m[queue + RIGHT]
        c = m[node + N_BLOCKS]
        if c > n:
            m[node + N_BLOCKS] = c - n
            return
        n -= c
        drop_node(m, node)


@compilable
def drop_node(m: Words, node: int) -> None:
    """Take a node out of its queue."""
    right, left = m[node + RIGHT], m[node + LEFT]
    m[left + RIGHT] = right
    m[right + LEFT] = left
    m[node + N_BLOCKS] = 0


@compilable
def append_segment(m: Words, engine: int, program: int, n_blocks: int, n_computed: int) -> None:
    """A program's full blocks queue up at the end, its tail first; a last one that is not full has no name."""
    n_full = max(n_computed // m[BLOCK_SIZE] - m[SHARED_BLOCKS], 0)
    m[engine + FREE] += n_blocks
    m[engine + LOOSE] += n_blocks - n_full
    if n_full > 0:
        node, queue = m[engine + NODES] + N_NODE * program, m[engine + QUEUE]
        left = m[queue + LEFT]
        m[node + N_BLOCKS] = n_full
        m[node + LEFT] = left
        m[node + RIGHT] = queue
        m[left + RIGHT] = node
        m[queue + LEFT] = node


@compilable
def take_hit(m: Words, engine: int, program: int) -> int:
    """Take what is left of a program's blocks out of the queue.

    A context only grows, and its last token is never computed before the next request, so all of them are hits.
    """
    node = m[engine + NODES] + N_NODE * program
    hit = m[node + N_BLOCKS]
    if hit > 0:
        drop_node(m, node)
        m[engine + FREE] -= hit
    return hit
