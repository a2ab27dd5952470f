"""`loadwise demo`: from options to a result, with nothing printed here."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path

from loadwise.demo import weights
from loadwise.demo.live import SCALE, emulated_engine, emulated_pool, gateways, real_pool
from loadwise.demo.run import DemoOptions, DemoResult, Report, run_demo
from loadwise.demo.table import UsdPerMillion, packaged_table
from loadwise.kernel.errors import ConfigError
from loadwise.runner.embed import Embedder

N_EMULATED = 200
N_REAL = 8
REAL_OUTPUT_MAX_TOKENS = 80
REAL_LEVELS = 1
"""Few programs and short replies: a 135 M model on two cores makes some forty tokens a second."""
REAL_SLOTS = 4


def demo(
    *,
    is_real: bool = False,
    gguf: Mapping[str, Path] | None = None,
    seed: int = 0,
    n_programs: int | None = None,
    journal_root: Path | None = None,
    embedder: Embedder | None = None,
    report: Report = lambda state: None,
) -> tuple[DemoResult, Path]:
    """Run the demo; returns its result and the folder with one journal for each row.

    Args:
        gguf: further weights files by model name; they imply real models.

    Raises:
        ConfigError: a weights file is missing, or an option is out of range.
        DemoFailed: no program of a row got an answer.
    """
    root = Path(tempfile.mkdtemp(prefix="loadwise-demo-")) if journal_root is None else journal_root
    if root.is_dir() and any(root.iterdir()):
        raise ConfigError(f"{str(root)!r} is not empty; the demo's journals need a new folder")
    if not is_real and not gguf:
        table = packaged_table()
        options = DemoOptions(n_programs=n_programs or N_EMULATED, concurrency=16, seed=seed, wait_scale=SCALE)
        prices = {name: model.usd_per_million for name, model in table.models.items()}
        slots = {name: emulated_engine(name).slots for name in prices}
        start_gateway = gateways(prices, root, engine="emulator", slots_by_model=slots, embedder=lambda: embedder)
        return run_demo(options, emulated_pool(table), start_gateway, report, table), root
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("real models need xllamacpp, which is not installed: pip install 'loadwise[real]'")
    files = {weights.MODEL: weights.smollm2(), **(gguf or {})}
    for name, path in files.items():
        if not path.is_file():
            raise ConfigError(f"model {name!r}: there is no weights file {str(path)!r}")
    prices = {name: _price(path) for name, path in files.items()}
    options = DemoOptions(
        n_programs=n_programs or N_REAL,
        concurrency=REAL_SLOTS,
        seed=seed,
        prices=prices,
        output_max_tokens=REAL_OUTPUT_MAX_TOKENS,
        levels=REAL_LEVELS,
        request_timeout_s=120.0,
    )
    slots = dict.fromkeys(files, REAL_SLOTS)
    start_gateway = gateways(prices, root, engine="llamacpp", slots_by_model=slots, embedder=lambda: embedder)
    return run_demo(options, real_pool(files, slots=REAL_SLOTS), start_gateway, report), root


def _price(path: Path) -> UsdPerMillion:
    """A nominal price by the size of the file: what a host would ask for more work."""
    usd = weights.USD_PER_MILLION * max(1.0, path.stat().st_size / weights.FILE_BYTES)
    return UsdPerMillion(input=usd, output=usd)
