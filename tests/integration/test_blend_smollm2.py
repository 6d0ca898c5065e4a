"""Selective recompute on a real model."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest

from kvstore.testing.models import default_model_folder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.blend.diagnostics import diagnose, kl_divergence  # noqa: E402
from kvstore.blend.model import BlendModel  # noqa: E402
from kvstore.blend.recompute import Recompute  # noqa: E402
from kvstore.blend.terms import BlendSettings  # noqa: E402
from tests.unit.blend_model_support import encode, full_prefill, run_all, spans_of  # noqa: E402


@pytest.fixture(scope="module")
def smollm2() -> Any:
    folder = default_model_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.skip("make model was not run")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    quiet: Any = disable_progress_bar  # its thread would stay
    quiet()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return BlendModel(hf), AutoTokenizer.from_pretrained(folder)


@pytest.mark.model
def test_smollm2_is_repaired(smollm2: Any) -> None:
    model, tokenizer = smollm2
    texts = [topics[name][:250] for name in ("assignment", "if", "lambda")] + ["\nWhat does a lambda expression do?"]
    parts = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    ids, spans = torch.cat(parts), spans_of(parts)
    stored = encode(model, ids, spans)
    expected, _ = full_prefill(model.model, ids)
    expected = expected[-len(parts[-1]) :]
    whole = Recompute(model, ids, spans, BlendSettings(ratios=(1.0,)))
    logits = run_all(whole, stored)[1]
    assert float((logits - expected).abs().max()) < 1e-4
    assert kl_divergence(logits, expected) < 1e-8
    diagnosis = diagnose(model, ids, spans, stored, BlendSettings(), ratios=(0.15,))
    reuse, blended = diagnosis.runs
    assert blended.kl < reuse.kl  # by how much, over many prompts, is what kvstore-bench blend says
    assert sum(blended.attention_deviation) < sum(reuse.attention_deviation)
    assert reuse.kv_deviation[0] < 1e-3  # layer 0 depends on token and position alone
    # Who deviates in one layer deviates in the next: what choosing at one check layer rests on.
    assert min(diagnosis.neighbours) > 0.5
