"""vLLM's scheduler over hybrid-attention models once more, block by block but compiled: `scheduler` and `vllm_engine`
on an array.

Hybrid models have few, large blocks (528 or 784 tokens), so blocks can stay; what is saved is Python. First come first
served, with a prefix cache; everything else is left to `vllm_engine`. Every decision and every sum of floats is made
in the same order as there, so that a world gives the same bytes with either (law, tested).

`m` and `f` are an engine's memory as integers and as floats (`hybrid_state`), `lines` says whose conversation prompts
are.
"""

import math

from .compiled import compilable, compiled
from .fast_state import Reals, Words
from .hybrid_held import blocks_of, enter, find, grow, leave_row, n_needed
from .hybrid_state import (
    AFTER,
    B_CONTEXT,
    B_DECODE,
    B_NEW,
    B_PAIRS,
    B_PREFILL,
    B_PREFIX,
    BEFORE,
    BEGAN_AT_S,
    BUDGET,
    CACHED,
    CANCEL,
    COSTS,
    GENERATION_TOKENS,
    GROUPS,
    HAS_MACRO_STEPS,
    HAS_PLAN,
    HAS_PREEMPTED,
    HIT_TOKENS,
    IS_FRESH,
    IS_QUIET,
    IS_SCHEDULED,
    JUNCTION,
    MAX_SEQS,
    MOST_NEW,
    MOST_NOW,
    N_ATTENTION,
    N_COMPUTED,
    N_FOUND,
    N_FREE,
    N_HELD,
    N_NEW,
    N_OUT,
    N_OUTPUT,
    N_PLAN,
    N_PREEMPTIONS,
    N_RUNNING,
    N_SAID,
    N_STATES,
    N_TOKENS,
    N_WAITING,
    O_CALL,
    O_IS_FINISHED,
    O_IS_FIRST,
    O_TOKENS,
    OUT,
    PLAN,
    PROMPT_TOKENS,
    QUERY_TOKENS,
    RESERVES_ALL,
    ROW,
    RUN_FIRST_S,
    RUN_GROWTH_S,
    RUN_STEPS,
    RUNNING,
    SERIAL,
    SIZE,
    SPEED,
    STEP,
    SUBMIT,
    TOKENS_OUTPUT,
    TOKENS_PROMPT,
    UNSCHEDULED,
    WAITING,
    WATERMARK,
)

TOLERANCE = 1e-6
"""As in `step_time`."""


@compilable
def unlink(m: Words, call: int) -> None:
    """Take a call out of its list."""
    after, before = m[call + AFTER], m[call + BEFORE]
    m[before + AFTER] = after
    m[after + BEFORE] = before


@compilable
def link_before(m: Words, call: int, other: int) -> None:
    """Put a call before another, or before a list's own end: last."""
    before = m[other + BEFORE]
    m[call + BEFORE] = before
    m[call + AFTER] = other
    m[before + AFTER] = call
    m[other + BEFORE] = call


@compilable
def schedule(m: Words, f: Reals, lines: Words) -> None:
    """Hand out the tokens of one step; they count as computed from now on."""
    m[SERIAL] += 1
    m[N_PLAN] = m[HAS_PREEMPTED] = 0
    m[MOST_NOW] = m[BUDGET] if m[N_RUNNING] + m[N_WAITING] <= 1 else m[MOST_NEW]
    budget = serve_running(m, lines)
    is_stopped = m[HAS_PREEMPTED] == 1 or let_in(m, lines, budget)
    add_up(m, f)
    m[IS_QUIET] = int(
        m[HAS_PREEMPTED] == 0
        and m[B_PREFILL] == 0
        and m[N_PLAN] == m[N_RUNNING]
        and (m[N_WAITING] == 0 or is_stopped or m[N_RUNNING] >= m[MAX_SEQS])
    )


@compilable
def add_up(m: Words, f: Reals) -> None:
    """The batch of a plan; its tokens count as computed."""
    m[B_DECODE] = m[B_CONTEXT] = m[B_PREFILL] = m[B_NEW] = m[B_PREFIX] = 0
    pairs = 0.0
    for k in range(m[N_PLAN]):
        call = m[m[PLAN] + k]
        n_new, n_computed = m[call + N_NEW], m[call + N_COMPUTED]
        if n_new == 1 and m[call + N_SAID] > 0:
            m[B_DECODE] += 1
            m[B_CONTEXT] += n_computed
        else:
            m[B_PREFILL] += 1
            m[B_NEW] += n_new
            pairs += n_new * (n_computed + n_new / 2)
            m[B_PREFIX] += n_computed
        m[call + N_COMPUTED] = n_computed + n_new
    f[B_PAIRS] = pairs


@compilable
def put_in_plan(m: Words, call: int, n_new: int) -> None:
    """A call has tokens in this step."""
    m[call + N_NEW] = n_new
    m[m[PLAN] + m[N_PLAN]] = call
    m[N_PLAN] += 1


@compilable
def serve_running(m: Words, lines: Words) -> int:
    """Those that run, in order; whoever finds no block preempts from the tail. The tokens that are left."""
    budget = m[BUDGET]
    call = m[RUNNING + AFTER]
    while call != RUNNING and budget > 0:
        n_new = new_tokens(m, call, m[call + N_COMPUTED], budget)
        if n_new > 0:
            while not grow(m, lines, call, n_new):
                victim = m[RUNNING + BEFORE]
                preempt(m, victim)
                if victim == call:
                    return budget
            put_in_plan(m, call, n_new)
            budget -= n_new
        call = m[call + AFTER]
    return budget


@compilable
def preempt(m: Words, call: int) -> None:
    """The last that entered gives everything back and waits at the head."""
    unlink(m, call)
    m[N_RUNNING] -= 1
    leave_row(m, call)
    m[call + N_COMPUTED] = 0
    link_before(m, call, m[WAITING + AFTER])
    m[N_WAITING] += 1
    m[N_PREEMPTIONS] += 1
    m[HAS_PREEMPTED] = 1


@compilable
def let_in(m: Words, lines: Words, budget: int) -> bool:
    """Let calls in. True if the head finds no room and will not before somebody leaves."""
    while budget > 0 and m[N_RUNNING] < m[MAX_SEQS] and m[N_WAITING] > 0:
        call = m[WAITING + AFTER]
        find(m, lines, call, m[call + N_TOKENS])
        n_hit = m[N_FOUND] * m[SIZE]
        m[call + JUNCTION] = m[N_ATTENTION] * m[SIZE] if m[N_ATTENTION] > m[N_FOUND] else 0
        n_new = new_tokens(m, call, n_hit, budget)
        if n_new == 0 or m[IS_FRESH]:
            return False
        n_tokens = m[call + N_TOKENS] if m[RESERVES_ALL] else n_hit + n_new
        watermark = m[WATERMARK] if m[N_RUNNING] > 0 else 0
        if n_needed(m, n_tokens) + watermark > m[N_FREE]:
            return True
        unlink(m, call)
        m[N_WAITING] -= 1
        enter(m, call)
        m[call + N_COMPUTED] = n_hit
        grow(m, lines, call, n_new)
        if m[call + CACHED] < 0:
            m[call + CACHED] = n_hit
            m[QUERY_TOKENS] += m[call + N_TOKENS]
            m[HIT_TOKENS] += n_hit
        link_before(m, call, RUNNING)
        m[N_RUNNING] += 1
        put_in_plan(m, call, n_new)
        budget -= n_new
    return False


@compilable
def new_tokens(m: Words, call: int, n_computed: int, budget: int) -> int:
    """How many tokens a call may compute after `n_computed`."""
    n_tokens = m[call + N_TOKENS]
    n_new = min(n_tokens - n_computed, m[MOST_NOW], budget)
    until = max(m[call + TOKENS_PROMPT], n_tokens - 1)
    if m[GROUPS] == 0 or n_computed >= until:
        return n_new
    # A hybrid model's chunk ends where its state can be a checkpoint (vLLM: `_mamba_block_aligned_split`).
    size, end = m[SIZE], n_computed + n_new
    if end < until:
        aligned = end // size * size
        if aligned > n_computed or size <= m[MOST_NEW]:
            end = aligned
    best = end
    stop = (n_tokens - 1) // size * size
    if n_computed < stop < best:
        best = stop
    stop = m[call + JUNCTION]
    if n_computed < stop < best:
        best = stop
    if n_computed % size:
        stop = (n_computed // size + 1) * size
        if n_computed < stop < best:
            best = stop
    return max(best - n_computed, 0)


@compilable
def quiet_steps(m: Words) -> int:
    """How many steps like this one (itself included) will follow if nobody comes or goes."""
    if m[IS_QUIET] == 0 or m[HAS_MACRO_STEPS] == 0:
        return 1
    most = m[BUDGET] + (1 << 40)
    for k in range(m[N_PLAN]):
        call = m[m[PLAN] + k]
        most = min(most, m[call + TOKENS_OUTPUT] - m[call + N_SAID])
        if m[GROUPS]:
            if m[call + N_STATES] > 1:
                return 1
            most = min(most, m[call + N_HELD] * m[SIZE] - m[call + N_COMPUTED] + 1)
    return max(most, 1) if m[GROUPS] else steps_that_fit(m, most)


@compilable
def steps_that_fit(m: Words, most: int) -> int:
    """How many steps find blocks for all of their calls; attention only."""
    least = 1
    while least < most:
        n = (least + most + 1) // 2
        if blocks_for(m, n - 1) <= m[N_FREE]:
            least = n
        else:
            most = n - 1
    return least


@compilable
def blocks_for(m: Words, n_more: int) -> int:
    """Blocks that so many more tokens of each call of the plan would take."""
    n = 0
    for k in range(m[N_PLAN]):
        call = m[m[PLAN] + k]
        n += max(blocks_of(m, m[call + N_COMPUTED] + n_more) - m[call + N_HELD], 0)
    return n


@compilable
def set_run(m: Words, f: Reals, n_steps: int) -> None:
    """What the steps of a plan cost: the sums of `StepCost.steps`, in their order."""
    c = COSTS
    n_tokens = m[B_DECODE] + m[B_NEW]
    n_requests = m[B_DECODE] + m[B_PREFILL]
    weights = f[c + 1]
    if f[c + 2] > 0.0:
        weights += f[c + 2] * (1 - (1 - f[c + 3]) ** float(n_tokens))
    x = f[c + 4] * n_tokens
    x, weights = x * x, weights * weights
    linear = math.sqrt(math.sqrt(x * x + weights * weights))
    prefill = max(f[c + 6] * f[B_PAIRS], f[c + 5] * m[B_PREFIX])
    state = f[c + 8] * m[B_DECODE] + f[c + 9] * m[B_NEW]
    requests = f[c + 10] * n_tokens + f[c + 7] * n_requests
    decode = f[c + 5] * m[B_CONTEXT]
    gpu_s = f[c + 0] + linear + decode + prefill + state + requests
    host_s = f[c + 11] + f[c + 12] * n_requests
    growth_s = f[c + 5] * m[B_DECODE]
    first_s = gpu_s + host_s
    if f[c + 13] > 0.0:
        first_s = max(gpu_s, host_s)
        if n_steps > 1 and gpu_s < host_s and growth_s > 0.0:
            n_below = (host_s - gpu_s) / growth_s
            if n_below < n_steps:
                n_steps = int(n_below) + 1
            growth_s = 0.0
    m[RUN_STEPS] = n_steps
    f[RUN_FIRST_S] = first_s / f[SPEED]
    f[RUN_GROWTH_S] = growth_s / f[SPEED]


@compilable
def until_s(f: Reals, n: int) -> float:
    """Seconds until the first `n` steps of the run are done."""
    return n * f[RUN_FIRST_S] + f[RUN_GROWTH_S] * (n * (n - 1) / 2)


@compilable
def n_done(m: Words, f: Reals, elapsed_s: float) -> int:
    """Steps of the run that are done after so many seconds."""
    low, high = 0, m[RUN_STEPS]
    while low < high:
        n = (low + high + 1) // 2
        if until_s(f, n) <= elapsed_s + TOLERANCE * f[RUN_FIRST_S]:
            low = n
        else:
            high = n - 1
    return low


@compilable
def extend(m: Words, lines: Words, n_steps: int) -> None:
    """Schedule `n_steps` more steps like a quiet one, at once; it was planned so that every call finds room."""
    for k in range(m[N_PLAN]):
        call = m[m[PLAN] + k]
        grow(m, lines, call, n_steps)
        m[call + N_COMPUTED] += n_steps


@compilable
def end_macro_step(m: Words, lines: Words) -> None:
    """Only the step in progress is carried out; its tokens are handed out now, if they were not."""
    if m[HAS_PLAN] == 0 or m[RUN_STEPS] == 0:
        return
    if m[IS_SCHEDULED] == 0:
        extend(m, lines, 1)
        m[IS_SCHEDULED] = 1
    m[RUN_STEPS] = 1


@compilable
def commit(m: Words, f: Reals, lines: Words, n_steps: int) -> None:
    """Steps are done: tokens are said, calls finish."""
    n_more = n_steps - 1 if m[IS_SCHEDULED] else n_steps
    if n_more > 0:
        extend(m, lines, n_more)
    m[IS_SCHEDULED] = 0
    f[BEGAN_AT_S] += until_s(f, n_steps)
    f[RUN_FIRST_S] += n_steps * f[RUN_GROWTH_S]
    m[RUN_STEPS] -= n_steps
    for k in range(m[N_PLAN]):
        call = m[m[PLAN] + k]
        if m[call + N_COMPUTED] == m[call + N_TOKENS] + n_steps - 1:
            say(m, call, n_steps)


@compilable
def say(m: Words, call: int, n_tokens: int) -> None:
    """One call has said so many tokens."""
    is_first = m[call + N_SAID] == 0
    if is_first:
        m[PROMPT_TOKENS] += m[call + TOKENS_PROMPT]
    m[call + N_SAID] += n_tokens
    m[call + N_TOKENS] += n_tokens
    m[GENERATION_TOKENS] += n_tokens
    is_finished = m[call + N_SAID] == m[call + TOKENS_OUTPUT]
    if is_finished:
        unlink(m, call)
        m[N_RUNNING] -= 1
        leave_row(m, call)
    line = m[OUT] + N_OUTPUT * m[N_OUT]
    m[N_OUT] += 1
    m[line + O_CALL] = call
    m[line + O_TOKENS] = n_tokens
    m[line + O_IS_FIRST] = int(is_first)
    m[line + O_IS_FINISHED] = int(is_finished)


@compilable
def begin(m: Words, f: Reals, lines: Words, now_s: float) -> float:
    """Schedule the next step, if there is work. Seconds until it ends; 0 without work, -1 if it is stuck."""
    m[HAS_PLAN] = m[RUN_STEPS] = 0
    f[RUN_FIRST_S] = f[RUN_GROWTH_S] = 0.0
    n_open = m[N_RUNNING] + m[N_WAITING]
    if n_open == 0:
        return 0.0
    for _ in range(n_open + 1):
        schedule(m, f, lines)
        if m[N_PLAN] > 0:
            set_run(m, f, quiet_steps(m))
            m[HAS_PLAN] = m[IS_SCHEDULED] = 1
            f[BEGAN_AT_S] = now_s
            return until_s(f, m[RUN_STEPS])
    return -1.0


@compilable
def step(m: Words, f: Reals, lines: Words, now_s: float) -> float:
    """Do what was due up to `now_s`, and begin what comes next; see `VllmEngine.step`."""
    if m[HAS_PLAN]:
        n = n_done(m, f, now_s - f[BEGAN_AT_S])
        if n > 0:
            commit(m, f, lines, n)
        if m[RUN_STEPS] > 0:
            left_s = f[BEGAN_AT_S] + until_s(f, m[RUN_STEPS]) - now_s
            return max(left_s, 1e-6 * f[RUN_FIRST_S])
    return begin(m, f, lines, now_s)


@compilable
def cancel(m: Words, lines: Words, call: int) -> None:
    """Forget a call and free what it holds."""
    end_macro_step(m, lines)
    unlink(m, call)
    if m[call + ROW] == 0:
        m[N_WAITING] -= 1
        return
    m[N_RUNNING] -= 1
    leave_row(m, call)
    kept = 0
    for k in range(m[N_PLAN]):
        other = m[m[PLAN] + k]
        if other != call:
            m[m[PLAN] + kept] = other
            kept += 1
    m[N_PLAN] = kept


@compilable
def n_unscheduled(m: Words, f: Reals, now_s: float) -> int:
    """Blocks that steps of a macro-step have taken by now, though this is not yet written down."""
    if m[HAS_PLAN] == 0 or m[RUN_STEPS] == 0:
        return 0
    n_begun = min(n_done(m, f, now_s - f[BEGAN_AT_S]) + 1, m[RUN_STEPS])
    n_more = n_begun - 1 if m[IS_SCHEDULED] else n_begun
    return blocks_for(m, n_more) if n_more > 0 else 0


def tell(m: Words, f: Reals, lines: Words, what: int, call: int, now_s: float) -> float:
    """One entry for everything, so that it is compiled once.

    Returns:
        Of `STEP`: seconds until there is something to say (0: idle, -1: stuck). Of `UNSCHEDULED`: blocks. Else 0.
    """
    m[N_OUT] = 0
    if what == STEP:
        return step(m, f, lines, now_s)
    if what == SUBMIT:
        # A step goes on as planned if the newcomer could not enter before the next.
        is_quiet = m[HAS_PLAN] == 1 and m[IS_QUIET] == 1 and (m[N_WAITING] > 0 or m[N_RUNNING] >= m[MAX_SEQS])
        if not is_quiet:
            end_macro_step(m, lines)
        link_before(m, call, WAITING)
        m[N_WAITING] += 1
    elif what == CANCEL:
        cancel(m, lines, call)
    elif what == UNSCHEDULED:
        return float(n_unscheduled(m, f, now_s))
    else:
        end_macro_step(m, lines)
    return 0.0


fast_tell = compiled(tell)
