"""Memory of the hybrid core: one array of 64-bit words seen as integers and as floats, as in `fast_state`.

Blocks, calls, and two list ends are records in it; a record's *handle* is the index of its first word, never 0, so 0
means "none". Calls come last, so that the array can be made longer while handles stay what they are. Lines (whose
conversation a prompt is, see `content`) lie in a second array, as pairs of (first block, origin).
"""

(
    SIZE,
    GROUPS,
    N_BLOCKS,
    BUDGET,
    MOST_NEW,
    MAX_SEQS,
    RESERVES_ALL,
    WATERMARK,
    HAS_MACRO_STEPS,
    BLOCKS,
    QUEUE,
    TABLE,
    TABLE_MASK,
    ROW_SIZE,
    FOUND,
    GONE,
    FREE_ROWS,
    N_FREE_ROWS,
    PLAN,
    OUT,
) = range(20)
"""What stays. `BLOCKS` to `OUT` are places: of blocks, the free queue's end, the table of names, blocks found for the
head of the line, states about to be given back, unused rows, calls of the step under way, and what is said."""
(
    N_FREE,
    N_RUNNING,
    N_WAITING,
    N_PREEMPTIONS,
    QUERY_TOKENS,
    HIT_TOKENS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    SERIAL,
    MOST_NOW,
    HAS_PLAN,
    N_PLAN,
    IS_QUIET,
    HAS_PREEMPTED,
    IS_SCHEDULED,
    N_OUT,
    RUN_STEPS,
    RUN_FIRST_S,
    RUN_GROWTH_S,
    BEGAN_AT_S,
    SPEED,
) = range(20, 41)
"""What changes. `SERIAL` counts schedules: a state that was named in this one cannot be used before the next."""
B_DECODE, B_CONTEXT, B_PREFILL, B_NEW, B_PAIRS, B_PREFIX = range(41, 47)
"""The batch of the step under way, as in `step_time`."""
N_FOUND, N_ATTENTION, IS_FRESH = range(47, 50)
"""What `find` found: usable blocks, blocks of attention alone, whether a state is too fresh."""
RUNNING, WAITING = 52, 54
"""Ends of two lists: their `AFTER` and `BEFORE` are words 0 and 1."""
COSTS = 56
"""Of a `StepCost`, in the order of `fast_run.costs_of`."""
N_HEADER = 72

USERS, NAME, NEXT, PREV, SAME_NEXT, SAME_PREV, STAMP = range(7)
"""A block. `NEXT` and `PREV` in the queue of free ones; `SAME_*` in the circle of blocks with one name; `STAMP` is the
`SERIAL` in which its state was named."""
N_BLOCK = 8

(
    AFTER,
    BEFORE,
    TOKENS_PROMPT,
    TOKENS_OUTPUT,
    N_TOKENS,
    N_COMPUTED,
    N_SAID,
    N_NEW,
    JUNCTION,
    CACHED,
    LINE,
    N_LINE,
    ROW,
    N_HELD,
    N_NAMED,
    N_DROPPED,
    N_STATES,
    LAST_STATE,
) = range(18)
"""A call. `ROW` is where its blocks are listed: `ROW_SIZE` words of attention, then as many of each group of states.
`LINE` and `N_LINE`: where its line is, and its runs. `CACHED` and `LAST_STATE` are -1 where there is none."""
N_CALL = 20

O_CALL, O_TOKENS, O_IS_FIRST, O_IS_FINISHED = range(4)
"""What one call said."""
N_OUTPUT = 4

GROUP_BITS, BLOCK_BITS = 3, 26
"""Of a name: which group, which block of the line; the rest is the origin."""

STEP, SUBMIT, CANCEL, UNSCHEDULED, END_MACRO_STEP = range(5)
"""What the core can be told."""
