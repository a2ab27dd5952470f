"""Distinct types for the names of things, so that a program id is never passed where a backend id belongs."""

from typing import NewType

ProgramId = NewType("ProgramId", str)
"""One agent's whole task; 1 to 256 printable characters, chosen by the client or by the host."""

TurnId = NewType("TurnId", int)
"""One model call of a program; numbered by the host, never reused within a journal."""

DecisionId = NewType("DecisionId", int)
"""One journalled choice; numbered by the router, and the counter of its randomness."""

BackendId = NewType("BackendId", str)
"""One serving instance of a model: the `name` under `backends:` in the pool file."""

ModelId = NewType("ModelId", str)
"""A model of the pool: a key under `models:` in the pool file."""

PROGRAM_ID_MAX_CHARS = 256
