"""Loadwise decides which model runs each agent, when it may start, and how hard it should think."""

__version__ = "0.1.0"
