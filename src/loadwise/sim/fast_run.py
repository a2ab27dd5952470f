"""Runs programs on the fast core, or hands its environments to who decides.

`run_fast` is `run_by_block` at a thousand times the speed, for engines within the fast core's limits. `FastRun` is the
same run in the hands of a caller who chooses the engine of each program: `advance` returns whenever a choice is due.
Runs are independent of each other, so many of them can be advanced in lock-step.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadwise.kernel.errors import ConfigError

from . import fast_state as at
from .compiled import HAS_NUMBA
from .fast_core import advance, fast_advance
from .fast_queue import push_due
from .programs import STAGGER_S, CallLog, Floats, Ints, Programs
from .step_time import StepCost
from .vllm_engine import VllmEngineSpec


def check_fast(specs: Sequence[VllmEngineSpec], programs: Programs) -> None:
    """Raise `ConfigError` where engines or programs are beyond the fast core (the block-level engine takes them)."""
    if not specs:
        raise ConfigError("0 engines; there must be at least one")
    first = specs[0]
    shared = ("block_tokens", "max_num_seqs", "max_num_batched_tokens")
    for spec in specs:
        if any(getattr(spec, name) != getattr(first, name) for name in shared):
            raise ConfigError(f"the fast core's engines must agree in {', '.join(shared)}")
        if spec.state_groups:
            raise ConfigError(f"n_state_groups is {spec.state_groups}; the fast core knows full attention only")
        if spec.scheduling_policy != "fcfs" or spec.long_prefill_token_threshold or spec.watermark_ratio:
            raise ConfigError("the fast core knows fcfs without long_prefill_token_threshold and watermark_ratio only")
        if not (spec.scheduler_reserve_full_isl and spec.has_prefix_cache):
            raise ConfigError("the fast core knows scheduler_reserve_full_isl and a prefix cache only")
        if spec.max_num_batched_tokens <= spec.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {spec.max_num_batched_tokens}; the fast core needs more than "
                f"max_num_seqs = {spec.max_num_seqs}"
            )
    _check_lengths(specs, programs)


def is_fast(specs: Sequence[VllmEngineSpec], programs: Programs) -> bool:
    """Whether the fast core takes them."""
    try:
        check_fast(specs, programs)
    except ConfigError:
        return False
    return True


def _check_lengths(specs: Sequence[VllmEngineSpec], programs: Programs) -> None:
    starts = programs.offsets[:-1]
    n_shared = programs.shared_tokens // specs[0].block_tokens * specs[0].block_tokens
    if programs.shared_tokens and (programs.growth_tokens[starts] <= n_shared).any():
        raise ConfigError(f"a first prompt has no token beyond the shared {n_shared}; the fast core needs one")
    totals = np.add.reduceat(programs.growth_tokens + programs.output_tokens, starts)
    for spec in specs:
        most = spec.kv_tokens + 1
        if spec.max_model_len is not None:
            most = min(most, spec.max_model_len)
        if totals.max() > most:
            raise ConfigError(f"program {int(totals.argmax())} grows to {totals.max()} tokens; an engine takes {most}")


def costs_of(step: StepCost) -> list[float]:
    """An engine's costs in the order of the fast core."""
    return [
        step.fixed_s,
        step.weights_s,
        step.expert_weights_s,
        step.expert_ratio,
        step.gemm_s_per_token,
        step.kv_s_per_token,
        step.attention_s_per_pair,
        step.request_s,
        step.state_s_per_request,
        step.scan_s_per_token,
        step.token_s,
        step.host_s,
        step.host_s_per_request,
        float(step.is_host_overlapped),
    ]


class FastRun:
    """One run. All of its changing state is in two arrays."""

    def __init__(
        self,
        specs: Sequence[VllmEngineSpec],
        programs: Programs,
        n_agents: int,
        *,
        start_s: Floats | None = None,
        max_calls: int | None = None,
        decides: bool = False,
        has_macro_steps: bool = True,
        is_compiled: bool = HAS_NUMBA,
        memory: Ints | None = None,
    ) -> None:
        """
        Args:
            n_agents: Programs under way at once.
            memory: Where the run's changing state is to lie: as many words as the `memory` of a like run has. An array
                of its own where absent.
            start_s: When agents start their first program, rising; staggered by a millisecond where absent.
            decides: Whether the caller chooses engines; otherwise the one with the fewest requests is taken.
            is_compiled: Plain Python otherwise, with the same results.
        """
        programs.check()
        check_fast(specs, programs)
        if n_agents < 1:
            raise ConfigError(f"n_agents is {n_agents!r}; it must be >= 1")
        n_agents = min(n_agents, len(programs))
        starts = STAGGER_S * np.arange(n_agents, dtype=np.float64) if start_s is None else start_s
        if len(starts) != n_agents or not (np.isfinite(starts).all() and (np.diff(starts, prepend=0.0) >= 0).all()):
            raise ConfigError(f"start_s must be {n_agents} finite, rising times >= 0")
        self.programs = programs
        self.specs = tuple(specs)
        n_calls = programs.n_calls if max_calls is None else min(max_calls, programs.n_calls)
        # A step may end several calls at once, so the log has room beyond the last call that was asked for.
        n_words = self._place(n_agents, min(n_calls + n_agents, programs.n_calls))
        self.memory = np.zeros(n_words, np.int64) if memory is None else memory
        if self.memory.shape != (n_words,):
            raise ConfigError(f"memory has the shape {self.memory.shape}; this run needs {n_words} words")
        self.memory[:] = 0
        self._m: Any = memoryview(self.memory.data)
        self._f: Any = memoryview(self.memory.view(np.float64).data)
        self._m[at.MAX_CALLS], self._m[at.DECIDES], self._m[at.HAS_MACRO_STEPS] = n_calls, decides, has_macro_steps
        self._fill_header(n_agents)
        for i, spec in enumerate(specs):
            self._fill_engine(i, spec)
        self._fill_agents(starts)
        self._advance: Any = fast_advance if is_compiled else advance
        inputs: list[Any] = [programs.offsets, programs.growth_tokens, programs.output_tokens, programs.gap_s]
        if is_compiled:
            self._arguments: list[Any] = [self.memory, self.memory.view(np.float64), *inputs]
        else:
            self._arguments = [self._m, self._f, *(memoryview(array) for array in inputs)]

    def _place(self, n_agents: int, n_log: int) -> int:
        """Decide where everything lies. The words needed in all."""
        n_engines, n_programs = len(self.specs), len(self.programs)
        self._engines = at.N_HEADER
        self._agents = self._engines + at.N_ENGINE * n_engines
        self._due = self._agents + at.N_AGENT * n_agents
        self._finish = self._due + at.N_DUE_ENTRY * n_agents
        self._phase = self._finish + n_engines * n_agents
        self._nodes = self._phase + n_engines * self.specs[0].block_tokens
        self._log = self._nodes + at.N_NODE * n_engines * (n_programs + 1)
        return self._log + at.N_LOG * n_log

    def _fill_header(self, n_agents: int) -> None:
        m, spec = self._m, self.specs[0]
        m[at.N_ENGINES], m[at.N_AGENTS], m[at.N_PROGRAMS] = len(self.specs), n_agents, len(self.programs)
        m[at.BLOCK_SIZE], m[at.MAX_SEQS], m[at.BUDGET] = (
            spec.block_tokens,
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
        )
        m[at.SHARED_BLOCKS] = self.programs.shared_tokens // spec.block_tokens
        m[at.ENGINES], m[at.DUE], m[at.LOG] = self._engines, self._due, self._log
        m[at.NEXT_PROGRAM] = n_agents

    def _fill_engine(self, i: int, spec: VllmEngineSpec) -> None:
        m, f, e = self._m, self._f, self._engines + at.N_ENGINE * i
        n_nodes = len(self.programs) + 1
        nodes = self._nodes + at.N_NODE * n_nodes * i
        queue = nodes + at.N_NODE * (n_nodes - 1)
        m[e + at.NODES], m[e + at.QUEUE] = nodes, queue
        m[queue + at.RIGHT] = m[queue + at.LEFT] = queue
        m[e + at.FREE] = m[e + at.LOOSE] = spec.n_blocks
        m[e + at.FINISH] = self._finish + m[at.N_AGENTS] * i
        m[e + at.PHASE] = self._phase + spec.block_tokens * i
        for end in (e + at.RUNNING, e + at.WAITING):
            m[end + at.AFTER] = m[end + at.BEFORE] = end
        f[e + at.ENDS_AT_S] = math.inf
        for k, cost in enumerate(costs_of(spec.cost)):
            f[e + at.COSTS + k] = cost

    def _fill_agents(self, start_s: Floats) -> None:
        for i, begins_at_s in enumerate(start_s.tolist()):
            agent = self._agents + at.N_AGENT * i
            self._m[agent + at.PROGRAM] = i
            push_due(self._m, self._f, begins_at_s, agent)

    def advance(self, until_s: float = math.inf, choice: int = -1) -> int:
        """Run until a program needs an engine (its number), or until the time is up or all is done (-1).

        Args:
            choice: The engine for the program that was asked about last.
        """
        if self.asking >= 0 and not 0 <= choice < len(self.specs):
            raise ConfigError(f"choice is {choice!r}; there are engines 0..{len(self.specs) - 1}")
        self._advance(*self._arguments, until_s, self._engines + at.N_ENGINE * choice)
        return self.asking

    @property
    def asking(self) -> int:
        """The program that needs an engine; -1 where none does."""
        agent = self._m[at.ASKING]
        return int(self._m[agent + at.PROGRAM]) if agent else -1

    @property
    def engines_at(self) -> int:
        """Where the records of engines begin in the memory."""
        return self._engines

    @property
    def now_s(self) -> float:
        """Of the last event."""
        return float(self._f[at.CLOCK])

    @property
    def n_steps(self) -> int:
        """Engine steps and macro-steps so far."""
        return int(self._m[at.N_STEPS])

    def log(self) -> CallLog:
        """The calls that are over."""
        lines = self.memory[self._log :].reshape(-1, at.N_LOG)[: self._m[at.N_LOGGED]].copy()
        seconds = lines.view(np.float64)
        return CallLog(
            call=lines[:, at.L_CALL],
            engine=lines[:, at.L_ENGINE],
            arrived_at_s=seconds[:, at.L_ARRIVED_AT_S],
            first_at_s=seconds[:, at.L_FIRST_AT_S],
            finished_at_s=seconds[:, at.L_FINISHED_AT_S],
            prompt_tokens=lines[:, at.L_PROMPT],
            hit_tokens=lines[:, at.L_HIT],
            output_tokens=self.programs.output_tokens[lines[:, at.L_CALL]],
            n_preemptions=int(self._m[at.N_PREEMPTIONS]),
            end_s=self.now_s,
        )


def run_fast(
    specs: Sequence[VllmEngineSpec],
    programs: Programs,
    n_agents: int,
    *,
    start_s: Floats | None = None,
    max_calls: int | None = None,
    has_macro_steps: bool = True,
    is_compiled: bool = HAS_NUMBA,
) -> CallLog:
    """Run programs to their end; the same as `run_by_block` on `VllmEngine`s of the same specs."""
    run = FastRun(
        specs,
        programs,
        n_agents,
        start_s=start_s,
        max_calls=max_calls,
        has_macro_steps=has_macro_steps,
        is_compiled=is_compiled,
    )
    run.advance()
    return run.log()
