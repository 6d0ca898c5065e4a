"""The rotary code and what may come: any text, any parameters, any configuration, outputs that cannot be written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.rope import LAYOUTS, MAX_POSITION, SCALINGS, WANTED, YARN_DEFAULTS, RotarySpec

torch = pytest.importorskip("torch")

SPEC = RotarySpec(64)


def random_k(spec: RotarySpec, *shape: int) -> Any:
    return np.random.default_rng(0).normal(size=(*shape, spec.head_dim)).astype(np.float32)


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from([1, 2, 4.0, 64, 512, 1e4, 10**400, 1 << 30])
)
DESCRIPTIONS = st.fixed_dictionaries(
    {"head_dim": st.one_of(st.sampled_from([2, 64, 128]), NUMBERS)},
    optional={
        "scaling": st.one_of(st.sampled_from([*SCALINGS, "dynamic"]), st.lists(st.integers(), max_size=2)),
        "layout": st.one_of(st.sampled_from([*LAYOUTS, "x"]), NUMBERS),
        **dict.fromkeys(
            (
                "theta", "rotary_dim", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                "original_max_position_embeddings", "attention_factor", "truncate",
            ),
            NUMBERS,
        ),
    },
)  # fmt: skip


@given(st.one_of(DESCRIPTIONS.map(json.dumps), st.text(max_size=80), st.binary(max_size=20), NUMBERS))
@settings(max_examples=400, deadline=None)
def test_a_description_is_a_spec_that_works_or_is_refused(text: Any) -> None:
    try:
        spec = RotarySpec.from_text(text)
    except ConfigError:
        return
    assert RotarySpec.from_text(spec.text) == spec
    assert RotarySpec.from_text(spec.text).text == spec.text
    assert spec.head_dim <= 1 << 16
    with np.errstate(all="raise", under="ignore"):  # a tiny frequency may vanish
        k = spec.apply(np.ones((1, 1, spec.head_dim), np.float32), [1000])
        assert np.isfinite(spec.undo(k, [1000])).all()


@given(
    scaling=st.sampled_from(SCALINGS),
    layout=st.sampled_from(LAYOUTS),
    head_dim=st.sampled_from([2, 64, 80, 96, 128, 256]),
    theta=st.floats(1.5, 1e9),
    factor=st.floats(1, 1000),
    length=st.integers(1, 1 << 20),
    betas=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
    truncate=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_spec_comes_back_from_its_description(
    scaling: str, layout: str, head_dim: int, theta: float, factor: float, length: int, betas: Any, truncate: bool
) -> None:
    low, high = sorted(betas)
    fields: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": length}
    fields |= {"low_freq_factor": low, "high_freq_factor": high + 1}
    fields |= {"beta_slow": low, "beta_fast": high, "truncate": truncate}
    allowed = {*WANTED[scaling], *(YARN_DEFAULTS if scaling == "yarn" else ())}
    chosen = {name: value for name, value in fields.items() if name in allowed}
    spec = RotarySpec(head_dim, theta, layout=layout, scaling=scaling, **chosen)
    again = RotarySpec.from_text(spec.text)
    assert again == spec
    assert again.text == spec.text
    assert np.array_equal(again.frequencies, spec.frequencies)
    k = random_k(spec, 3, 1)
    back = spec.undo(spec.apply(k, [0, 77, 1_000_000]), [0, 77, 1_000_000])
    assert np.abs(back - k).max() < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": "x"}, {"head_dim": 64.0}, {"rope_parameters": "abc"}, {"rope_parameters": [1]},
        {"partial_rotary_factor": "x"}, {"head_dim": None, "hidden_size": "a"}, {"model_type": ["llama"]},
        {"no_rope_layers": 5}, {"text_config": 5}, {"rope_theta": "1e4"}, {"max_position_embeddings": "x",
         "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": "a", "mscale_all_dim": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -7.3}},
    ],
)  # fmt: skip
def test_configurations_that_make_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RotarySpec.from_config({"model_type": "llama", "head_dim": 64, "rope_theta": 1e4, **change})


def test_outputs_that_cannot_be_written_and_positions_that_cannot_be() -> None:
    spec = SPEC
    k = random_k(spec, 4, 1)
    kept, fixed = k.copy(), k.copy()
    fixed.flags.writeable = False
    assert np.array_equal(spec.apply(fixed, range(4)), spec.apply(k, range(4)))
    for new in (range(4), range(1, 5)):
        with pytest.raises(ConfigError, match="output is read-only"):
            spec.move(k, range(4), new, out=fixed)
    assert np.array_equal(fixed, kept)
    for positions in (range(1 << 60), range(-1, 3), range(MAX_POSITION, 0, -1)):
        with pytest.raises(ConfigError, match="between 0 and 2"):  # before memory is taken for them
            spec.apply(k, positions)
    assert np.array_equal(spec.apply(k, range(3, -1, -1)), spec.apply(k, [3, 2, 1, 0]))


def test_no_gradients_pass() -> None:
    spec = SPEC
    k = torch.from_numpy(random_k(spec, 4, 1)).requires_grad_()
    for new in (range(4), range(1, 5)):  # nothing to do, and something
        assert not spec.move(k, range(4), new).requires_grad
        out = torch.empty(4, 1, 64, requires_grad=True)
        assert torch.equal(spec.move(k.detach(), range(4), new, out=out), spec.move(k, range(4), new))


def test_parts_share_the_table_of_the_whole_on_a_device() -> None:
    whole = SPEC.applying(range(100))
    part = whole.part(20, 90).part(10, 30)
    cpu = torch.device("cpu")
    (cos, sin), (all_cos, all_sin) = part._on(cpu), whole._on(cpu)
    assert cos.data_ptr() == all_cos[30:].data_ptr()
    assert torch.equal(sin, all_sin[30:50])
    assert torch.equal(cos[:, 0], torch.from_numpy(part.cos))
