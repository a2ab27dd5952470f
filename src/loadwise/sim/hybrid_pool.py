"""Blocks of the hybrid core: users, names and the queue of free ones. The same as `kv_blocks`, on an array."""

from .compiled import compilable
from .fast_state import Words
from .hybrid_state import (
    BLOCK_BITS,
    GROUP_BITS,
    N_FREE,
    NAME,
    NEXT,
    PREV,
    QUEUE,
    SAME_NEXT,
    SAME_PREV,
    TABLE,
    TABLE_MASK,
    USERS,
)

_BLOCK_MASK = (1 << BLOCK_BITS) - 1
_GROUP_MASK = (1 << GROUP_BITS) - 1


@compilable
def slot_of(m: Words, name: int) -> int:
    """The place at which a name's search begins."""
    origin = name >> (BLOCK_BITS + GROUP_BITS)
    block = (name >> GROUP_BITS) & _BLOCK_MASK
    # Low bits only: they are the same whether or not a product overflows.
    return (origin * 2654435761 + block * 2246822507 + (name & _GROUP_MASK) * 3266489917) & m[TABLE_MASK]


@compilable
def table_place(m: Words, name: int) -> int:
    """Where a name stands in the table, or where it would."""
    table, mask = m[TABLE], m[TABLE_MASK]
    i = slot_of(m, name)
    while m[table + 2 * i] != 0 and m[table + 2 * i] != name:
        i = (i + 1) & mask
    return table + 2 * i


@compilable
def find_block(m: Words, name: int) -> int:
    """The first block of this name, or 0."""
    place = table_place(m, name)
    return m[place + 1] if m[place] == name else 0


@compilable
def name_block(m: Words, block: int, name: int) -> None:
    """Say what a full block holds; it stands behind others of the same name."""
    m[block + NAME] = name
    place = table_place(m, name)
    if m[place] == 0:
        m[place] = name
        m[place + 1] = block
        m[block + SAME_NEXT] = m[block + SAME_PREV] = block
        return
    head = m[place + 1]
    tail = m[head + SAME_PREV]
    m[tail + SAME_NEXT] = block
    m[block + SAME_PREV] = tail
    m[block + SAME_NEXT] = head
    m[head + SAME_PREV] = block


@compilable
def unname_block(m: Words, block: int) -> None:
    """Forget what a block holds."""
    name = m[block + NAME]
    if name == 0:
        return
    m[block + NAME] = 0
    place = table_place(m, name)
    following = m[block + SAME_NEXT]
    if following == block:
        drop_name(m, place)
        return
    before = m[block + SAME_PREV]
    m[before + SAME_NEXT] = following
    m[following + SAME_PREV] = before
    if m[place + 1] == block:
        m[place + 1] = following


@compilable
def drop_name(m: Words, place: int) -> None:
    """Take an entry out of the table, and move those behind it up, so that every search still finds them."""
    table, mask = m[TABLE], m[TABLE_MASK]
    hole = (place - table) >> 1
    i = hole
    while True:
        i = (i + 1) & mask
        name = m[table + 2 * i]
        if name == 0:
            break
        # An entry may fill the hole unless its own search begins behind the hole.
        if ((i - slot_of(m, name)) & mask) >= ((i - hole) & mask):
            m[table + 2 * hole] = name
            m[table + 2 * hole + 1] = m[table + 2 * i + 1]
            hole = i
    m[table + 2 * hole] = 0
    m[table + 2 * hole + 1] = 0


@compilable
def leave_queue(m: Words, block: int) -> None:
    """A block is not free any more."""
    following, before = m[block + NEXT], m[block + PREV]
    m[before + NEXT] = following
    m[following + PREV] = before
    m[N_FREE] -= 1


@compilable
def take_block(m: Words) -> int:
    """The first of the queue, which must have one; its content is gone."""
    block = m[m[QUEUE] + NEXT]
    leave_queue(m, block)
    unname_block(m, block)
    m[block + USERS] = 1
    return block


@compilable
def touch_block(m: Words, block: int) -> None:
    """One more user of a block that was found."""
    if m[block + USERS] == 0:
        leave_queue(m, block)
    m[block + USERS] += 1


@compilable
def give_back(m: Words, block: int) -> None:
    """One user less; a block without users queues up, at the end if it has a name, else in front."""
    m[block + USERS] -= 1
    if m[block + USERS] > 0:
        return
    queue = m[QUEUE]
    following = queue if m[block + NAME] else m[queue + NEXT]
    before = m[following + PREV]
    m[block + NEXT] = following
    m[block + PREV] = before
    m[before + NEXT] = block
    m[following + PREV] = block
    m[N_FREE] += 1
