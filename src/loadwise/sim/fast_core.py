"""vLLM's scheduler once more, for millions of calls: segments instead of blocks, counters instead of loops.

Why this is the same machine as `vllm_engine` (and tested to be, hit by hit and instant by instant):

* A program's context only grows, and its blocks are freed together, tail first. So all its cached blocks are neighbours
  in the queue of free blocks, and the queue is a list of *segments*, each eaten from its tail. Blocks without a name
  (the last one of a context, which was not full) stand before them all, so it is enough to count them.
* Requests that decode get one token each in every step. So an engine counts its decode steps; a request stores its
  offset to that counter and its value at its last token; who needs a new block when is known from the remainder of the
  offset by the block size. A step costs the same whether 2 or 200 decode.
* Whoever is preempted is the last that entered and has nothing yet in this step, so one need only pop the tail while
  the blocks needed by all that run exceed the free ones. Blocks are taken afterwards: when somebody is preempted, all
  that was free before is taken in any case.
* A system prompt that all programs share is held by somebody whenever a block is evicted, so it is never evicted.

Required for that, and checked by `fast_run`: first come first served, no hybrid states, no limit on prompt chunks but
the batch's, and a batch larger than `max_num_seqs`, so that every decoding request gets its token.

`m` and `f` are a run's memory as integers and as floats (`fast_state`).
"""

from .compiled import compilable, compiled
from .fast_queue import (
    append_segment,
    evict,
    link_before,
    pop_due,
    push_due,
    push_finish,
    remove_finish,
    take_hit,
    unlink,
)
from .fast_state import (
    AFTER,
    ARRIVED_AT_S,
    ASKING,
    ATTENTION,
    BEFORE,
    BEGUN_AT_S,
    BLOCK_SIZE,
    BUDGET,
    CLOCK,
    CONTEXT,
    COUNTER,
    DECIDES,
    DUE,
    ENDS_AT_S,
    ENGINE,
    ENGINES,
    EXPERT_RATIO,
    EXPERTS,
    FINISH,
    FIRST_AT_S,
    FIRST_STEP_S,
    FIXED,
    FREE,
    GEMM,
    GROWTH_S,
    HAS_MACRO_STEPS,
    HAS_SAID,
    HELD,
    HIT,
    HOST,
    HOST_REQUEST,
    IS_SHARED_READY,
    KV,
    L_ARRIVED_AT_S,
    L_CALL,
    L_ENGINE,
    L_FINISHED_AT_S,
    L_FIRST_AT_S,
    L_HIT,
    L_PROMPT,
    LOG,
    MAX_CALLS,
    MAX_SEQS,
    N_COMPUTED,
    N_DECODING,
    N_DUE,
    N_ENGINE,
    N_ENGINES,
    N_ENTERED,
    N_LEFT,
    N_LOG,
    N_LOGGED,
    N_NEW,
    N_OPEN,
    N_PREEMPTIONS,
    N_PROGRAMS,
    N_RUNNING,
    N_STEPS,
    N_TOKENS,
    N_WAITING,
    NEXT_PROGRAM,
    ORDER,
    OVERLAPS,
    PHASE,
    PROGRAM,
    READING,
    REQUEST,
    RUNNING,
    SCAN,
    SHARED_BLOCKS,
    STATE,
    STEPS,
    TOKEN,
    TURN,
    WAITING,
    WAS_PREEMPTED,
    WEIGHTS,
    Reals,
    Words,
)

Reads = tuple[int, int, float, int]
"""Of prompt chunks: requests, tokens, pairs and prefix, as in `step_time`."""
Load = tuple[int, int, int, int, float, int]
"""Requests that decode, their context, and the reads."""

INFINITY = float("inf")
TOLERANCE = 1e-6
"""As in `step_time`: a step counts as done a millionth of its length before its end."""
_FEW = 64
"""Up to this block size it is quicker to look at phases than at agents."""


@compilable
def blocks_needed(m: Words, engine: int, k: int) -> int:
    """Blocks that the decoding requests of an engine take in its next `k` steps."""
    size, n_decoding = m[BLOCK_SIZE], m[engine + N_DECODING]
    whole = k // size
    n = whole * n_decoding
    rest = k - whole * size
    if size <= _FEW:
        at = m[engine + COUNTER] % size
        phase = m[engine + PHASE]
        for _ in range(rest):
            n += m[phase + at]
            at += 1
            if at == size:
                at = 0
        return n
    finish, counter = m[engine + FINISH], m[engine + COUNTER]
    for i in range(n_decoding):
        if (-m[m[finish + i] + N_COMPUTED] - counter) % size < rest:
            n += 1
    return n


@compilable
def set_step(m: Words, f: Reals, e: int, at_s: float, k: int, n: int, context: int, reads: Reads) -> None:
    """A run of `k` equal steps begins, fewer where the host's part hides the growth only for so long.

    Args:
        n: Requests that decode, and their `context`.
        reads: Prompt chunks beside them.
    """
    x = f[e + GEMM] * (n + reads[1])
    weights = f[e + WEIGHTS]
    if f[e + EXPERTS] > 0:
        weights += f[e + EXPERTS] * (1 - (1 - f[e + EXPERT_RATIO]) ** (n + reads[1]))
    x, weights = x * x, weights * weights
    cost = f[e + FIXED] + ((x * x + weights * weights) ** 0.5) ** 0.5 + f[e + KV] * context
    cost += f[e + STATE] * n + f[e + TOKEN] * (n + reads[1]) + f[e + REQUEST] * (n + reads[0])
    if reads[0] > 0:
        cost += max(f[e + ATTENTION] * reads[2], f[e + KV] * reads[3]) + f[e + SCAN] * reads[1]
    host = f[e + HOST] + f[e + HOST_REQUEST] * (n + reads[0])
    growth = f[e + KV] * n
    if f[e + OVERLAPS] == 0:
        cost += host
    elif cost < host:
        if k > 1 and growth > 0:
            k = min(k, int((host - cost) / growth) + 1)
            growth = 0.0
        cost = host
    m[e + STEPS] = k
    f[e + BEGUN_AT_S] = at_s
    f[e + FIRST_STEP_S] = cost
    f[e + GROWTH_S] = growth
    f[e + ENDS_AT_S] = at_s + k * cost + growth * (k * (k - 1) / 2)
    m[N_STEPS] += 1


@compilable
def n_done(m: Words, f: Reals, e: int, at_s: float) -> int:
    """Steps of the run under way that are done at an instant."""
    first, growth = f[e + FIRST_STEP_S], f[e + GROWTH_S]
    x = at_s - f[e + BEGUN_AT_S] + TOLERANCE * first
    if growth > 0:
        half = first - growth / 2
        j = int(((half * half + 2 * growth * x) ** 0.5 - half) / growth)
    else:
        j = int(x / first)
    j = max(j, 0)
    while j > 0 and j * first + growth * (j * (j - 1) / 2) > x:
        j -= 1
    while (j + 1) * first + growth * (j * (j + 1) / 2) <= x:
        j += 1
    return min(j, m[e + STEPS])


@compilable
def stop_decoding(m: Words, e: int, agent: int) -> None:
    """Take a decoding request out of all sums: what it has computed is a number of its own again."""
    size = m[BLOCK_SIZE]
    remove_finish(m, e, agent)
    m[m[e + PHASE] + (-m[agent + N_COMPUTED]) % size] -= 1
    n_computed = m[agent + N_COMPUTED] + m[e + COUNTER]
    m[agent + N_COMPUTED] = n_computed
    m[e + CONTEXT] -= n_computed
    m[agent + HELD] = (n_computed + size - 1) // size - m[SHARED_BLOCKS]


@compilable
def preempt(m: Words, e: int, agent: int) -> None:
    """The last that entered gives everything back and waits at the head."""
    if m[e + READING] == agent:
        m[e + READING] = 0
    else:
        stop_decoding(m, e, agent)
        m[agent + N_LEFT] -= m[e + COUNTER]
        m[agent + N_TOKENS] = m[agent + N_COMPUTED] + 1
    append_segment(m, e, m[agent + PROGRAM], m[agent + HELD], m[agent + N_COMPUTED])
    unlink(m, agent)
    m[e + N_RUNNING] -= 1
    m[agent + WAS_PREEMPTED] = 1
    m[agent + N_COMPUTED] = 0
    link_before(m, agent, m[e + WAITING + AFTER])
    m[e + N_WAITING] += 1
    m[N_PREEMPTIONS] += 1


@compilable
def serve_running(m: Words, e: int) -> tuple[bool, int, int]:
    """Room for what runs. Whether somebody was preempted for it, and the reading request's tokens and blocks."""
    size = m[BLOCK_SIZE]
    preempted = False
    while True:
        agent = m[e + READING]
        n_new = 0
        n_blocks = 0
        if agent:
            n_computed = m[agent + N_COMPUTED]
            n_new = min(m[agent + N_TOKENS] - n_computed, m[BUDGET] - m[e + N_DECODING])
            n_blocks = max((n_computed + n_new + size - 1) // size - m[SHARED_BLOCKS] - m[agent + HELD], 0)
        if m[m[e + PHASE] + m[e + COUNTER] % size] + n_blocks <= m[e + FREE]:
            return preempted, n_new, n_blocks
        preempt(m, e, m[e + RUNNING + BEFORE])
        preempted = True


@compilable
def fits(m: Words, e: int, agent: int, n_promised: int) -> bool:
    """Whether a waiting request's whole prompt finds room. Found blocks need none, and are none that are free."""
    size = m[BLOCK_SIZE]
    shared = m[SHARED_BLOCKS] if m[e + IS_SHARED_READY] else 0
    return (m[agent + N_TOKENS] + size - 1) // size - shared <= m[e + FREE] - n_promised


@compilable
def enter(m: Words, e: int, agent: int, budget: int) -> int:
    """The head of the line is let in. Its tokens in this step."""
    size, shared, n_tokens = m[BLOCK_SIZE], m[SHARED_BLOCKS], m[agent + N_TOKENS]
    n_hit = 0
    n_blocks = 0
    if m[e + IS_SHARED_READY]:
        n_blocks = take_hit(m, e, m[agent + PROGRAM])
        n_hit = (n_blocks + shared) * size
    else:
        m[e + IS_SHARED_READY] = 1
        evict(m, e, shared)
    unlink(m, agent)
    m[e + N_WAITING] -= 1
    link_before(m, agent, e + RUNNING)
    m[e + N_RUNNING] += 1
    m[agent + ORDER] = m[N_ENTERED]
    m[N_ENTERED] += 1
    n_new = min(n_tokens - n_hit, budget)
    held = max((n_hit + n_new + size - 1) // size - shared, n_blocks)
    evict(m, e, held - n_blocks)
    m[agent + HELD] = held
    m[agent + N_COMPUTED] = n_hit
    m[agent + N_NEW] = n_new
    if m[agent + WAS_PREEMPTED] == 0:
        m[agent + HIT] = n_hit
    if m[e + READING] == 0:
        m[e + READING] = agent
    return n_new


@compilable
def add_read(m: Words, agent: int, load: Load) -> Load:
    """One more chunk: (decoding requests, their context, requests that read, tokens, pairs, prefix)."""
    n, context, k, tokens, pairs, prefix = load
    n_new, n_computed = m[agent + N_NEW], m[agent + N_COMPUTED]
    if n_new == 1 and m[agent + HAS_SAID]:
        return n + 1, context + n_computed, k, tokens, pairs, prefix
    return n, context, k + 1, tokens + n_new, pairs + n_new * (n_computed + n_new / 2), prefix + n_computed


@compilable
def start_run(m: Words, f: Reals, e: int, at_s: float, is_single: bool) -> None:
    """A run of pure decode steps, until the first request finishes or blocks end; its blocks are taken at its end."""
    k = 1
    n = m[e + N_DECODING]
    if m[HAS_MACRO_STEPS] and not is_single:
        k = m[m[m[e + FINISH]] + N_LEFT] - m[e + COUNTER]
        free = m[e + FREE]
        while k > 1 and n * (k // m[BLOCK_SIZE] + 1) > free and blocks_needed(m, e, k) > free:
            k //= 2
    set_step(m, f, e, at_s, k, n, m[e + CONTEXT], (0, 0, 0.0, 0))


@compilable
def begin_step(m: Words, f: Reals, e: int, at_s: float) -> None:
    """Schedule an engine's next step or macro-step."""
    m[e + STEPS] = 0
    f[e + ENDS_AT_S] = INFINITY
    if m[e + N_RUNNING] == 0 and m[e + N_WAITING] == 0:
        return
    preempted, n_new, n_blocks = serve_running(m, e)
    agent = m[e + READING]
    budget = m[BUDGET] - m[e + N_DECODING] - n_new
    can_enter = not preempted and m[e + N_WAITING] > 0 and m[e + N_RUNNING] < m[MAX_SEQS] and budget > 0
    n_decode = m[m[e + PHASE] + m[e + COUNTER] % m[BLOCK_SIZE]]
    if agent == 0 and not (can_enter and fits(m, e, m[e + WAITING + AFTER], n_decode)):
        # Nothing is taken yet: a run of decode steps takes its blocks at its end.
        start_run(m, f, e, at_s, preempted)
        return
    load = (m[e + N_DECODING], m[e + CONTEXT], 0, 0, 0.0, 0)
    evict(m, e, n_decode)
    if agent:
        evict(m, e, n_blocks)
        m[agent + HELD] += n_blocks
        m[agent + N_NEW] = n_new
        load = add_read(m, agent, load)
    while can_enter:
        head = m[e + WAITING + AFTER]
        if not fits(m, e, head, 0):
            break
        budget -= enter(m, e, head, budget)
        load = add_read(m, head, load)
        can_enter = m[e + N_WAITING] > 0 and m[e + N_RUNNING] < m[MAX_SEQS] and budget > 0
    set_step(m, f, e, at_s, 1, load[0], load[1], (load[2], load[3], load[4], load[5]))


@compilable
def finish_call(m: Words, f: Reals, e: int, agent: int, at_s: float, offsets: Words, output: Words, gap: Reals) -> None:
    """A request is over: its blocks become its program's segment, its agent goes on."""
    program, n_computed = m[agent + PROGRAM], m[agent + N_COMPUTED]
    append_segment(m, e, program, m[agent + HELD], n_computed)
    unlink(m, agent)
    m[e + N_RUNNING] -= 1
    m[e + N_OPEN] -= 1
    call = offsets[program] + m[agent + TURN]
    line = m[LOG] + N_LOG * m[N_LOGGED]
    m[N_LOGGED] += 1
    m[line + L_CALL] = call
    m[line + L_ENGINE] = (e - m[ENGINES]) // N_ENGINE
    m[line + L_PROMPT] = n_computed + 1 - output[call]
    m[line + L_HIT] = m[agent + HIT]
    f[line + L_ARRIVED_AT_S] = f[agent + ARRIVED_AT_S]
    f[line + L_FIRST_AT_S] = f[agent + FIRST_AT_S]
    f[line + L_FINISHED_AT_S] = at_s
    if call + 1 < offsets[program + 1]:
        m[agent + TURN] += 1
        m[agent + N_TOKENS] = n_computed + 1
        push_due(m, f, at_s + gap[call], agent)
    elif m[NEXT_PROGRAM] < m[N_PROGRAMS]:
        m[agent + PROGRAM] = m[NEXT_PROGRAM]
        m[NEXT_PROGRAM] += 1
        m[agent + TURN] = 0
        m[agent + N_TOKENS] = 0
        push_due(m, f, at_s, agent)


@compilable
def end_step(m: Words, f: Reals, e: int, at_s: float, offsets: Words, output: Words, gap: Reals) -> None:
    """What an engine's step under way has computed is there: tokens are said, requests finish."""
    k, first = m[e + STEPS], m[e + READING]
    if first == 0:
        # A run of decode steps takes its blocks now that its length is known, before anything is given back.
        evict(m, e, blocks_needed(m, e, k))
    counter = m[e + COUNTER] + k
    m[e + COUNTER] = counter
    m[e + CONTEXT] += k * m[e + N_DECODING]
    finish = m[e + FINISH]
    while m[e + N_DECODING] > 0:
        agent = m[finish]
        if m[agent + N_LEFT] > counter:
            break
        stop_decoding(m, e, agent)
        finish_call(m, f, e, agent, at_s, offsets, output, gap)
    if first:
        end_reads(m, f, e, first, at_s, offsets, output, gap)


@compilable
def end_reads(m: Words, f: Reals, e: int, first: int, at_s: float, offsets: Words, output: Words, gap: Reals) -> None:
    """Chunks are read; whoever has read everything says a token and decodes from now on."""
    size, counter = m[BLOCK_SIZE], m[e + COUNTER]
    m[e + READING] = 0
    agent = first
    while agent != e + RUNNING:
        following = m[agent + AFTER]
        n_computed = m[agent + N_COMPUTED] + m[agent + N_NEW]
        m[agent + N_COMPUTED] = n_computed
        if n_computed < m[agent + N_TOKENS]:
            m[e + READING] = agent
        else:
            m[agent + N_LEFT] -= 1
            if m[agent + HAS_SAID] == 0:
                m[agent + HAS_SAID] = 1
                f[agent + FIRST_AT_S] = at_s
            if m[agent + N_LEFT] == 0:
                finish_call(m, f, e, agent, at_s, offsets, output, gap)
            else:
                m[e + CONTEXT] += n_computed
                m[agent + N_COMPUTED] = n_computed - counter
                m[agent + N_LEFT] += counter
                m[m[e + PHASE] + (counter - n_computed) % size] += 1
                push_finish(m, e, agent)
        agent = following


@compilable
def arrive(
    m: Words, f: Reals, agent: int, at_s: float, offsets: Words, growth: Words, output: Words, gap: Reals
) -> None:
    """An agent's turn reaches its engine."""
    e = m[agent + ENGINE]
    if f[e + ENDS_AT_S] <= at_s + TOLERANCE * f[e + FIRST_STEP_S]:
        end_step(m, f, e, at_s, offsets, output, gap)
        begin_step(m, f, e, at_s)
    call = offsets[m[agent + PROGRAM]] + m[agent + TURN]
    m[agent + N_TOKENS] += growth[call]
    m[agent + N_COMPUTED] = 0
    m[agent + N_LEFT] = output[call]
    m[agent + HAS_SAID] = 0
    m[agent + WAS_PREEMPTED] = 0
    f[agent + ARRIVED_AT_S] = at_s
    link_before(m, agent, e + WAITING)
    m[e + N_WAITING] += 1
    m[e + N_OPEN] += 1
    if m[e + STEPS] == 0:
        begin_step(m, f, e, at_s)
    elif m[e + STEPS] > 1 and m[e + N_WAITING] == 1 and m[e + N_RUNNING] < m[MAX_SEQS]:
        k = min(n_done(m, f, e, at_s) + 1, m[e + STEPS])
        m[e + STEPS] = k
        f[e + ENDS_AT_S] = f[e + BEGUN_AT_S] + k * f[e + FIRST_STEP_S] + f[e + GROWTH_S] * (k * (k - 1) / 2)


@compilable
def fewest_open(m: Words) -> int:
    """The engine with the fewest requests."""
    best = m[ENGINES]
    for i in range(1, m[N_ENGINES]):
        e = m[ENGINES] + N_ENGINE * i
        if m[e + N_OPEN] < m[best + N_OPEN]:
            best = e
    return best


def advance(
    m: Words, f: Reals, offsets: Words, growth: Words, output: Words, gap: Reals, until_s: float, choice: int
) -> int:
    """Run until a decision is needed, the time is up, or all is done.

    Args:
        choice: The engine (its handle) for the program that was asked about; ignored where none was.

    Returns:
        The agent whose new program needs an engine, or 0 at the end.
    """
    if m[ASKING]:
        agent = m[ASKING]
        m[ASKING] = 0
        m[agent + ENGINE] = choice
        arrive(m, f, agent, f[CLOCK], offsets, growth, output, gap)
    first_engine, due = m[ENGINES], m[DUE]
    end_engines = first_engine + N_ENGINE * m[N_ENGINES]
    while m[N_LOGGED] < m[MAX_CALLS]:
        at_s, e = INFINITY, 0
        for i in range(first_engine, end_engines, N_ENGINE):
            if f[i + ENDS_AT_S] < at_s:
                at_s, e = f[i + ENDS_AT_S], i
        if m[N_DUE] > 0 and f[due] <= at_s:
            if f[due] > until_s:
                break
            at_s = f[due]
            f[CLOCK] = at_s
            agent = pop_due(m, f)
            if m[agent + TURN] == 0:
                if m[DECIDES]:
                    m[ASKING] = agent
                    return agent
                m[agent + ENGINE] = fewest_open(m)
            arrive(m, f, agent, at_s, offsets, growth, output, gap)
        elif e > 0 and at_s <= until_s:
            f[CLOCK] = at_s
            end_step(m, f, e, at_s, offsets, output, gap)
            begin_step(m, f, e, at_s)
        else:
            break
    return 0


fast_advance = compiled(advance)
