"""The hybrid core behind the engine's interface: the same steps as `VllmEngine`, several times faster.

For models with linear-attention layers and, as the case without any, for those with attention only. It takes what
`fits_hybrid` says; results are those of `VllmEngine`, byte by byte. Memory grows with the calls that are open; a call's
place is used again.
"""

from typing import Any

import numpy as np

from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded

from . import hybrid_state as at
from .compiled import HAS_NUMBA
from .content import FIRST_NAMED_ORIGIN, Contents, Line
from .engine import EngineRequest, Output, Step
from .fast_run import costs_of
from .hybrid_core import fast_tell, tell
from .kv_blocks import BlockPool
from .kv_cache import KvCache
from .vllm_engine import VllmEngineSpec, check_fits

_N_CALLS = 256
"""Open calls that there is room for at first."""
_N_RUNS = 1024
"""Runs of lines that there is room for at first."""
_MOST_WORDS = 1 << 26
_FIRST_NAMED = 1 << 33


def fits_hybrid(spec: VllmEngineSpec) -> bool:
    """Whether the hybrid core can take an engine: fcfs, a prefix cache, and not too large."""
    return (
        spec.scheduling_policy == "fcfs"
        and spec.has_prefix_cache
        and _n_rows(spec) * spec.n_blocks * (1 + spec.state_groups) < _MOST_WORDS
    )


def _n_rows(spec: VllmEngineSpec) -> int:
    """Most calls that can run at once: each holds a block of attention and a state of each group."""
    return min(spec.max_num_seqs, spec.n_blocks // (1 + spec.state_groups) + 1)


class HybridEngine:
    """See the module."""

    def __init__(self, spec: VllmEngineSpec, *, has_macro_steps: bool = True, is_compiled: bool = HAS_NUMBA) -> None:
        if not fits_hybrid(spec):
            raise ConfigError("the hybrid core knows fcfs with a prefix cache and not too many blocks only")
        self.spec = spec
        self._shape = KvCache(BlockPool(0), spec.block_tokens, spec.state_groups)
        self._contents = Contents(spec.block_tokens, 2 * spec.n_blocks)
        self._request_by_call: dict[int, EngineRequest] = {}
        self._call_by_id: dict[int, int] = {}
        self._line_by_call: dict[int, tuple[int, int]] = {}
        self._free_lines: dict[int, list[int]] = {}
        self._is_compiled = is_compiled
        self._tell: Any = fast_tell if is_compiled else tell
        self._place(has_macro_steps)

    def submit(self, request: EngineRequest) -> None:
        check_fits(request, self.spec, self._shape, self.spec.n_blocks)
        if self._m[at.N_WAITING] >= self.spec.max_waiting:
            raise Overloaded(f"{self._m[at.N_WAITING]} requests wait; the limit is {self.spec.max_waiting}")
        if not self._free_calls:
            self._make_room()
        call = self._free_calls.pop()
        m = self._m
        for i in range(at.N_CALL):
            m[call + i] = 0
        m[call + at.TOKENS_PROMPT] = m[call + at.N_TOKENS] = request.prompt_tokens
        m[call + at.TOKENS_OUTPUT] = request.output_tokens
        m[call + at.CACHED] = m[call + at.LAST_STATE] = -1
        self._put_line(call, self._contents.open(request))
        self._request_by_call[call] = request
        self._call_by_id[request.request_id] = call
        self._tell(*self._arguments, at.SUBMIT, call, 0.0)

    def cancel(self, request_id: int) -> bool:
        call = self._call_by_id.get(request_id)
        if call is None:
            return False
        self._tell(*self._arguments, at.CANCEL, call, 0.0)
        self._close(call)
        return True

    def set_speed(self, ratio: float) -> None:
        self._tell(*self._arguments, at.END_MACRO_STEP, 0, 0.0)
        self._f[at.SPEED] = ratio

    def step(self, now_s: float) -> Step:
        seconds = self._tell(*self._arguments, at.STEP, 0, now_s)
        if seconds < 0:
            raise LawBroken("L9", f"{len(self._call_by_id)} requests are open and none of them can be scheduled")
        m = self._m
        n = m[at.N_OUT]
        if not n:
            return Step(seconds, ())
        requests, outputs = self._request_by_call, []
        said = m[self._out : self._out + at.N_OUTPUT * n].tolist()
        for i in range(0, at.N_OUTPUT * n, at.N_OUTPUT):
            call, n_tokens, is_first, is_finished = said[i : i + at.N_OUTPUT]
            cached = m[call + at.CACHED]
            outputs.append(Output(requests[call].request_id, n_tokens, is_first == 1, is_finished == 1, cached))
            if is_finished:
                self._close(call)
        return Step(seconds, tuple(outputs))

    def signals(self, now_s: float) -> dict[str, float]:
        m, n_blocks = self._m, self.spec.n_blocks
        n_held = n_blocks - m[at.N_FREE] + int(self._tell(*self._arguments, at.UNSCHEDULED, 0, now_s))
        return {
            "n_running": float(m[at.N_RUNNING]),
            "n_waiting": float(m[at.N_WAITING]),
            "kv_usage_ratio": n_held / n_blocks,
            "prefix_queries_tokens": float(m[at.QUERY_TOKENS]),
            "prefix_hits_tokens": float(m[at.HIT_TOKENS]),
            "n_preemptions": float(m[at.N_PREEMPTIONS]),
            "prompt_tokens": float(m[at.PROMPT_TOKENS]),
            "generation_tokens": float(m[at.GENERATION_TOKENS]),
        }

    def decoding_tokens(self) -> int:
        """Computed tokens of all that decode, as of the last step that was told."""
        m, n, call = self._m, 0, self._m[at.RUNNING + at.AFTER]
        while call != at.RUNNING:
            if m[call + at.N_SAID] > 0:
                n += m[call + at.N_COMPUTED]
            call = m[call + at.AFTER]
        return int(n)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: views of the memory are made anew."""
        return {name: value for name, value in vars(self).items() if name not in ("_m", "_f", "_arguments", "_tell")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tell = fast_tell if self._is_compiled else tell
        self._see()

    def check(self) -> None:
        held = np.zeros(self.spec.n_blocks, np.int64)
        n_running, call = 0, self._m[at.RUNNING + at.AFTER]
        while call != at.RUNNING:
            n_running += 1
            row, n = self._m[call + at.ROW], self._m[call + at.N_HELD]
            for group in range(1 + self.spec.state_groups):
                begin = row + group * self._m[at.ROW_SIZE]
                blocks = self.memory[begin : begin + n]
                np.add.at(held, (blocks[blocks > 0] - self._blocks) // at.N_BLOCK, 1)
            call = self._m[call + at.AFTER]
        blocks = self.memory[self._blocks : self._blocks + at.N_BLOCK * self.spec.n_blocks].reshape(-1, at.N_BLOCK)
        users = blocks[:, at.USERS]
        if not np.array_equal(users, held):
            i = int(np.flatnonzero(users != held)[0])
            raise LawBroken("L4", f"block {i} has {users[i]} users, {held[i]} hold it")
        if int((users == 0).sum()) != self._m[at.N_FREE]:
            raise LawBroken("L4", f"{int((users == 0).sum())} blocks have no users, {self._m[at.N_FREE]} queue")
        n_waiting = self._m[at.N_WAITING]
        if n_running != self._m[at.N_RUNNING] or n_running + n_waiting != len(self._call_by_id):
            raise LawBroken("L1", f"{len(self._call_by_id)} requests are open, {n_running} run and {n_waiting} wait")
        if n_running > self.spec.max_num_seqs:
            raise LawBroken("L4", f"{n_running} requests run, max_num_seqs is {self.spec.max_num_seqs}")

    def _place(self, has_macro_steps: bool) -> None:
        """Decide where everything lies, and fill in what is not 0."""
        spec, n_blocks, n_rows = self.spec, self.spec.n_blocks, _n_rows(self.spec)
        row_size = n_blocks
        n_names = 1 << (4 * n_blocks).bit_length()
        sizes = {
            at.QUEUE: at.N_BLOCK,
            at.BLOCKS: at.N_BLOCK * n_blocks,
            at.TABLE: 2 * n_names,
            at.FOUND: row_size + spec.state_groups,
            at.GONE: row_size + 1,
            at.FREE_ROWS: n_rows,
            at.PLAN: n_rows,
            at.OUT: at.N_OUTPUT * n_rows,
        }
        places: dict[int, int] = {}
        end = at.N_HEADER
        for what, n_words in sizes.items():
            places[what] = end
            end += n_words
        rows, row_words = end, row_size * (1 + spec.state_groups)
        self._calls = rows + n_rows * row_words
        self._blocks, self._out = places[at.BLOCKS], places[at.OUT]
        self.memory = np.zeros(self._calls + at.N_CALL * _N_CALLS, np.int64)
        self.lines = np.zeros(2 * _N_RUNS, np.int64)
        self._n_line_words = 0
        self._free_calls = [self._calls + at.N_CALL * i for i in reversed(range(_N_CALLS))]
        head = self.memory
        for what, place in places.items():
            head[what] = place
        head[places[at.FREE_ROWS] : places[at.FREE_ROWS] + n_rows] = rows + row_words * np.arange(n_rows)
        head[at.SIZE], head[at.GROUPS], head[at.N_BLOCKS] = spec.block_tokens, spec.state_groups, n_blocks
        head[at.BUDGET], head[at.MAX_SEQS] = spec.max_num_batched_tokens, spec.max_num_seqs
        head[at.MOST_NEW] = spec.long_prefill_token_threshold or spec.max_num_batched_tokens
        head[at.RESERVES_ALL], head[at.HAS_MACRO_STEPS] = spec.scheduler_reserve_full_isl, has_macro_steps
        head[at.WATERMARK] = int(spec.watermark_ratio * n_blocks)
        head[at.TABLE_MASK], head[at.ROW_SIZE] = n_names - 1, row_size
        head[at.N_FREE], head[at.N_FREE_ROWS] = n_blocks, n_rows
        for end in (at.RUNNING, at.WAITING):
            head[end + at.AFTER] = head[end + at.BEFORE] = end
        self._queue_up(places[at.QUEUE])
        seconds = head.view(np.float64)
        seconds[at.COSTS : at.COSTS + 14] = costs_of(spec.cost)
        seconds[at.SPEED] = 1.0
        self._see()

    def _queue_up(self, queue: int) -> None:
        """All blocks are free, in their order."""
        blocks = self._blocks + at.N_BLOCK * np.arange(self.spec.n_blocks)
        ring = np.concatenate([[queue], blocks, [queue]])
        self.memory[ring[:-1] + at.NEXT] = ring[1:]
        self.memory[ring[1:] + at.PREV] = ring[:-1]

    def _see(self) -> None:
        """The memory as the core and Python see it."""
        self._m: Any = memoryview(self.memory.data)
        self._f: Any = memoryview(self.memory.view(np.float64).data)
        arrays = (self.memory, self.memory.view(np.float64), self.lines)
        self._arguments: Any = arrays if self._is_compiled else (self._m, self._f, memoryview(self.lines.data))

    def _make_room(self) -> None:
        """Room for twice as many open calls; handles stay what they are."""
        n_words = len(self.memory) - self._calls
        begin = len(self.memory)
        self.memory = np.concatenate([self.memory, np.zeros(n_words, np.int64)])
        self._free_calls = [begin + at.N_CALL * i for i in reversed(range(n_words // at.N_CALL))]
        self._see()

    def _put_line(self, call: int, line: Line) -> None:
        """Write a call's line down; its place is of a size that is a power of two, so that it can be used again."""
        size = 2 << (len(line) - 1).bit_length()
        free = self._free_lines.setdefault(size, [])
        if free:
            place = free.pop()
        else:
            place = self._n_line_words
            self._n_line_words += size
            if self._n_line_words > len(self.lines):
                self.lines = np.concatenate([self.lines, np.zeros(self._n_line_words, np.int64)])
                self._see()
        for i, (first, origin) in enumerate(line):
            self.lines[place + 2 * i], self.lines[place + 2 * i + 1] = first, self._number(origin)
        self._m[call + at.LINE], self._m[call + at.N_LINE] = place, len(line)
        self._line_by_call[call] = (size, place)

    def _number(self, origin: int) -> int:
        """An origin as a number of 34 bits: names must fit into 63. A trace's own names have half of them."""
        if origin < FIRST_NAMED_ORIGIN:
            return origin
        return _FIRST_NAMED + origin - FIRST_NAMED_ORIGIN

    def _close(self, call: int) -> None:
        """A call is over; its place is free."""
        request = self._request_by_call.pop(call)
        del self._call_by_id[request.request_id]
        self._contents.close(request, self._m[call + at.N_TOKENS])
        size, place = self._line_by_call.pop(call)
        self._free_lines[size].append(place)
        self._free_calls.append(call)
