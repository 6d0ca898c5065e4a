"""What is stored of a chunk, and what it becomes at another place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore.blend.chunks import Texts, join, token_array
from kvstore.errors import ConfigError
from tests.unit.blend_world import DOCUMENTS, PREFIX, backend, blender, form_of, model, prefill, store, tokens

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


def _rope(rope: dict[str, Any] | None) -> dict[str, Any]:
    return {} if rope is None else {"rope_parameters": rope}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_a_chunk_behind_the_prefix_is_what_a_prefill_of_both_computes(kind: str) -> None:
    some = model(kind)
    with store(backend()) as opened:
        form = form_of(blender(some, opened))
        layers = form.compute(token_array(DOCUMENTS[0]))
        _, whole = prefill(some, torch.cat([PREFIX, DOCUMENTS[0]]))
        for (k, v), layer in zip(layers, whole.layers, strict=True):
            torch.testing.assert_close(k, layer.keys[:, :, len(PREFIX) :], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(v, layer.values[:, :, len(PREFIX) :], atol=1e-5, rtol=1e-5)
        again = form.compute(token_array(DOCUMENTS[0]))  # what was computed once of the prefix is not changed by use
        for one, other in zip(layers, again, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_a_chunk_alone_is_computed_from_position_0() -> None:
    some = model()
    with store(backend()) as opened:
        form = form_of(blender(some, opened, {"blend_form": "alone"}))
        layers = form.compute(token_array(DOCUMENTS[0]))
        _, whole = prefill(some, DOCUMENTS[0])
        for (k, _), layer in zip(layers, whole.layers, strict=True):
            torch.testing.assert_close(k, layer.keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rope", [None, YARN, LLAMA3, LINEAR], ids=["default", "yarn", "llama3", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_moved_is_k_computed_at_the_new_position(rope: dict[str, Any] | None, dtype: torch.dtype) -> None:
    """In layer 0 K depends on token and position alone, so moving must give just what the model computes there."""
    some = model(dtype=dtype, **_rope(rope))
    with store(backend()) as opened:
        form = form_of(blender(some, opened))
        document = token_array(DOCUMENTS[1])
        for begin in (len(PREFIX), 0, 333, 900):
            placed = form.place(document, begin, first=3, length=30)
            k = form.compute(document)[0][0][0].transpose(0, 1)[3:33]
            moved = form.moving(placed)(k)
            there = torch.cat([tokens(7, begin), DOCUMENTS[1][3:33]])
            _, whole = prefill(some, there)
            expected = whole.layers[0].keys[0].transpose(0, 1)[begin:]
            scale = expected.float().norm(dim=-1).max()
            error = (moved.float() - expected.float()).abs().max() / scale
            # bf16: rounded by the model at either place, and once by the move, each by 2^-9 of the pair at most.
            assert error <= (2e-5 if dtype == torch.float32 else 3 * 2**-9), (begin, float(error))
        at_home = form.place(document, len(PREFIX))
        k = form.compute(document)[0][0][0].transpose(0, 1)
        assert torch.equal(form.moving(at_home)(k), k), "what is not moved comes back bit by bit"


def test_stored_embedded_is_rounded_less_than_stored_plain() -> None:
    """The reason for the stored form: in bf16 one rounding less."""
    some = model(dtype=torch.bfloat16)
    with store(backend()) as opened:
        form = form_of(blender(some, opened))
        generator = torch.Generator().manual_seed(3)
        exact = torch.randn(64, 2, form.layout.head_dim, generator=generator)
        old, new = range(20, 84), range(700, 764)
        embedded = form.rotary.apply(exact, old).bfloat16()
        wanted = form.rotary.move(embedded.float(), old, new)
        kept = form.rotary.move(embedded, old, new)
        plain = form.rotary.apply(form.rotary.undo(embedded, old), new)
        error, other = (float((each.float() - wanted).square().mean().sqrt()) for each in (kept, plain))
        assert error < 0.8 * other
        assert error < 2**-9 * float(wanted.square().mean().sqrt())


def test_what_a_chunk_depends_on_is_in_its_key() -> None:
    some, other = model(), model(seed=1)
    document = token_array(DOCUMENTS[0])
    with store(backend()) as opened, store(backend(), namespace="b") as elsewhere:
        base = form_of(blender(some, opened))
        keys = {
            "base": base.key(document),
            "changed document": base.key(token_array([*DOCUMENTS[0][:-1].tolist(), 5])),
            "longer": base.key(token_array([*DOCUMENTS[0].tolist(), 5])),
            "other weights": form_of(blender(other, opened)).key(document),
            "other name": form_of(blender(some, opened, model_name="x")).key(document),
            "other revision": form_of(blender(some, opened, revision="2")).key(document),
            "other salt": form_of(blender(some, opened, cache_salt="s")).key(document),
            "other namespace": form_of(blender(some, elsewhere)).key(document),
            "other separator": form_of(blender(some, opened, {"blend_special_str": "---"})).key(document),
            "other prefix": form_of(blender(some, opened, prefix=tokens(5, 20))).key(document),
            "no prefix": form_of(blender(some, opened, prefix=())).key(document),
            "other rotary": form_of(blender(model(rope_parameters=YARN), opened)).key(document),
            "other dtype": form_of(blender(model(dtype=torch.bfloat16), opened)).key(document),
        }
        named = {"model_name": "m", "revision": "1"}  # which tell nothing of the embedding
        keys["named"] = form_of(blender(some, opened, **named)).key(document)
        keys["named, other rotary"] = form_of(blender(model(rope_parameters=YARN), opened, **named)).key(document)
        assert base.key(document, is_prefix=True) == keys["no prefix"], "both stand at position 0 with nothing before"
        alone = form_of(blender(some, opened, {"blend_form": "alone"})).key(document)
        assert alone == form_of(blender(some, opened, {"blend_form": "alone"}, prefix=())).key(document)
        assert base.key(document) == form_of(blender(some, opened)).key(document)
    assert len(set(keys.values())) == len(keys), "two of these have one key"


def test_where_a_chunk_is_exact() -> None:
    with store(backend()) as opened:
        form = form_of(blender(model(), opened))
        document = token_array(DOCUMENTS[0])
        prompt = join([DOCUMENTS[0], DOCUMENTS[0], [5]], Texts(None, ""), token_array(PREFIX))
        assert form.exact(form.place_prefix(), prompt)
        assert form.exact(form.place(document, len(PREFIX)), prompt)
        assert not form.exact(form.place(document, len(PREFIX) + len(document)), prompt)
        assert not form.exact(form.place(document, len(PREFIX), first=1), prompt)
        alone = form_of(blender(model(), opened, {"blend_form": "alone"}))
        assert not alone.exact(alone.place(document, len(PREFIX)), prompt)
        bare = join([DOCUMENTS[0], [5]], Texts(None, ""), token_array([]))
        assert alone.exact(alone.place(document, 0), bare)


def test_embeddings_that_cannot_be_moved_are_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    with store(backend()) as opened, pytest.raises(ConfigError, match="dynamic"):
        blender(model(rope_parameters=rope), opened)
