"""Which models are blended, and that their own modules do it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.testing.models import tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.blend.model import BlendModel  # noqa: E402
from kvstore.blend.recompute import Recompute  # noqa: E402
from kvstore.blend.terms import BlendSettings  # noqa: E402
from tests.unit.blend_model_support import KINDS, encode, full_prefill, model_of, prompt, run_all, spans_of  # noqa: E402

_FIELDS: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def other(name: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_FIELDS, **fields})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def everything_again(hf: Any) -> float:
    """The largest difference of logits between a run at r = 1 and the model."""
    model = BlendModel(hf)
    ids = torch.cat(prompt())
    spans = spans_of(prompt())
    run = Recompute(model, ids, spans, BlendSettings(ratios=(1.0,)))
    _, logits = run_all(run, encode(model, ids, spans))
    return float((logits - full_prefill(hf, ids)[0][-len(logits) :]).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_a_model(kind: str) -> None:
    model = BlendModel(tiny_model(kind))
    assert (model.num_layers, model.layout.num_kv_heads, model.layout.head_dim) == (2, 2, 16)
    assert (model.dtype, model.device.type, model.vocabulary) == (torch.float32, "cpu", 1024)
    assert model.rotary.head_dim == 16
    assert kind in model.name


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen3", {"head_dim": 16}),  # norms of Q and K
        ("StableLm", {}),  # a rotary embedding of a quarter of each head
        ("Glm", {"head_dim": 16}),  # of a half, interleaved
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 24}),
    ],
)
def test_models_that_compute_alike(name: str, fields: dict[str, Any]) -> None:
    hf = other(name, **fields)
    assert everything_again(hf) < 1e-4
    # K of layer 0 depends on token and position alone: stored elsewhere and moved, it is what a prefill has.
    model, ids, spans = BlendModel(hf), torch.cat(prompt()), spans_of(prompt())
    run = Recompute(model, ids, spans, BlendSettings(ratios=(0.0,)))
    run_all(run, encode(model, ids, spans))
    _, kv = full_prefill(hf, ids)
    assert float((run.kv[0][0] - kv[0][0]).abs().max()) < 1e-4 * max(1.0, float(kv[0][0].abs().max()))


class Adapted(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A linear with an adapter of low rank, as PEFT wraps them."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def test_replaced_linears_are_used() -> None:
    hf = model_of("llama")
    plain = full_prefill(hf, torch.cat(prompt()))[0]
    torch.manual_seed(3)
    for layer in hf.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    assert float((full_prefill(hf, torch.cat(prompt()))[0] - plain).abs().max()) > 0.1
    assert everything_again(hf) < 1e-4


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Granite", {"residual_multiplier": 0.3}, "does more than Llama, Qwen2 and Mistral do"),
        ("Granite", {"logits_scaling": 8.0}, "does more than Llama, Qwen2 and Mistral do"),
        ("Olmo2", {}, "has no input_layernorm in layer 0"),
        ("Phi3", {}, "has no q_proj in the attention of layer 0"),
        ("Mistral", {"sliding_window": 64}, "sliding"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic rotary embeddings",
        ),
    ],
)
def test_models_that_do_not(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        BlendModel(other(name, **fields))
    assert name in str(caught.value)


def test_a_model_that_is_not_ready() -> None:
    with pytest.raises(ConfigError, match="training mode"):
        BlendModel(tiny_model("llama").train())
    with pytest.raises(ConfigError, match="float64"):
        BlendModel(_doubled())
    with pytest.raises(ConfigError, match="a causal language model of transformers is needed, not str"):
        BlendModel("gpt")


def _doubled() -> Any:
    made = tiny_model("llama")
    for parameter in made.parameters():
        parameter.data = parameter.data.double()
    return made


def test_attention_as_a_matrix_is_what_attention_does() -> None:
    """Rows of `scores`, applied to V, are what `attend` gives to the output projection."""
    model = BlendModel(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 3, 16, generator=generator)
    k, v = (torch.randn(1, 2, 9, 16, generator=generator) for _ in range(2))
    mask = model.mask(torch.tensor([2, 5, 8]), 9)
    shares = model.scores(1, q, k, mask)
    assert torch.allclose(shares.sum(-1), torch.ones(4, 3))
    assert not shares[:, 0, 3:].any()
    assert shares[:, 0, :3].all()
    mixed = (shares @ v[0].repeat_interleave(2, 0)).transpose(0, 1).reshape(1, 3, 64)
    with torch.no_grad():
        expected = model.model.model.layers[1].self_attn.o_proj(mixed)
        assert torch.allclose(model.attend(1, q, k, v, mask), expected, atol=1e-5)
