"""Numba where it is installed (the extra `sim`), plain Python where it is not: one source for both."""

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

try:
    from numba import njit as _njit
    from numba.extending import register_jitable as _jitable

    HAS_NUMBA = True
except ImportError:  # the extra is absent: the same functions run as they are
    HAS_NUMBA = False


def compilable(function: _F) -> _F:
    """A part of compiled code. From Python it can still be called as plain Python."""
    return _jitable(function) if HAS_NUMBA else function


def compiled(function: _F) -> _F:
    """The function as machine code, made on its first call and kept on disk; unchanged where numba is absent."""
    if not HAS_NUMBA:
        return function
    try:
        made: _F = _njit(function, cache=True)
    except RuntimeError:  # neither the package's place nor the home can be written to: compiled anew by each process
        made = _njit(function)
    return made
