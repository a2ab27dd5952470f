"""A model folder without weights, for engines that fill them with random numbers: eight layers, four thousand words.

It is as large as it is so that a step takes a CPU longer than a server's front end takes for its tokens.
Written by hand, so that nothing has to be downloaded and no library is needed. Words are `w0`, `w1`, ...; prompts are
sent as token ids, so the tokenizer serves only to satisfy servers that insist on one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 4096
FIRST_WORD = 8
"""Ids below are special tokens."""
CONTEXT_TOKENS = 4096

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", *(f"<r{i}>" for i in range(4, FIRST_WORD))]


def write_model(folder: Path) -> Path:
    """Write the folder's files."""
    words = [*_SPECIAL, *(f"w{i}" for i in range(FIRST_WORD, VOCABULARY))]
    special = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, word in enumerate(_SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"bos_token_id": 1, "eos_token_id": 2}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder
