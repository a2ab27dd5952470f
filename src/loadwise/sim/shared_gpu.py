"""Several engines on one GPU: they share its time, and where they are told to, one KV memory.

Kernels of different processes take turns. So a GPU is a processor-sharing station: of k engines with a step in flight
each goes on at the rate `overlap_ratio / k`, never above 1; 1 is pure time slicing, k would be no interference at all.
An engine has a clock of its own which runs at that rate, so no engine knows of another, and any engine can be a tenant.
Not modelled: host parts, which are not shared, and cache or bandwidth effects beyond the one ratio. No public
measurement of the ratio was found.

Laws, checked: engines together never do more than `overlap_ratio` seconds of work in a second, and a shared memory is
never exceeded.
"""

from collections.abc import Callable, Sequence

from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.fact import Fact

from .bounds import require_within
from .engine import Engine, EngineRequest, Step
from .hardware import GIB, OVERHEAD_BYTES, HardwareSpec
from .kv_arena import KvArena
from .vllm_engine import VllmEngineSpec


class SharedGpuSpec(Fact, frozen=True, kw_only=True):
    """One entry under `gpus:`: a GPU that several backends' engines run on."""

    backends: list[str]
    overlap_ratio: float = 1.0
    """Work that engines get done together in a second, when all have some; at least 1."""
    shares_kv: bool = False
    """One KV memory for all of them, instead of one each."""
    kv_gib: float | None = None
    """That memory; what the hardware leaves beside all weights where absent."""

    def __post_init__(self) -> None:
        if len(self.backends) < 2 or len(set(self.backends)) < len(self.backends):
            raise ConfigError(f"gpus backends is {self.backends!r}; it must name at least two, each once")
        require_within("gpus overlap_ratio", self.overlap_ratio, 1, len(self.backends))
        if self.kv_gib is not None:
            if not self.shares_kv:
                raise ConfigError(f"gpus kv_gib is {self.kv_gib!r}; it needs shares_kv: true")
            require_within("gpus kv_gib", self.kv_gib, 1e-3, 1e6)

    def check_engines(self, name: str, engines: Sequence[tuple[str, object]]) -> None:
        """Refuse what one GPU cannot hold.

        Raises:
            ConfigError: an engine that has no GPU, hardware that differs, or more memory than there is.
        """
        hardware: list[HardwareSpec] = []
        for backend, spec in engines:
            if self.shares_kv and (not isinstance(spec, VllmEngineSpec) or spec.hardware is None):
                raise ConfigError(f"gpus {name!r}: engine {backend!r} needs kind vllm and hardware to share KV memory")
            if self.shares_kv and isinstance(spec, VllmEngineSpec) and spec.num_gpu_blocks is not None:
                blocks = spec.num_gpu_blocks
                raise ConfigError(
                    f"gpus {name!r}: engine {backend!r} has num_gpu_blocks {blocks}, but shares its memory"
                )
            if isinstance(spec, VllmEngineSpec) and spec.hardware is not None:
                hardware.append(spec.hardware)
        if not hardware:
            return
        if len({(h.gpu, h.n_gpus, h.memory_ratio) for h in hardware}) > 1:
            raise ConfigError(f"gpus {name!r}: engines must agree in gpu, n_gpus and memory_ratio")
        left = memory_left(hardware)
        wanted = float(self.kv_bytes(hardware)) if self.shares_kv else sum(_own_kv_bytes(spec) for _, spec in engines)
        if wanted > left or left <= 0:
            raise ConfigError(
                f"gpus {name!r}: engines want {wanted / GIB:.1f} GiB for KV, weights leave {left / GIB:.1f} GiB on "
                f"{hardware[0].n_gpus} {hardware[0].gpu}"
            )

    def kv_bytes(self, hardware: Sequence[HardwareSpec]) -> int:
        """The shared memory."""
        return int(memory_left(hardware) if self.kv_gib is None else self.kv_gib * GIB)


def memory_left(hardware: Sequence[HardwareSpec]) -> float:
    """What all weights and overheads leave for KV, in bytes."""
    first = hardware[0]
    usable = first.memory_ratio * first.gpu_facts.memory_gib * GIB - len(hardware) * OVERHEAD_BYTES
    return first.n_gpus * usable - sum(h.model_facts.weight_bytes(h.precision) for h in hardware)


def _own_kv_bytes(spec: object) -> float:
    if not isinstance(spec, VllmEngineSpec) or spec.hardware is None:
        return 0.0
    return float(spec.kv_tokens * spec.hardware.model_facts.kv_bytes_per_token)


class SharedGpu:
    """The time of one GPU, and perhaps its memory."""

    def __init__(self, spec: SharedGpuSpec, now: Callable[[], float], poke: Callable[[str], None]) -> None:
        """
        Args:
            now: The world's clock.
            poke: Have a backend's engine brought to the present soon, because its rate or memory changed.
        """
        self.spec = spec
        self.arena: KvArena | None = None
        self.tenants: dict[str, Tenant] = {}
        self.work_s = 0.0
        """Done by all engines so far, each second at rate 1 counted once."""
        self.busy_s = 0.0
        """With at least one step in flight."""
        self._now = now
        self._poke = poke
        self._synced_at_s = 0.0
        self._n_busy = 0

    @property
    def rate(self) -> float:
        """At which a busy engine's clock runs."""
        return min(1.0, self.spec.overlap_ratio / max(self._n_busy, 1))

    def join(self, name: str, engine: Engine) -> "Tenant":
        """A new engine, in the place of an older one of that name (which is gone, with its work)."""
        self.sync(self._now())
        self.tenants[name] = Tenant(self, name, engine)
        self.settle(name)
        self.memory_freed(name)
        return self.tenants[name]

    def sync(self, now_s: float) -> None:
        """Bring all engines' clocks to the present."""
        elapsed_s, self._synced_at_s = now_s - self._synced_at_s, now_s
        if elapsed_s <= 0:
            return
        for tenant in self.tenants.values():
            tenant.own_s += elapsed_s * (self.rate if tenant.is_busy else 1.0)
        self.work_s += elapsed_s * self.rate * self._n_busy
        self.busy_s += elapsed_s if self._n_busy else 0.0

    def settle(self, name: str) -> None:
        """An engine may have begun or ended to be busy: the rates of others change with it."""
        n_busy = sum(tenant.is_busy for tenant in self.tenants.values())
        if n_busy == self._n_busy:
            return
        before = self.rate
        self._n_busy = n_busy
        if self.rate != before:
            self.poke_others(name, lambda tenant: tenant.is_busy)

    def poke_others(self, name: str, which: "Callable[[Tenant], bool]") -> None:
        """Have others brought to the present."""
        for other, tenant in self.tenants.items():
            if other != name and which(tenant):
                self._poke(other)

    def memory_freed(self, name: str) -> None:
        """Others that have nothing in flight may have waited for memory."""
        self.poke_others(name, lambda tenant: not tenant.is_busy)

    def check(self) -> None:
        """Raise `LawBroken` where the GPU did more than it can, or memory is overcommitted."""
        if self.work_s > self.spec.overlap_ratio * self.busy_s * (1 + 1e-9) + 1e-9:
            raise LawBroken("L4", f"engines did {self.work_s} s of work on a GPU that was busy for {self.busy_s} s")
        if self.arena is not None:
            self.arena.check()


class Tenant:
    """An engine whose clock runs as the GPU lets it."""

    def __init__(self, gpu: SharedGpu, name: str, engine: Engine) -> None:
        self.own_s = 0.0
        self.is_busy = False
        self._gpu = gpu
        self._name = name
        self._engine = engine

    def submit(self, request: EngineRequest) -> None:
        self._engine.submit(request)

    def cancel(self, request_id: int) -> bool:
        return self._engine.cancel(request_id)

    def set_speed(self, ratio: float) -> None:
        self._engine.set_speed(ratio)

    def step(self, now_s: float) -> Step:
        self._gpu.sync(now_s)
        step = self._engine.step(self.own_s)
        self.is_busy = step.seconds > 0
        self._gpu.settle(self._name)
        return Step(step.seconds / self._gpu.rate, step.outputs)

    def signals(self, now_s: float) -> dict[str, float]:
        self._gpu.sync(now_s)
        return self._engine.signals(self.own_s)

    def check(self) -> None:
        self._engine.check()
        self._gpu.check()
