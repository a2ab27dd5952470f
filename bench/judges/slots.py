"""What llama.cpp finds of a prompt: each slot keeps the last context it served, and a prompt reuses what it repeats.

A request goes to the free slot whose context is most like its prompt (longest common beginning, at least a tenth of the
prompt), else to the one used longest ago; it reuses the common beginning, token by token, and always computes at least
the last token. That holds for calls asked one at a time, when every slot is free.
"""

from __future__ import annotations

from bench.agents import Chains, Script

LEAST_SIMILARITY = 0.1
"""llama-server's `--slot-prompt-similarity`."""


def predicted_hits(script: Script, chains: Chains, n_slots: int) -> dict[tuple[int, int], int]:
    """Tokens that each call, asked in one chain's order, finds in its slot."""
    context: dict[int, int] = {}
    slots: list[tuple[int, int] | None] = [None] * n_slots
    used: list[int] = [0] * n_slots
    hits: dict[tuple[int, int], int] = {}
    for now, (program, number) in enumerate(chains[0], start=1):
        turn = script.programs[program][number]
        known = context.get(program, 0)
        prompt = known + turn.growth_tokens
        common = [_common(slot, program, known, script.shared_tokens) for slot in slots]
        best = max(range(n_slots), key=lambda i: (common[i], -i))
        if common[best] <= LEAST_SIMILARITY * prompt:
            best = min(range(n_slots), key=lambda i: (used[i], -i))  # of slots never used, the last
        hits[program, number] = min(common[best], prompt - 1)
        # The last token said was never computed, so it is not in the slot.
        slots[best] = (program, prompt + turn.output_tokens - 1)
        used[best] = now
        context[program] = prompt + (turn.output_tokens if script.keeps_replies else 0)
    return hits


def _common(slot: tuple[int, int] | None, program: int, known: int, shared: int) -> int:
    if slot is None:
        return 0
    owner, n_tokens = slot
    return min(n_tokens, known) if owner == program else min(n_tokens, shared)
