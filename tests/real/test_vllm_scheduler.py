"""vLLM's own scheduler and cache manager as judge: the same requests, the same decisions, step by step.

Needs an environment with vLLM (0.32, on a CPU): LOADWISE_VLLM_PYTHON names its Python. No model is loaded. Thousands of
steps of random programs under pressure: tokens of every request, order, preemptions, hits (computed tokens) and the
number of free blocks must be equal, in every step.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadwise.sim.engine import EngineRequest
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

pytestmark = [pytest.mark.real]

PYTHON = os.environ.get("LOADWISE_VLLM_PYTHON", "")
DRIVER = Path(__file__).with_name("vllm_steps.py")
SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "scheduler_reserve_full_isl")
SYSTEM = 40
N_SCRIPTS = 60
N_STEPS = 70


class Play:
    """One random script, played on our engine while it is made: turns go on when their last turn is over."""

    def __init__(self, seed: int, spec: VllmEngineSpec) -> None:
        self.rng = np.random.default_rng(seed)
        self.spec = spec
        self.engine = VllmEngine(spec, has_macro_steps=False)
        self.context: dict[str, list[int]] = {}
        self.open: dict[int, tuple[str, list[int], list[int]]] = {}
        self.n_asked = 0
        self.steps: list[list[dict[str, Any]]] = []
        self.log: list[dict[str, Any]] = []
        self._next_token = 1000

    def run(self) -> None:
        """Ask, cancel and step, `N_STEPS` times."""
        for i in range(N_STEPS):
            operations = []
            if self.open and self.rng.random() < 0.03:
                operations.append(self._cancel())
            while self.rng.random() < 0.3 and len(self.open) < 12:
                operations.append(self._ask())
            self.steps.append(operations)
            self._step(i)

    def _fresh(self, n: int) -> list[int]:
        self._next_token += n
        return list(range(self._next_token - n, self._next_token))

    def _ask(self) -> dict[str, Any]:
        rng, i = self.rng, self.n_asked
        self.n_asked += 1
        program = f"p{rng.integers(5)}"
        known = self.context.get(program, list(range(SYSTEM)))
        most = (self.spec.n_blocks - 2 * self.spec.state_groups) * self.spec.block_tokens
        kept = len(known) if rng.random() < 0.8 else max(SYSTEM, int(len(known) * rng.random()))
        output = int(rng.integers(1, 40))
        prompt = (known[:kept] + self._fresh(int(rng.integers(1, 120))))[: most - output]
        said = self._fresh(output)
        request = EngineRequest(
            request_id=i,
            program_id=program,
            prompt_tokens=len(prompt),
            output_tokens=output,
            prefix_tokens=kept,
            shared_tokens=SYSTEM,
            priority=int(rng.integers(3)),
        )
        self.engine.submit(request)
        self.open[i] = (program, prompt, said)
        # While this one talks, its successor can know the prompt only.
        self.context[program] = prompt
        return {"kind": "add", "id": str(i), "prompt": prompt, "said": said, "order": i, "priority": request.priority}

    def _cancel(self) -> dict[str, Any]:
        i = int(self.rng.choice(sorted(self.open)))
        self.engine.cancel(i)
        del self.open[i]
        return {"kind": "cancel", "id": str(i)}

    def _step(self, step: int) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        preempted_before = {i: call.n_preemptions for i, call in engine._calls.items()}
        plan = scheduler.schedule()
        self.log.append(
            {
                "step": step,
                "tokens": {str(call.request.request_id): call.n_new for call in plan.calls},
                "preempted": sorted(
                    str(i) for i, call in engine._calls.items() if call.n_preemptions > preempted_before[i]
                ),
                "running": [str(call.request.request_id) for call in scheduler.running],
                "waiting": len(scheduler.waiting),
                "computed": {str(call.request.request_id): call.n_computed for call in plan.calls},
                "free": engine.cache.pool.n_free,
            }
        )
        engine._is_scheduled = True
        for output in engine._commit(plan, 1):
            if output.is_finished:
                program, prompt, said = self.open.pop(output.request_id)
                if self.context[program] is prompt:
                    self.context[program] = prompt + said


def specs(n_state_groups: int) -> list[VllmEngineSpec]:
    """Random settings, small pools."""
    rng = np.random.default_rng(n_state_groups)
    made = []
    for _ in range(N_SCRIPTS):
        made.append(
            VllmEngineSpec(
                num_gpu_blocks=int(rng.integers(36, 80)),
                block_size=8,
                n_state_groups=n_state_groups,
                step=StepCost(),
                max_num_seqs=int(rng.choice([2, 6, 16])),
                max_num_batched_tokens=int(rng.choice([32, 64, 512])),
                long_prefill_token_threshold=int(rng.choice([0, 0, 24])),
                scheduler_reserve_full_isl=bool(rng.random() < 0.7),
                scheduling_policy="priority" if rng.random() < 0.3 else "fcfs",
                # Without a prefix cache vLLM keeps states in another way, which has no blocks to speak of.
                has_prefix_cache=n_state_groups > 0 or bool(rng.random() < 0.85),
            )
        )
    return made


def settings_of(spec: VllmEngineSpec) -> dict[str, Any]:
    """What the driver needs to know."""
    return {name: getattr(spec, name) for name in SETTINGS} | {
        "block_size": spec.block_tokens,
        "n_state_groups": spec.state_groups,
        "num_gpu_blocks": spec.n_blocks,
        "scheduling_policy": spec.scheduling_policy,
        "has_prefix_cache": spec.has_prefix_cache,
    }


def judged(plays: list[Play]) -> list[list[dict[str, Any]]]:
    """What vLLM does with the same scripts."""
    scripts = [{"settings": settings_of(play.spec), "steps": play.steps} for play in plays]
    ran = subprocess.run(
        [PYTHON, str(DRIVER)], input=json.dumps(scripts), capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    line = next(line for line in ran.stdout.splitlines() if line.startswith("RESULT "))
    found: list[list[dict[str, Any]]] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.skipif(not PYTHON, reason="LOADWISE_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("n_state_groups", [0, 3], ids=["attention", "hybrid"])
def test_every_decision_is_vllms(n_state_groups: int) -> None:
    """At least 1,000 steps of random requests, with preemptions and hits among them: equal in every step."""
    plays = [Play(seed, spec) for seed, spec in enumerate(specs(n_state_groups))]
    for play in plays:
        play.run()
    assert sum(play.engine.scheduler.n_preemptions for play in plays) > 20
    assert sum(play.engine.scheduler.hit_tokens for play in plays) > 1000
    n_steps = 0
    for play, log in zip(plays, judged(plays), strict=True):
        for ours, theirs in zip(play.log, log, strict=True):
            assert ours == theirs, f"{play.spec}\nours   {ours}\nvLLM's {theirs}"
            n_steps += bool(ours["tokens"])
    assert n_steps >= 1000
