"""Figures in files, without a screen."""

import contextlib
from collections.abc import Iterator
from typing import Any

from loadwise.kernel.errors import ConfigError


@contextlib.contextmanager
def drawing(
    path: str, n_columns: int, *, size_inches: tuple[float, float], dpi: float = 100.0
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; what the block draws is written when it ends.

    Raises:
        ConfigError: matplotlib is not installed, or it cannot write such a file.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib, which is not installed: pip install 'loadwise[lab]'") from error
    figure, axes = pyplot.subplots(1, n_columns, figsize=size_inches)
    try:
        yield figure, axes
        _save(figure, path, dpi)
    finally:
        pyplot.close(figure)


def _save(figure: Any, path: str, dpi: float) -> None:
    try:
        figure.savefig(path, bbox_inches="tight", dpi=dpi)
    except ValueError as error:
        raise ConfigError(f"plot {path!r}: {error}") from error
