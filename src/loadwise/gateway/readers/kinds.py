"""Which reader reads which kind of engine."""

from loadwise.kernel.pool import BackendSpec, EngineKind

from .llamacpp import LlamacppReader
from .others import TgiReader, TrtllmReader
from .reader import Reader, TableReader
from .sglang import SglangReader
from .vllm import VllmReader

READER_BY_ENGINE: dict[EngineKind, type[TableReader]] = {
    "vllm": VllmReader,
    "emulator": VllmReader,
    "sglang": SglangReader,
    "llamacpp": LlamacppReader,
    "tgi": TgiReader,
    "trtllm": TrtllmReader,
}
"""Paid APIs have none: see `api.ApiMeter`."""


def make_reader(spec: BackendSpec) -> Reader | None:
    """A fresh reader for a backend; None where it shows nothing to be read."""
    kind = READER_BY_ENGINE.get(spec.engine)
    return None if kind is None else kind(spec.served_model or spec.model)
