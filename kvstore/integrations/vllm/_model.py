"""What vLLM's configuration says of a model's KV cache: its name in keys, its shards, and the layout of its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvstore.errors import ConfigError
from kvstore.integrations._weights import model_name, model_revision
from kvstore.layout import KVLayout, canonical_dtype

from ._keys import Shard, shards_of
from ._paging import Pages
from ._settings import Settings

__all__ = ["Model", "revision_of"]

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # vLLM fixes them by max_model_len


@dataclass(frozen=True)
class Model:
    """A model, as this engine runs it.

    Attributes:
        name, dtype: in keys.
        torch_dtype: of the pages.
        block_size: tokens in a block.
        group: which of vLLM's KV cache groups it is.
        layer_names: this rank's layers, in the order of the model.
        shards: of all ranks, in the order of ranks.
    """

    name: str
    dtype: str
    torch_dtype: torch.dtype
    block_size: int
    group: int
    layer_names: Sequence[str]
    shards: Sequence[Shard]
    layers: Mapping[str, Any]

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Model:
        """Look at vLLM's configuration.

        Raises:
            ConfigError: what makes its KV unfit to be stored.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        name = settings.model_name or model_name(model.model)
        for what, size in (
            ("decode context parallelism", parallel.decode_context_parallel_size),
            ("prefill context parallelism", getattr(parallel, "prefill_context_parallel_size", 1)),
        ):
            if size > 1:
                raise ConfigError(f"{what} spreads the tokens of a block over {size} ranks; its KV cannot be stored")
        group, spec, names = _only_group(name, kv_cache_config)
        mla = isinstance(spec, MLAAttentionSpec)
        names = sorted(names, key=extract_layer_index)
        tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        total = model.get_total_num_hidden_layers()
        stages = [end - begin for begin, end in (get_pp_indices(total, rank, pp_size) for rank in range(pp_size))]
        if len(names) not in stages or len(set(map(extract_layer_index, names))) != len(names):
            raise ConfigError(
                f"{name} has {total} layers, but {len(names)} KV caches on this rank: it has draft layers, layers that "
                "share their KV, or layers without KV, and cannot be stored"
            )
        heads = model.get_total_num_kv_heads()
        shards = shards_of(
            tp_size=tp_size, layers=stages, kv_heads=spec.num_kv_heads, head_dim=spec.head_size,
            v_head_dim=spec.head_size_v, mla=mla, replicas=1 if mla else max(1, tp_size // heads),
        )  # fmt: skip
        layers = vllm_config.compilation_config.static_forward_context
        return cls(name, canonical_dtype(spec.dtype), spec.dtype, spec.block_size, group, names, shards, layers)

    def shard_of_this_rank(self, vllm_config: Any) -> Shard:
        """The shard of the worker that calls it."""
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        tp_size = vllm_config.parallel_config.tensor_parallel_size
        shard: Shard = self.shards[get_pp_group().rank_in_group * tp_size + get_tensor_model_parallel_rank()]
        return shard

    def pages(self, kv_caches: Mapping[str, torch.Tensor], layout: KVLayout) -> list[Pages]:
        """The pages of each layer, after the engine itself has written to a copy of the first layer's, and we have read
        from it what it wrote.

        Raises:
            ConfigError: the pages are laid out in no way that is known; names the attention backend.
        """
        if missing := [name for name in self.layer_names if name not in kv_caches]:
            raise ConfigError(f"{self.name}: no KV cache was made for {missing[0]}")
        first = kv_caches[self.layer_names[0]]
        if first.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"{self.name}: KV caches on {first.device.type} are not supported; only cpu and cuda are")
        layer = self.layers.get(self.layer_names[0])
        make = self._layout_of(first, layout, layer)
        return [make(kv_caches[name], layout, self.block_size) for name in self.layer_names]

    def _layout_of(self, cache: torch.Tensor, layout: KVLayout, layer: Any) -> Any:
        if layout.kind == "mla":
            return Pages.strided
        impl: Any = getattr(layer, "impl", None)
        what = type(impl).__name__ + (f", instruction set {layer.isa}" if hasattr(layer, "isa") else "")
        if not hasattr(impl, "do_kv_cache_update"):
            raise ConfigError(f"{self.name}: {what} does not say how it lays out pages; its KV cannot be stored")
        tokens = 2 * self.block_size
        generator = torch.Generator().manual_seed(0)
        shape = (tokens, layout.num_kv_heads)
        keys, values = (
            torch.randn(*shape, width or 0, generator=generator).to(cache.device, self.torch_dtype)
            for width in (layout.head_dim, layout.v_head_dim)
        )
        scratch = torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
        scratch.zero_()
        slots = torch.arange(tokens, device=cache.device)
        impl.do_kv_cache_update(layer, keys, values, scratch, slots)
        for make in (Pages.strided, Pages.transposed):
            try:
                pages = make(scratch, layout, self.block_size)
            except ConfigError:
                continue
            found_keys, found_values = torch.empty_like(keys), torch.empty_like(values)
            pages.gather((0, 1), 0, tokens, found_keys, found_values)
            if torch.equal(keys, found_keys) and torch.equal(values, found_values):
                return make
        raise ConfigError(
            f"{self.name}: pages of {what} (shape {tuple(cache.shape)}) are packed in a way that is not known here; "
            "use vLLM's OffloadingConnector with kvstore.integrations.vllm.KVStoreTier, which copies whole blocks"
        )


def _only_group(name: str, kv_cache_config: Any) -> tuple[int, Any, list[str]]:
    """The group of layers with full attention, if there is no other: its number, its spec and its layers."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise ConfigError(
            f"{name} has {len(groups)} groups of KV caches ({kinds}); only models with full attention in all layers "
            "can be stored. With --disable-hybrid-kv-cache-manager vLLM keeps sliding windows as full attention"
        )
    spec, names = groups[0].kv_cache_spec, list(groups[0].layer_names)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds_of = {repr(each) for each in spec.kv_cache_specs.values()}
        if len(kinds_of) != 1:
            raise ConfigError(f"{name} has layers with KV of {len(kinds_of)} different shapes; it cannot be stored")
        spec = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(spec, FullAttentionSpec):
        raise ConfigError(f"{name} has KV caches of kind {type(spec).__name__}; only full attention can be stored")
    packed = spec.num_head_slots not in (None, spec.num_kv_heads) or spec.state_content_bytes is not None
    if spec.kv_quant_mode != KVQuantMode.NONE or packed or spec.tokens_per_state != 1:
        raise ConfigError(f"{name} has a KV cache that is quantised or packed ({spec.kv_quant_mode.name}); use auto")
    if spec.non_causal:
        raise ConfigError(f"{name} attends to later tokens: its KV cannot be stored by prefix")
    return 0, spec, names


def revision_of(vllm_config: Any) -> str:
    """What stands for weights, configuration and whatever else changes KV; see `model_revision`. Reads all weights.

    Raises:
        ConfigError: it cannot be told.
    """
    model = vllm_config.model_config
    config = model.hf_text_config.to_dict()
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    dummy = str(vllm_config.load_config.load_format) == "dummy"
    settings = {
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "max_model_len": model.max_model_len if kind in _LENGTH_DEPENDENT_ROPE else None,
        "random weights": model.seed if dummy else None,
    }
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return model_revision(model.model, commit, config, settings)
