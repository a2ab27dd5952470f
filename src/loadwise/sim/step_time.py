"""How long an engine step takes: a roofline in closed form.

For decoding requests D and prompt chunks C (chunk i: n_i new tokens after s_i), with T = |D| + sum of n_i:

    weights   = weights_s + expert_weights_s (1 - (1 - expert_ratio)^T)     the experts that T tokens use are read
    linear    = ((gemm_s_per_token T)^4 + weights^4)^(1/4)          compute-bound or weight-bound, smoothly
    decode    = kv_s_per_token * sum of contexts over D             decode attention reads the context's KV
    prefill   = max(attention_s_per_pair * sum n_i (s_i + n_i/2), kv_s_per_token * sum s_i)
    state     = state_s_per_request |D| + scan_s_per_token * sum n_i        linear-attention layers
    gpu       = fixed_s + linear + decode + prefill + state + token_s T + request_s (|D| + |C|)
    step      = max(gpu, host) or gpu + host,  host = host_s + host_s_per_request (|D| + |C|)

Decode attention is linear in the KV that is read, matrix products are a smooth maximum of compute and weight traffic,
and the host costs something per step and per request; these three facts are measured (docs/simulator.md names the
sources). Contexts are *logical* tokens: a prefix shared in memory is read once per request all the same. Over k decode
steps of the same requests the decode term grows by `kv_s_per_token |D|` each step, so their sum has a closed form.
"""

import math

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .bounds import SECONDS_MAX, require_within


class Batch(msgspec.Struct):
    """What one step computes, as far as its duration depends on it."""

    n_decode: int = 0
    context_tokens: int = 0
    """KV that decoding requests read."""
    n_prefill: int = 0
    new_tokens: int = 0
    """Of prompt chunks."""
    pairs: float = 0.0
    """Query-key pairs of prompt chunks: sum of n (s + n/2)."""
    prefix_tokens: int = 0
    """KV before prompt chunks: sum of s."""

    def add(self, n_computed: int, n_new: int, *, is_decode: bool) -> None:
        """One more request: `n_new` tokens after `n_computed`."""
        if is_decode:
            self.n_decode += 1
            self.context_tokens += n_computed
        else:
            self.n_prefill += 1
            self.new_tokens += n_new
            self.pairs += n_new * (n_computed + n_new / 2)
            self.prefix_tokens += n_computed


class StepCost(Fact, frozen=True, kw_only=True):
    """The constants of the module's formula, in seconds."""

    fixed_s: float = 0.002
    weights_s: float = 0.006
    gemm_s_per_token: float = 25e-6
    kv_s_per_token: float = 50e-9
    attention_s_per_pair: float = 1e-9
    request_s: float = 10e-6
    state_s_per_request: float = 0.0
    scan_s_per_token: float = 0.0
    token_s: float = 0.0
    """Of every token, beside matrix products: what GPUs of one engine exchange."""
    expert_weights_s: float = 0.0
    """Reading all experts of a mixture; `weights_s` is then what every step reads."""
    expert_ratio: float = 0.0
    """Share of the experts that one token uses."""
    host_s: float = 0.0
    host_s_per_request: float = 0.0
    is_host_overlapped: bool = True
    """Asynchronous scheduling (vLLM's default since 0.14): the host works while the GPU does."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"step {name} is {value!r}; it must be a finite number >= 0")
            require_within(f"step {name}", value, 0, SECONDS_MAX)
        if self.expert_ratio > 1:
            raise ConfigError(f"step expert_ratio is {self.expert_ratio!r}; it must be in [0, 1]")
        if self.fixed_s + self.weights_s + self.request_s + self.host_s <= 0:
            raise ConfigError("step has fixed_s, weights_s, request_s and host_s of 0: a step would take no time")

    def host_step_s(self, batch: Batch) -> float:
        """The host's part."""
        return self.host_s + self.host_s_per_request * (batch.n_decode + batch.n_prefill)

    def gpu_step_s(self, batch: Batch) -> float:
        """The GPU's part."""
        n_tokens = batch.n_decode + batch.new_tokens
        weights = self.weights_s
        if self.expert_weights_s:
            weights += self.expert_weights_s * (1 - (1 - self.expert_ratio) ** n_tokens)
        # Squares instead of powers: compiled code (`hybrid_core`) must arrive at the same bits.
        x = self.gemm_s_per_token * n_tokens
        x, weights = x * x, weights * weights
        linear = math.sqrt(math.sqrt(x * x + weights * weights))
        prefill = max(self.attention_s_per_pair * batch.pairs, self.kv_s_per_token * batch.prefix_tokens)
        state = self.state_s_per_request * batch.n_decode + self.scan_s_per_token * batch.new_tokens
        requests = self.token_s * n_tokens + self.request_s * (batch.n_decode + batch.n_prefill)
        decode = self.kv_s_per_token * batch.context_tokens
        return self.fixed_s + linear + decode + prefill + state + requests

    def step_s(self, batch: Batch) -> float:
        """One step."""
        gpu_s, host_s = self.gpu_step_s(batch), self.host_step_s(batch)
        return max(gpu_s, host_s) if self.is_host_overlapped else gpu_s + host_s

    def steps(self, batch: Batch, n_steps: int) -> "StepRun":
        """`n_steps` steps of the same decoding requests, or as many of them as follow one formula."""
        first_s, growth_s = self.step_s(batch), self.kv_s_per_token * batch.n_decode
        gpu_s, host_s = self.gpu_step_s(batch), self.host_step_s(batch)
        if n_steps > 1 and self.is_host_overlapped and gpu_s < host_s and growth_s > 0:
            n_below = (host_s - gpu_s) / growth_s  # infinite where growth is next to nothing
            return StepRun(first_s, 0.0, n_steps if n_below >= n_steps else math.floor(n_below) + 1)
        return StepRun(first_s, growth_s, n_steps)


class StepRun(msgspec.Struct, frozen=True):
    """Steps in a row, each longer than the one before by the same amount."""

    first_s: float
    growth_s: float
    n_steps: int

    def until_s(self, n: int) -> float:
        """Seconds until the first `n` steps are done."""
        return n * self.first_s + self.growth_s * (n * (n - 1) / 2)

    def n_done(self, elapsed_s: float) -> int:
        """Steps done after so many seconds; a step counts from a millionth of its length before its end on."""
        low, high = 0, self.n_steps
        while low < high:
            n = (low + high + 1) // 2
            if self.until_s(n) <= elapsed_s + _TOLERANCE * self.first_s:
                low = n
            else:
                high = n - 1
        return low

    def after(self, n: int) -> "StepRun":
        """What is left when `n` steps are done."""
        return StepRun(self.first_s + n * self.growth_s, self.growth_s, self.n_steps - n)


_TOLERANCE = 1e-6
"""Fraction of a step by which a driver's sum of floats may fall short of the step's end."""
