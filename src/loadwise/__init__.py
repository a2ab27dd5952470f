"""Loadwise decides which model runs each agent, when it may start, and how hard it should think.

Importing it is cheap: names are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import commands as commands
    from . import events as events
    from .client import program as program
    from .kernel.stack import Stack as Stack
    from .settings import Config as Config
    from .settings import load_config as load_config
    from .settings import open_stack as open_stack

_HOME_BY_NAME = {
    "Config": "loadwise.settings",
    "Stack": "loadwise.kernel.stack",
    "load_config": "loadwise.settings",
    "open_stack": "loadwise.settings",
    "program": "loadwise.client",
}
_MODULES = ("commands", "events")

__all__ = ["Config", "Stack", "__version__", "commands", "events", "load_config", "open_stack", "program"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"loadwise.{name}")
    if name in _HOME_BY_NAME:
        return getattr(import_module(_HOME_BY_NAME[name]), name)
    raise AttributeError(f"module 'loadwise' has no attribute {name!r}")
