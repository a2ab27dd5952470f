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
    return _njit(function, cache=True) if HAS_NUMBA else function
