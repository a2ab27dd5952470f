"""A weights file for llama.cpp with two small layers of random numbers, so that a judge's run takes seconds.

The format (GGUF 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a header, typed keys, the tensors' names
and shapes, and after a gap to the next multiple of 32 bytes their numbers. The vocabulary has 256 byte tokens and words
for the rest; prompts are sent as token ids.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from bench.judges.tiny_model import FIRST_WORD, VOCABULARY

_ALIGNMENT = 32
_BYTES = 256
_WIDTH, _FORWARD, _LAYERS, _HEADS = 64, 128, 2, 2
_U32, _I32, _F32, _TEXT, _ARRAY = 4, 5, 6, 8, 9
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(name: str, kind: int, value: Any, of: int = 0) -> bytes:
    head = _text(name) + struct.pack("<I", kind)
    if kind == _ARRAY:
        return head + struct.pack("<IQ", of, len(value)) + b"".join(_value(of, one) for one in value)
    return head + _value(kind, value)


def _value(kind: int, value: Any) -> bytes:
    return _text(value) if kind == _TEXT else struct.pack({_U32: "<I", _I32: "<i", _F32: "<f"}[kind], value)


def _keys() -> list[bytes]:
    special = ["<unk>", "<s>", "</s>", *(f"<r{i}>" for i in range(3, FIRST_WORD))]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(_BYTES))]
    kinds = [_UNKNOWN, *[_CONTROL] * (FIRST_WORD - 1), *[_BYTE] * _BYTES]
    n_words = VOCABULARY - len(tokens)
    return [
        _key("general.architecture", _TEXT, "llama"),
        _key("general.name", _TEXT, "tiny"),
        _key("llama.block_count", _U32, _LAYERS),
        _key("llama.context_length", _U32, 8192),
        _key("llama.embedding_length", _U32, _WIDTH),
        _key("llama.feed_forward_length", _U32, _FORWARD),
        _key("llama.attention.head_count", _U32, _HEADS),
        _key("llama.attention.head_count_kv", _U32, _HEADS),
        _key("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        _key("llama.rope.dimension_count", _U32, _WIDTH // _HEADS),
        _key("llama.vocab_size", _U32, VOCABULARY),
        _key("tokenizer.ggml.model", _TEXT, "llama"),
        _key("tokenizer.ggml.tokens", _ARRAY, [*tokens, *(f"w{i}" for i in range(n_words))], _TEXT),
        _key("tokenizer.ggml.scores", _ARRAY, [0.0] * VOCABULARY, _F32),
        _key("tokenizer.ggml.token_type", _ARRAY, [*kinds, *[_NORMAL] * n_words], _I32),
        _key("tokenizer.ggml.bos_token_id", _U32, 1),
        _key("tokenizer.ggml.eos_token_id", _U32, 2),
        _key("tokenizer.ggml.unknown_token_id", _U32, 0),
    ]


def _shapes() -> dict[str, tuple[int, ...]]:
    """Of each tensor, the fastest dimension first."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_WIDTH, VOCABULARY),
        "output_norm.weight": (_WIDTH,),
        "output.weight": (_WIDTH, VOCABULARY),
    }
    for i in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{i}.{name}.weight"] = (_WIDTH, _WIDTH)
        for name, shape in (("gate", (_WIDTH, _FORWARD)), ("up", (_WIDTH, _FORWARD)), ("down", (_FORWARD, _WIDTH))):
            shapes[f"blk.{i}.ffn_{name}.weight"] = shape
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{i}.{name}.weight"] = (_WIDTH,)
    return shapes


def write_gguf(path: Path, seed: int = 0) -> Path:
    """Write the file."""
    rng = np.random.default_rng(seed)
    keys, infos, numbers, offset = _keys(), [], [], 0
    for name, shape in _shapes().items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.1, shape[::-1])
        if name == "output.weight":
            values[: FIRST_WORD + _BYTES] = 0.0  # half a character would be held back until its other half comes
        data = values.astype("<f4").tobytes()
        data += bytes(-len(data) % _ALIGNMENT)
        infos.append(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, offset))
        numbers.append(data)
        offset += len(data)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + b"".join(numbers))
    return path
