"""From a GPU, a model and a precision to an engine: what a step costs, how many blocks there are, how large they are.

Everything follows from three tables (`tables/hardware.yaml`, with the source of every row): what a GPU has, what a
model needs, and which share of the peak an engine reaches. Formulas are those of `step_time`; the KV pool is

    tokens = (memory_ratio * memory - weights - 4 GiB) / KV bytes per token

which meets vLLM 0.30.0's own figure for Qwen3-8B on an H100 within 1 %. Hybrid models: vLLM makes a block as large as a
layer's recurrent state, rounded up to 16 tokens (784 for Qwen3.6-27B), and groups its layers by kind.
"""

import functools
import math
from importlib import resources
from typing import Any, Literal

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.settings import parse_yaml

from .step_time import StepCost

Precision = Literal["bf16", "fp8"]
GIB = 2**30
OVERHEAD_BYTES = 4 * GIB
"""Activations, graphs and what is not PyTorch's, beside weights and KV, on each GPU."""
MIXTURE_OVERHEAD_BYTES = OVERHEAD_BYTES + 5 * GIB // 2
"""Mixtures of experts need more activations; 2.5 GiB is the difference that inference-sim (BLIS) makes."""
BLOCK_TOKENS = 16
SCAN_S_PER_TOKEN_H200 = 63e-9
"""A linear-attention layer's work per prompt token: 129 us for 2,048 tokens (kernel table, H200, Qwen3.6-27B)."""
_STATE_BYTES_MEASURED = 3_207_168


class Gpu(Fact, frozen=True, kw_only=True):
    """What a GPU has."""

    memory_gib: float
    bandwidth_tb_per_s: float
    bf16_tflop_per_s: float
    """Dense; twice that in fp8."""
    link_gb_per_s: float
    """Between GPUs of one engine, of each, in one direction."""
    link_s: float
    """Of one exchange, however small."""
    source: str


class Model(Fact, frozen=True, kw_only=True):
    """What a model needs."""

    layers: int
    attention_layers: int
    heads: int
    kv_heads: int
    head_size: int
    linear_g: float
    vocabulary: int
    hidden: int
    is_tied: bool = False
    state_bytes_per_layer: int = 0
    """Of each layer that is not attention."""
    expert_g: float = 0.0
    """Parameters of all experts of a mixture, in 1e9; `linear_g` is what one token uses, its experts included."""
    expert_ratio: float = 0.0
    """Share of the experts that one token uses."""
    source: str

    @property
    def head_parameters(self) -> int:
        """Of the output head, and of the embedding."""
        return self.vocabulary * self.hidden

    def weight_bytes(self, precision: Precision) -> float:
        """Memory that weights take; embedding and head stay bf16."""
        n_tables = 1 if self.is_tied else 2
        return self._linear_bytes(precision) + 2 * n_tables * self.head_parameters

    def read_bytes(self, precision: Precision) -> float:
        """Weights that every step reads, whatever its tokens are."""
        dense_g = self.linear_g - self.expert_g * self.expert_ratio
        return dense_g * 1e9 * _weight_size(precision) + 2 * self.head_parameters

    def expert_bytes(self, precision: Precision) -> float:
        """Of all experts."""
        return self.expert_g * 1e9 * _weight_size(precision)

    def _linear_bytes(self, precision: Precision) -> float:
        dense_g = self.linear_g - self.expert_g * self.expert_ratio
        return dense_g * 1e9 * _weight_size(precision) + self.expert_bytes(precision)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all attention layers, in bf16."""
        return 2 * self.attention_layers * self.kv_heads * self.head_size * 2

    @property
    def n_state_groups(self) -> int:
        """Groups of linear-attention layers, each as large as the one of attention layers."""
        return -(-(self.layers - self.attention_layers) // self.attention_layers)

    @property
    def block_size(self) -> int:
        """Tokens of a block: 16, or as many as make a block as large as a state."""
        per_layer = self.kv_bytes_per_token // self.attention_layers
        return BLOCK_TOKENS * max(math.ceil(self.state_bytes_per_layer / (BLOCK_TOKENS * per_layer)), 1)


def _weight_size(precision: Precision) -> int:
    return 2 if precision == "bf16" else 1


class Constants(Fact, frozen=True, kw_only=True):
    """Which share of the peak an engine reaches on a GPU, and what its steps cost besides."""

    gpu: str
    precision: Precision
    weights: float
    compute: float
    kv: float
    wide_kv: float
    attention: float
    state: float
    fixed_s: float
    layer_s: float
    request_s: float
    host_s: float = 0.0
    host_request_s: float = 0.0
    experts: float = 0.4
    """Share of the bandwidth at which experts of a mixture are read. Chosen so that GLM-4.6 on 8 H100 meets the rate
    that ThunderAgent's Fig. 1 has for 24 programs; no kernel table was at hand."""
    source: str

    def __post_init__(self) -> None:
        for name in ("weights", "compute", "kv", "wide_kv", "attention", "state", "experts"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"constants {name} of {self.gpu} is {value!r}; it must be a finite number > 0")


class Tables(Fact, frozen=True, kw_only=True):
    """The file."""

    gpus: dict[str, Gpu]
    constants: list[Constants]
    kernel_constants: list[Constants]
    models: dict[str, Model]


def read_table(name: str) -> dict[str, Any]:
    """A table that is part of the package."""
    text = resources.files("loadwise.sim").joinpath("tables", name).read_text(encoding="utf-8")
    return parse_yaml(text, where=name)


@functools.cache
def tables() -> Tables:
    """The shipped tables."""
    return msgspec.convert(read_table("hardware.yaml"), Tables)


def _named(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"{kind} {name!r} is unknown; known: {', '.join(sorted(known))}")
    return known[name]


def constants_for(gpu: str, precision: Precision, *, from_kernels: bool = False) -> Constants:
    """The shipped row.

    Args:
        from_kernels: Sums of timed kernels instead of what whole engines reach.

    Raises:
        ConfigError: there is none.
    """
    rows = tables().kernel_constants if from_kernels else tables().constants
    for row in rows:
        if (row.gpu, row.precision) == (gpu, precision):
            return row
    known = ", ".join(f"{row.gpu} {row.precision}" for row in rows)
    raise ConfigError(f"there are no constants for {gpu!r} in {precision}; there are for: {known}")


class HardwareSpec(Fact, frozen=True, kw_only=True):
    """What an engine runs, and on what: the `hardware:` of an engine with `kind: vllm`."""

    gpu: str
    model: str
    precision: Precision = "bf16"
    n_gpus: int = 1
    """Tensor parallel; timing beyond one is not validated."""
    memory_ratio: float = 0.9
    """vLLM's `gpu_memory_utilization`."""
    constants: Constants | None = None
    """Own ones, from a calibration; the shipped row where absent."""

    def __post_init__(self) -> None:
        _named("gpu", self.gpu, tables().gpus)
        _named("model", self.model, tables().models)
        if not 1 <= self.n_gpus <= 64:
            raise ConfigError(f"hardware n_gpus is {self.n_gpus!r}; it must be in 1..64")
        if not 0 < self.memory_ratio <= 1:
            raise ConfigError(f"hardware memory_ratio is {self.memory_ratio!r}; it must be in (0, 1]")
        if self.constants is None:
            constants_for(self.gpu, self.precision)
        if self.kv_tokens < self.model_facts.block_size:
            raise ConfigError(f"{self.model} in {self.precision} leaves no memory for KV on {self.n_gpus} {self.gpu}")

    @property
    def gpu_facts(self) -> Gpu:
        """Its row."""
        return tables().gpus[self.gpu]

    @property
    def model_facts(self) -> Model:
        """Its row."""
        return tables().models[self.model]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds; states of hybrid models come out of it."""
        model = self.model_facts
        overhead = MIXTURE_OVERHEAD_BYTES if model.expert_g else OVERHEAD_BYTES
        each = self.memory_ratio * self.gpu_facts.memory_gib * GIB - overhead
        rest = self.n_gpus * each - model.weight_bytes(self.precision)
        return max(int(rest / model.kv_bytes_per_token), 0)

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.kv_tokens // self.model_facts.block_size

    @property
    def step(self) -> StepCost:
        """What a step costs."""
        constants = self.constants or constants_for(self.gpu, self.precision)
        return step_cost(self.gpu_facts, self.model_facts, self.precision, constants, self.n_gpus)


def step_cost(gpu: Gpu, model: Model, precision: Precision, constants: Constants, n_gpus: int = 1) -> StepCost:
    """The roofline's constants in seconds. GPUs of one engine share all work and exchange activations twice a layer."""
    bandwidth = gpu.bandwidth_tb_per_s * 1e12 * n_gpus
    bf16 = gpu.bf16_tflop_per_s * 1e12 * n_gpus
    n_exchanges = 2 * model.layers if n_gpus > 1 else 0
    ring_bytes = 2 * (n_gpus - 1) / n_gpus * 2 * model.hidden
    peak = bf16 if precision == "bf16" else 2 * bf16
    kv = constants.wide_kv if model.head_size > 128 else constants.kv
    pair_flop = 4 * model.heads * model.head_size * model.attention_layers
    n_linear_layers = model.layers - model.attention_layers
    state_bytes = n_linear_layers * model.state_bytes_per_layer
    scan_s = SCAN_S_PER_TOKEN_H200 * n_linear_layers * model.state_bytes_per_layer / _STATE_BYTES_MEASURED
    return StepCost(
        fixed_s=constants.fixed_s + constants.layer_s * model.layers + n_exchanges * gpu.link_s,
        weights_s=model.read_bytes(precision) / (bandwidth * constants.weights),
        expert_weights_s=model.expert_bytes(precision) / (bandwidth * constants.experts),
        expert_ratio=model.expert_ratio,
        token_s=n_exchanges * ring_bytes / (gpu.link_gb_per_s * 1e9),
        gemm_s_per_token=2 * model.linear_g * 1e9 / (peak * constants.compute),
        kv_s_per_token=model.kv_bytes_per_token / (bandwidth * kv),
        attention_s_per_pair=pair_flop / (bf16 * constants.attention),
        request_s=constants.request_s,
        state_s_per_request=2 * state_bytes / (bandwidth * constants.state),
        scan_s_per_token=scan_s * 989e12 / bf16,
        host_s=constants.host_s,
        host_s_per_request=constants.host_request_s,
    )
