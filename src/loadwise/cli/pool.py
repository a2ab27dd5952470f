"""Reading a pool file with what the command line lays above it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadwise.kernel.errors import ConfigError

if TYPE_CHECKING:
    from loadwise.settings import Config


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """The pool file, and `--set`."""
    parser.add_argument("pool", metavar="POOL.yaml", help="pool file")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the pool file, as in --set router.hold_max_s=30 or --set backends.NAME.slots=4",
    )


def read_pool(path: str | Path, settings: Sequence[str] = ()) -> "Config":
    """A pool file with settings of the command line above it.

    Args:
        settings: `KEY=VALUE`, the key with dots, the value in YAML; later ones win.

    Raises:
        ConfigError: the file cannot be read, a setting has no `=`, or the result is not valid.
    """
    from loadwise.settings import parse_config, parse_yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pool file {str(path)!r} cannot be read: {error}") from error
    mapping = parse_yaml(text, where=str(path))
    for setting in settings:
        apply_setting(mapping, setting)
    return parse_config(mapping, where=str(path))


def apply_setting(mapping: dict[str, Any], setting: str) -> None:
    """Write one `KEY=VALUE` into a mapping of the pool file's shape.

    >>> pool = {"backends": [{"name": "a.b"}]}
    >>> apply_setting(pool, "router.hold_max_s=30")
    >>> apply_setting(pool, "backends.a.b.slots=4")
    >>> pool
    {'backends': [{'name': 'a.b', 'slots': 4}], 'router': {'hold_max_s': 30}}
    """
    from loadwise.settings import parse_yaml_value

    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {setting!r} must be KEY=VALUE, as in router.hold_max_s=30")
    value = parse_yaml_value(text, where=f"the value of --set {setting!r}")
    at: Any = mapping
    while True:
        name, parts = _longest_name(at, parts)
        if isinstance(at, list):
            if not parts:
                raise ConfigError(f"--set {setting!r}: {name!r} is an entry of a list; say which key of it")
            at = _entry(at, name, setting)
        elif not parts:
            at[name] = value
            return
        else:
            if at.get(name) is None:
                at[name] = {}
            at = at[name]
        if not isinstance(at, dict | list):
            raise ConfigError(f"--set {setting!r}: {name!r} is {at!r}; it has no key {parts[0]!r}")


def _longest_name(at: dict[str, Any] | list[Any], parts: list[str]) -> tuple[str, list[str]]:
    """The next key and the parts after it: names may hold dots, so the longest that is there wins."""
    names = at if isinstance(at, dict) else [entry.get("name") for entry in at if isinstance(entry, dict)]
    for n in range(len(parts), 1, -1):
        if ".".join(parts[:n]) in names:
            return ".".join(parts[:n]), parts[n:]
    return parts[0], parts[1:]


def _entry(entries: list[Any], name: str, setting: str) -> Any:
    named = [entry for entry in entries if isinstance(entry, dict) and entry.get("name") == name]
    if named:
        return named[0]
    if name.isdecimal() and int(name) < len(entries):
        return entries[int(name)]
    known = ", ".join(str(entry.get("name")) for entry in entries if isinstance(entry, dict))
    raise ConfigError(f"--set {setting!r}: no entry is named {name!r}; there are: {known}")
