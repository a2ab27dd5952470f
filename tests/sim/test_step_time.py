"""The step-time formula, its shipped constants, and the public figures that they must reproduce."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.sim.calibrate import FITTED, Calibration, Cell, calibrate, cell_errors, simulate_cell
from loadwise.sim.hardware import HardwareSpec, Precision, constants_for, read_table, tables
from loadwise.sim.step_time import Batch, StepCost, StepRun
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

MILLI = 1e-3


def batch(*requests: tuple[int, int]) -> Batch:
    """Of (computed, new) tokens; one new token is a decoding request."""
    made = Batch()
    for n_computed, n_new in requests:
        made.add(n_computed, n_new, is_decode=n_new == 1)
    return made


def test_each_term_is_its_formula() -> None:
    """With one constant at a time, a step of two decoding requests and a chunk costs what the formula says."""
    some = batch((1000, 1), (500, 1), (200, 100))
    zero = dict.fromkeys(StepCost.__struct_fields__, 0.0) | {"fixed_s": 1.0, "is_host_overlapped": False}

    def extra(**constants: float) -> float:
        return msgspec.convert(zero | constants, StepCost).step_s(some) - 1.0

    assert extra(weights_s=2.0) == pytest.approx(2.0)
    assert extra(gemm_s_per_token=0.01) == pytest.approx(1.02)
    assert extra(weights_s=1.02, gemm_s_per_token=0.01) == pytest.approx(1.02 * 2**0.25)
    assert extra(kv_s_per_token=0.001) == pytest.approx(1.5 + 0.2)
    assert extra(attention_s_per_pair=1e-4) == pytest.approx(100 * 250 * 1e-4)
    assert extra(kv_s_per_token=0.001, attention_s_per_pair=1e-4) == pytest.approx(1.5 + 2.5)
    assert extra(state_s_per_request=0.1) == pytest.approx(0.2)
    assert extra(scan_s_per_token=0.01) == pytest.approx(1.0)
    assert extra(token_s=0.01) == pytest.approx(1.02)
    assert extra(request_s=0.1) == pytest.approx(0.3)
    assert extra(host_s=0.5, host_s_per_request=0.1) == pytest.approx(0.8)
    assert extra(expert_weights_s=1.0, expert_ratio=0.01) == pytest.approx(1 - 0.99**102)


def test_the_host_hides_behind_the_gpu_or_adds_to_it() -> None:
    """Overlapped, the longer part counts; otherwise their sum."""
    cost = StepCost(fixed_s=0.01, weights_s=0, gemm_s_per_token=0, kv_s_per_token=0, request_s=0, host_s=0.03)
    assert cost.step_s(batch((10, 1))) == pytest.approx(0.03)
    assert msgspec.structs.replace(cost, is_host_overlapped=False).step_s(batch((10, 1))) == pytest.approx(0.04)


costs = st.builds(
    StepCost,
    fixed_s=st.floats(1e-4, 1e-2),
    kv_s_per_token=st.floats(0, 1e-5),
    host_s=st.floats(0, 0.05),
    host_s_per_request=st.floats(0, 1e-3),
    is_host_overlapped=st.booleans(),
)


@given(cost=costs, contexts=st.lists(st.integers(1, 20_000), min_size=1, max_size=8), n_steps=st.integers(1, 40))
def test_a_run_of_steps_is_the_sum_of_its_steps(cost: StepCost, contexts: list[int], n_steps: int) -> None:
    """Law: the closed form over k decode steps equals k single steps, also where the host's floor is crossed."""
    run = cost.steps(batch(*((n, 1) for n in contexts)), n_steps)
    assert 1 <= run.n_steps <= n_steps
    single = [cost.step_s(batch(*((n + i, 1) for n in contexts))) for i in range(run.n_steps)]
    assert run.until_s(run.n_steps) == pytest.approx(sum(single), rel=1e-9)


@given(
    first_s=st.floats(1e-3, 1.0),
    growth_s=st.floats(0, 1e-2),
    n_steps=st.integers(1, 50),
    n=st.integers(0, 50),
    part=st.floats(0.001, 0.99),
)
def test_steps_done_are_counted_from_the_clock(
    first_s: float, growth_s: float, n_steps: int, n: int, part: float
) -> None:
    """Law: between the ends of steps n and n + 1, n are done; what is left takes the rest of the time."""
    run, n = StepRun(first_s, growth_s, n_steps), min(n, n_steps)
    at_s = run.until_s(n) + (part * (run.until_s(n + 1) - run.until_s(n)) if n < n_steps else 0.0)
    assert run.n_done(at_s) == n
    rest = run.after(n)
    assert run.until_s(n) + rest.until_s(rest.n_steps) == pytest.approx(run.until_s(n_steps), abs=1e-9)


# KV tokens in thousands on A100-80, H100-80, GH200-96, H200, B200, GB200, as the project's report computed them.
KV_TABLE: list[tuple[str, Precision, tuple[int, ...]]] = [
    ("llama-3.2-3b", "bf16", (573, 574, 703, 1084, 1410, 1457)),
    ("llama-3.1-8b", "bf16", (428, 429, 541, 875, 1160, 1201)),
    ("llama-3.1-8b", "fp8", (0, 482, 595, 929, 1213, 1255)),
    ("qwen3-8b", "bf16", (379, 379, 479, 776, 1029, 1066)),
    ("qwen3-14b", "fp8", (0, 341, 432, 699, 926, 959)),
    ("qwen2.5-14b", "bf16", (217, 217, 292, 515, 705, 732)),
    ("qwen3-32b", "fp8", (0, 145, 201, 368, 510, 531)),
    ("r1-distill-qwen-32b", "bf16", (0, 0, 82, 249, 391, 412)),
    ("mistral-small-24b", "bf16", (153, 153, 243, 511, 738, 771)),
    ("ministral-3-14b", "fp8", (0, 350, 441, 708, 935, 968)),
    ("qwen3.5-9b", "bf16", (1657, 1658, 2109, 3445, 4584, 4749)),
    ("qwen3.6-27b", "fp8", (0, 653, 879, 1547, 2116, 2198)),
]
GPUS = ("a100", "h100", "gh200", "h200", "b200", "gb200")


@pytest.mark.parametrize(("model", "precision", "thousands"), KV_TABLE)
def test_kv_capacity_is_that_of_the_table(model: str, precision: Precision, thousands: tuple[int, ...]) -> None:
    """Each entry within 0.5 % (or the table's rounding)."""
    for gpu, expected in zip(GPUS, thousands, strict=True):
        if expected:
            found = HardwareSpec(gpu=gpu, model=model, precision=precision).kv_tokens / 1000
            assert found == pytest.approx(expected, rel=5e-3, abs=1.0), gpu


@pytest.mark.parametrize("series", read_table("silybench.yaml")["series"])
def test_kv_capacity_is_what_vllm_reported(series: dict[str, int]) -> None:
    """Qwen3-8B on an H100 with vLLM 0.30.0, both precisions: within 1.5 %."""
    spec = HardwareSpec(gpu="h100", model="qwen3-8b", precision=series["precision"])  # type: ignore[arg-type]
    assert spec.kv_tokens == pytest.approx(series["kv_tokens"], rel=0.015)


def test_hybrid_blocks_follow_from_the_model() -> None:
    """784 tokens for Qwen3.6-27B (as vLLM logs), 528 for Qwen3.5-9B, three groups of states; else 16 and none."""
    models = tables().models
    assert (models["qwen3.6-27b"].block_size, models["qwen3.6-27b"].n_state_groups) == (784, 3)
    assert (models["qwen3.5-9b"].block_size, models["qwen3.5-9b"].n_state_groups) == (528, 3)
    assert (models["qwen3-8b"].block_size, models["qwen3-8b"].n_state_groups) == (16, 0)


# Milliseconds of a step: 1 request at 1k, 16 at 8k, 32 at 16k, and a chunk of 8,192; the report's own samples.
SAMPLES: list[tuple[str, str, Precision, tuple[float, ...]]] = [
    ("h100", "llama-3.1-8b", "bf16", (6.8, 12.6, 29.8, 216)),
    ("h100", "qwen3-32b", "fp8", (15.2, 26.6, 60.9, 719)),
    ("h200", "r1-distill-qwen-32b", "bf16", (19.2, 28.6, 56.7, 878)),
    ("b200", "r1-distill-qwen-32b", "bf16", (14.8, 20.6, 37.6, 383)),
    ("b200", "mistral-small-24b", "bf16", (11.1, 14.8, 25.5, 266)),
    ("b200", "llama-3.1-8b", "bf16", (5.3, 8.3, 16.9, 94)),
]


@pytest.mark.parametrize(("gpu", "model", "precision", "expected"), SAMPLES)
def test_steps_last_what_the_report_computed(
    gpu: str, model: str, precision: Precision, expected: tuple[float, ...]
) -> None:
    """GPU time (without the B200's host floor) within 2.5 %."""
    cost = HardwareSpec(gpu=gpu, model=model, precision=precision).step
    batches = [batch((1000, 1)), batch(*[(8000, 1)] * 16), batch(*[(16_000, 1)] * 32), batch((0, 8192))]
    for some, milliseconds in zip(batches, expected, strict=True):
        assert cost.gpu_step_s(some) == pytest.approx(milliseconds * MILLI, rel=0.025)


def test_small_models_on_b200_are_bound_by_the_host() -> None:
    """Qwen3-8B at 64 users: measured 12.9 ms (vLLM 0.11), of which the GPU explains half; ours lies between."""
    cost = HardwareSpec(gpu="b200", model="qwen3-8b").step
    some = batch(*[(1000, 1)] * 64)
    assert cost.host_step_s(some) > cost.gpu_step_s(some)
    assert 7 * MILLI < cost.step_s(some) < 13 * MILLI


def cells_of(series: dict[str, object], table: dict[str, object]) -> tuple[list[Cell], list[Cell]]:
    """The cells to fit, and those held out."""
    fit: list[Cell] = []
    held_out: list[Cell] = []
    for shape in series["cells"]:  # type: ignore[attr-defined]
        for users, rate in shape["at"].items():
            cell = Cell(
                prompt_tokens=shape["prompt"],
                output_tokens=shape["output"],
                concurrency=users,
                output_tokens_per_s=float(rate),
            )
            is_fit = [shape["prompt"], shape["output"], users] in table["fit"]  # type: ignore[operator]
            (fit if is_fit else held_out).append(cell)
    return fit, held_out


@pytest.mark.parametrize("i", [0, 1], ids=["bf16", "fp8"])
def test_seven_cells_predict_the_others(i: int) -> None:
    """From kernel tables and seven cells: throughput of the 33 (32) others within 3.5 % on average, the seven in 2 %.

    The prototype reaches 2.5 and 3.1 %. Kernel tables alone are more than 10 % off, so the fit is what does it.
    """
    table = read_table("silybench.yaml")
    series = table["series"][i]
    fit, held_out = cells_of(series, table)
    assert (len(fit), len(held_out)) == (7, 33 - i)
    hardware = HardwareSpec(gpu="h100", model="qwen3-8b", precision=series["precision"])
    spec = VllmEngineSpec(num_gpu_blocks=series["kv_tokens"] // 16, max_num_seqs=1024)
    start = constants_for("h100", series["precision"], from_kernels=True)
    found = calibrate(fit, hardware, start, spec)
    assert found.mean_error < 0.02
    fitted = msgspec.structs.replace(hardware, constants=found.constants)
    assert np.mean(np.abs(cell_errors(held_out, fitted, spec))) <= 0.035
    kernels = msgspec.structs.replace(hardware, constants=start)
    assert np.mean(np.abs(cell_errors(held_out, kernels, spec))) > 0.10
    shipped = constants_for("h100", series["precision"])
    for name in ("weights", "compute", "kv", "attention"):
        assert getattr(found.constants, name) == pytest.approx(getattr(shipped, name), rel=0.03)


def test_a_fit_finds_what_made_the_measurements() -> None:
    """Cells made by known constants are fitted to within a percent of throughput, from a start that is 20 % off."""
    shapes = [(128, 64, 1), (128, 64, 16), (2000, 64, 8), (1000, 32, 16)]
    hardware = HardwareSpec(gpu="h100", model="llama-3.1-8b")
    truth = constants_for("h100", "bf16")
    spec = VllmEngineSpec(num_gpu_blocks=20_000)
    cells = []
    for prompt, output, users in shapes:
        engine = msgspec.structs.replace(spec, step=hardware.step)
        blank = Cell(prompt_tokens=prompt, output_tokens=output, concurrency=users, output_tokens_per_s=1.0)
        cells.append(msgspec.structs.replace(blank, output_tokens_per_s=simulate_cell(blank, engine)))
    off = msgspec.structs.replace(truth, weights=truth.weights * 0.8, compute=truth.compute * 0.8)
    found = calibrate(cells, hardware, off, spec)
    assert isinstance(found, Calibration)
    assert found.max_error < 0.01
    assert max(abs(e) for e in cell_errors(cells, msgspec.structs.replace(hardware, constants=off), spec)) > 0.08


def test_bad_measurements_are_refused() -> None:
    """Too few cells, or rates that are no rates."""
    hardware = HardwareSpec(gpu="h100", model="qwen3-8b")
    with pytest.raises(ConfigError, match="at least 3"):
        calibrate([], hardware, constants_for("h100", "bf16"), VllmEngineSpec())
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="output_tokens_per_s"):
            Cell(prompt_tokens=1, output_tokens=1, concurrency=1, output_tokens_per_s=bad)
    with pytest.raises(ConfigError, match="concurrency"):
        Cell(prompt_tokens=1, output_tokens=1, concurrency=0, output_tokens_per_s=1.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpu": "h10"}, "'h10' is unknown; known: a100"),
        ({"model": "qwen4"}, "'qwen4' is unknown"),
        ({"gpu": "a100", "precision": "fp8"}, "no constants for 'a100' in fp8"),
        ({"memory_ratio": 0.0}, "memory_ratio"),
        ({"n_gpus": 0}, "n_gpus"),
        ({"model": "glm-4.6", "precision": "fp8"}, "no memory for KV"),
    ],
)
def test_hardware_that_does_not_exist_is_refused(changes: dict[str, object], named: str) -> None:
    """Unknown names list the known ones; a model that does not fit says so."""
    with pytest.raises(ConfigError, match=named):
        HardwareSpec(**({"gpu": "h100", "model": "qwen3-8b"} | changes))  # type: ignore[arg-type]


def test_an_engine_follows_from_its_hardware() -> None:
    """Blocks, their size, states and costs come from the hardware unless they are given."""
    hardware = HardwareSpec(gpu="gh200", model="qwen3.6-27b", precision="fp8")
    spec = VllmEngineSpec(hardware=hardware)
    assert (spec.block_tokens, spec.state_groups, spec.n_blocks) == (784, 3, hardware.kv_tokens // 784)
    assert spec.cost == hardware.step
    assert VllmEngine(spec).cache.block_size == 784
    own = VllmEngineSpec(hardware=hardware, num_gpu_blocks=500, n_state_groups=0, block_size=16, step=StepCost())
    assert (own.block_tokens, own.state_groups, own.n_blocks, own.cost) == (16, 0, 500, StepCost())


def test_more_gpus_share_work_and_talk() -> None:
    """Eight GPUs hold GLM-4.6 with 0.5 to 0.6 million tokens; each of two reads half, and both exchange something."""
    glm = HardwareSpec(gpu="h100", model="glm-4.6", precision="fp8", n_gpus=8)
    assert 500_000 < glm.kv_tokens < 600_000
    one, two = (HardwareSpec(gpu="h100", model="qwen3-8b", n_gpus=n).step for n in (1, 2))
    assert two.weights_s == pytest.approx(one.weights_s / 2)
    assert two.kv_s_per_token == pytest.approx(one.kv_s_per_token / 2)
    assert two.fixed_s > one.fixed_s
    assert two.token_s > one.token_s == 0


def test_every_shipped_row_names_its_source_and_makes_an_engine() -> None:
    """No number without an origin; each row of constants works with a model that fits."""
    for row in (*tables().gpus.values(), *tables().models.values(), *tables().constants, *tables().kernel_constants):
        assert row.source.strip()
    for row in tables().constants:
        assert HardwareSpec(gpu=row.gpu, model="llama-3.2-3b", precision=row.precision).step.step_s(batch((9, 1))) > 0
    assert set(FITTED) <= set(tables().constants[0].__struct_fields__)
