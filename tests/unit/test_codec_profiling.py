"""Collecting K and V of a model, and reading texts: what profiles are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.codec.profiling import collect, layout_of, model_name, read_texts, token_lists
from kvstore.codec.profiling_cachegen import build_profile
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec
from kvstore.testing.models import tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = [int(n) for n in np.random.default_rng(0).integers(2, 500, 40)]


def cached(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the model has in its cache, `[layers, tokens, heads, width]`."""
    with torch.inference_mode():
        cache = model(torch.tensor([IDS]), use_cache=True).past_key_values
    both = [[getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers] for name in ("keys", "values")]
    return torch.stack(both[0]).float().numpy(), torch.stack(both[1]).float().numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k_is_before_the_rotary_embedding(kind: str, dtype: str) -> None:
    model = tiny_model(kind, dtype=getattr(torch, dtype))
    kv = collect(model, IDS, queries=True)
    keys, values = cached(model)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    rotary = RotarySpec.from_config(model.config)
    assert np.abs(kv.rotated(rotary) - keys).max() <= tolerance * np.abs(keys).max()
    assert np.abs(kv.keys - keys).max() > 0.1 * np.abs(keys).max(), "it is not what is cached"
    assert np.array_equal(kv.values, values)
    assert layout_of(kv) == KVLayout(2, 2, 16)
    assert kv.queries is not None
    assert kv.queries.shape == (2, 40, 4, 16)


def small_config(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def test_k_is_undone_where_it_is_normalised_or_projected_with_q() -> None:
    """Qwen3 has a normalisation behind k_proj, Phi-3 one projection for Q, K and V."""
    torch.manual_seed(0)
    for model in (
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small_config(head_dim=16))).eval(),
        transformers.Phi3ForCausalLM(transformers.Phi3Config(**small_config())).eval(),
    ):
        kv = collect(model, IDS)
        keys, values = cached(model)
        rotated = kv.rotated(RotarySpec.from_config(model.config))
        assert np.abs(rotated - keys).max() <= 1e-5 * np.abs(keys).max()
        assert np.array_equal(kv.values, values)
        with pytest.raises(ConfigError, match="q_proj"):
            collect(model, IDS, queries=True)


def test_what_cannot_be_collected() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        collect(tiny_model("llama"), [])
    torch.manual_seed(0)
    recurrent = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=4)
    ).eval()
    with pytest.raises(ConfigError, match="cache"):
        collect(recurrent, IDS)


def test_a_model_is_called_as_in_keys(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert model_name(model) == "LlamaForCausalLM"
    model.config.name_or_path = "org/name"
    assert model_name(model) == "org/name"
    (tmp_path / "folder").mkdir()
    model.name_or_path = model.config.name_or_path = str(tmp_path / "folder")
    assert model_name(model) == "folder"


@pytest.mark.parametrize("rope", ["applied", "none"])
def test_a_profile_of_a_model(rope: str) -> None:
    told: list[str] = []
    lists = [IDS, IDS[::-1]]
    model = tiny_model("qwen2")
    profile = build_profile(model, None, lists, name="m", revision="r", rope=rope, progress=told.append, levels=(0.5,))
    assert (profile.codec, profile.model, profile.revision) == ("cachegen", "m", "r")
    assert profile.layout == KVLayout(2, 2, 16)
    assert profile.parameters["rope"] == rope
    assert profile.parameters["tokens"] == 80
    assert (profile.rotary is None) == (rope == "none")
    assert told == ["context 1 of 2", "context 2 of 2"]
    assert build_profile(model, None, lists, name="m", revision="r", rope=rope, levels=(0.5,)) == profile
    with pytest.raises(ConfigError, match="rope='x'"):
        build_profile(model, None, lists, rope="x")


# Texts.


class Words:
    """A tokenizer: a word is a token, its length; a 1 in front of each prompt."""

    class Ids:
        def __init__(self, ids: list[int]) -> None:
            self.input_ids = ids

    def __init__(self, front: bool = True) -> None:
        self.front = front

    def __call__(self, text: str, add_special_tokens: bool = True) -> Ids:
        ids = [len(word) + 1 for word in text.split()]
        return self.Ids([1, *ids] if add_special_tokens and self.front else ids)


def test_texts_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "a.md").write_text("a")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.jsonl").write_text('{"text": "one", "other": "uno"}\n\n"two"\n')
    assert list(read_texts([tmp_path])) == ["b", "one", "two", "caf\ufffd", "a"]
    assert list(read_texts([tmp_path / "sub", tmp_path / "b.txt"])) == ["a", "b"]
    assert list(read_texts([tmp_path / "picture.png"])) == ["\ufffdPNG"]
    with pytest.raises(ConfigError, match=r"c\.jsonl, line 3, has no text in 'other'|line 1"):
        list(read_texts([tmp_path / "c.jsonl"], field="none"))
    assert next(read_texts([tmp_path / "c.jsonl"], field="other")) == "uno"


def test_texts_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    for path, message in (("missing.txt", "missing.txt: No such file"), (".", "holds no texts")):
        with pytest.raises(ConfigError, match=message):
            list(read_texts([tmp_path / path]))
    for number, line in enumerate(("{", json.dumps(5), json.dumps({"text": 5}), json.dumps({"txt": "x"}))):
        file = tmp_path / f"{number}.jsonl"
        file.write_text('"good"\n' + line)
        with pytest.raises(ConfigError, match=f"{number}.jsonl, line 2"):
            list(read_texts([file]))


def test_token_lists() -> None:
    texts = ["a bb ccc", "dddd", "eeeee a a a a"]
    assert token_lists(Words(), texts, tokens=4) == [[1, 2, 3, 4], [1, 5, 6, 2], [1, 2, 2, 2]]
    assert token_lists(Words(front=False), texts, tokens=4) == [[2, 3, 4, 5], [6, 2, 2, 2]]
    assert token_lists(Words(), texts, tokens=4, limit=1) == [[1, 2, 3, 4]]
    with pytest.raises(ConfigError, match="9 tokens, fewer than one context of 100"):
        token_lists(Words(), texts, tokens=100)
    with pytest.raises(ConfigError, match="too short"):
        token_lists(Words(), texts, tokens=1)
