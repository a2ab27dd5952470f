"""Memory of the fast core: one array of 64-bit words, and the places of things in it.

All changing state of a run is one array, which is seen twice: `m` as integers, `f` as floats, word by word the same
memory. So it costs two arguments to hand a run to compiled code (a tuple of fifty arrays would cost more than the work
itself), and a copy forks it. Engines, agents and nodes are records in it, and a record's *handle* is the index of its
first word: `m[agent + TURN]` is an agent's turn. Handles are never 0, which therefore means "none". The same functions
run on NumPy arrays (compiled) and on memoryviews of them (plain Python, which indexes those faster than NumPy).
"""

from collections.abc import MutableSequence

Words = MutableSequence[int]
Reals = MutableSequence[float]

(
    N_ENGINES,
    N_AGENTS,
    N_PROGRAMS,
    BLOCK_SIZE,
    BUDGET,
    MAX_SEQS,
    SHARED_BLOCKS,
    HAS_MACRO_STEPS,
    DECIDES,
    MAX_CALLS,
    NEXT_PROGRAM,
    N_LOGGED,
    N_ENTERED,
    N_PREEMPTIONS,
    N_STEPS,
    ASKING,
    CLOCK,
    N_DUE,
    DUE,
    LOG,
    ENGINES,
) = range(21)
"""Header. `DUE`, `LOG` and `ENGINES` are the places where those things begin."""
N_HEADER = 24

(
    PROGRAM,
    TURN,
    ENGINE,
    N_TOKENS,
    N_COMPUTED,
    N_NEW,
    N_LEFT,
    HELD,
    HIT,
    HAS_SAID,
    WAS_PREEMPTED,
    ORDER,
    AFTER,
    BEFORE,
    ARRIVED_AT_S,
    FIRST_AT_S,
) = range(16)
"""An agent. While it decodes, `N_COMPUTED` is an offset to its engine's counter of decode steps, and `N_LEFT` is that
counter's value at its last token; while it waits and reads, they are what they say."""
N_AGENT = 16

(
    N_RUNNING,
    N_DECODING,
    N_WAITING,
    N_OPEN,
    FREE,
    CONTEXT,
    COUNTER,
    READING,
    STEPS,
    IS_SHARED_READY,
    FINISH,
    NODES,
) = range(12)
"""An engine. `CONTEXT`: computed tokens of all that decode. `COUNTER`: decode steps so far. `READING`: the first agent,
in running order, that still reads. `STEPS`: length of the macro-step under way. `FINISH`: where its heap of decoding
agents begins, the next to finish first. `NODES`: where the segments of programs begin. Words 12 to 15 are the ends of
two lists, so that an engine's handle plus `RUNNING` or `WAITING` can stand for an agent."""
RUNNING, WAITING = 0, 2
QUEUE, LOOSE, PHASE, BEGUN_AT_S, FIRST_STEP_S, GROWTH_S, ENDS_AT_S, COSTS = range(16, 24)
"""`QUEUE`: the node at which the queue of free blocks with names begins and ends. `LOOSE`: free blocks without a name,
which stand before it and need no order. `PHASE`: where it is counted how many decoding
agents need a block when the counter has which remainder by the block size."""
(
    FIXED,
    WEIGHTS,
    EXPERTS,
    EXPERT_RATIO,
    GEMM,
    KV,
    ATTENTION,
    REQUEST,
    STATE,
    SCAN,
    TOKEN,
    HOST,
    HOST_REQUEST,
    OVERLAPS,
) = range(COSTS, COSTS + 14)
"""Of a `StepCost`, in this order."""
N_ENGINE = COSTS + 14

RIGHT, LEFT, N_BLOCKS = range(3)
"""A node of a queue of free blocks: neighbours, and a program's blocks in the queue."""
N_NODE = 4

N_DUE_ENTRY = 2
"""Instant and agent."""

L_CALL, L_ENGINE, L_PROMPT, L_HIT, L_ARRIVED_AT_S, L_FIRST_AT_S, L_FINISHED_AT_S = range(7)
"""A line of the log."""
N_LOG = 8
