"""Pure functions that may take long or crash, by name: the runner calls them in a worker process under a limit."""

from collections.abc import Callable, Mapping
from typing import Any

COMPUTATIONS: Mapping[str, Callable[..., Any]] = {}
"""Each takes keyword arguments of builtins and returns builtins."""
