"""Profiles of kvt from models: tiny ones of several families, and SmolLM2 with its bars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.codec import codec_by_name
from kvstore.codec.kvt_profiling import build_profile
from kvstore.codec.kvt_statistics import Runner
from kvstore.codec.profile import Profile
from kvstore.errors import ConfigError
from kvstore.testing.models import smollm2_folder, tiny_model

pytest.importorskip("torch")
pytest.importorskip("transformers")


def lists(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random tokens that repeat, so that there is something to attend to."""
    rng = np.random.default_rng(seed)
    some = rng.integers(3, 1000, (count, length // 3))
    return [[*map(int, row), *map(int, row), *map(int, row)] for row in some]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("metric", ["fisher", "attention"])
def test_a_profile_of_each_family(kind: str, metric: str, tmp_path: Any) -> None:
    told: list[str] = []
    model = tiny_model(kind)
    frozen = [p.requires_grad for p in model.parameters()]
    options: dict[str, Any] = {"metric": metric, "judges": 1, "levels": 2, "kl": 0.002, "name": f"tiny/{kind}"}
    made = build_profile(model, None, lists(3, 72), **options, progress=told.append)
    assert build_profile(model, None, lists(3, 72), **options).id == made.id, "not deterministic"
    assert [p.requires_grad for p in model.parameters()] == frozen
    assert (made.codec, made.model, made.layout.num_layers, made.parameters["metric"]) == (
        "kvt", f"tiny/{kind}", 2, metric,
    )  # fmt: skip
    assert any("step" in line for line in told)
    coarse, fine = made.parameters["quality"]
    assert coarse["bits"] < fine["bits"] < 16
    assert 0 < fine["kl"] < coarse["kl"]
    assert fine["kl"] < 0.004
    made.save(tmp_path / "p.kvt")
    assert Profile.load(tmp_path / "p.kvt") == made
    assert codec_by_name("kvt", made).levels == 2


def test_gradients_are_those_of_k_before_the_rotary_embedding() -> None:
    """A small change of K before the embedding changes what the model says by gradient · change."""
    import torch

    runner = Runner(tiny_model("llama"))
    ids = lists(1, 60)[0]
    prefilled = runner.prefill(ids[:40])
    (found,) = runner.gradients(ids[40:], prefilled, 1, seed=3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        said = runner.logits(ids[40:], prefilled)
        drawn = torch.multinomial(said.exp(), 1, generator=generator)
        rng = np.random.default_rng(0)
        for number, name in enumerate(("keys", "values")):
            change = rng.standard_normal(getattr(prefilled, name).shape).astype(np.float32) * np.float32(1e-3)
            both = {"keys": prefilled.keys, "values": prefilled.values, name: getattr(prefilled, name) + change}
            moved = runner.logits(ids[40:], prefilled, runner.as_cache(both["keys"], both["values"], prefilled))
            actual = float((moved - said).gather(1, drawn).double().sum())
            own = found[number * 2 : number * 2 + 2]
            predicted = sum(
                float((runner.host(g) * c).astype(np.float64).sum()) for g, c in zip(own, change, strict=True)
            )
            assert actual == pytest.approx(predicted, rel=0.05, abs=2e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "euclid"}, "fisher, attention"),
        ({"judges": 5}, "judges"),
        ({"levels": 0}, "levels"),
        ({"continuation": 90}, "too short"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_profile(object(), None, lists(5, 96), **options)


def test_lists_must_be_of_one_length() -> None:
    with pytest.raises(ConfigError, match="one length"):
        build_profile(object(), None, [*lists(3, 96), [1, 2, 3]])


@pytest.mark.model
def test_smollm2_reaches_its_bars_on_texts_kept_back() -> None:
    """A small profile, judged on one context: 3.5 times smaller than int8 with scales."""
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    quiet: Any = disable_progress_bar  # its thread would stay
    quiet()
    folder = smollm2_folder()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics))).input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    spread = [ids[at : at + 360] for at in range(0, len(ids) - 360, len(ids) // 4)][:4]
    made = build_profile(model, tokenizer, spread, judges=1, draws=1, ridge=3.0, kl=0.025)
    coarse, middle, fine = made.parameters["quality"]
    assert coarse["bits"] < middle["bits"] < fine["bits"]
    assert fine["bits"] <= 8.08 / 3.5
    assert fine["kl"] <= 0.04
    assert fine["top1"] >= 0.85  # ΔNLL of 40 tokens says nothing; kvstore-bench codec has the real figures
