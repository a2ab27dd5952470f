"""Numba where it is installed (the extra `sim`), plain Python where it is not: one source for both."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

try:
    from numba import njit as _njit
    from numba.extending import register_jitable as _jitable

    HAS_NUMBA = True
except ImportError:  # the extra is absent: the same functions run as they are
    HAS_NUMBA = False

MODULES = ("fast_*.py", "hybrid_*.py")
"""Where functions and constants stand that end up in machine code (tested)."""


def compilable(function: _F) -> _F:
    """A part of compiled code. From Python it can still be called as plain Python."""
    return _jitable(function) if HAS_NUMBA else function


def compiled(function: _F) -> _F:
    """The function as machine code, made on its first call and kept on disk; unchanged where numba is absent."""
    if not HAS_NUMBA:
        return function
    made: Any = _njit(function)
    try:
        from numba.core.caching import FunctionCache, IndexDataCacheFile

        kept = FunctionCache(function)  # type: ignore[no-untyped-call]
        # Numba itself looks at the function's own file only, and would go on with what it once made of the others.
        kept._cache_file = IndexDataCacheFile(  # type: ignore[no-untyped-call]
            cache_path=kept._cache_path,
            filename_base=kept._impl.filename_base,
            source_stamp=sources_stamp(Path(__file__).parent),
        )
        made._cache = kept
    except (ImportError, AttributeError, RuntimeError, OSError):
        pass  # no place that can be written to, or another numba: compiled anew by each process
    result: _F = made
    return result


@cache
def sources_stamp(folder: Path) -> str:
    """Sixteen hexadecimal digits that change with any module that is compiled in."""
    digest = hashlib.blake2b(digest_size=8)
    for pattern in MODULES:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
