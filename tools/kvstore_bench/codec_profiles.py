"""Profiles for the codecs that need one: given as files, or made once from the profile texts and kept.

Those that the default options make for SmolLM2 come with the package (`profiles/`), so that `--quick` is quick: they
are taken where they fit the model and have seen nothing of what is judged: the token lists that they were made of lie
beside them. (Python's documentation, which the texts are, changes a little with its release.)
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.codec.profile import Profile, register
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

from .codec_measure import Scheme
from .texts import shared_runs

__all__ = [
    "BUILDERS", "PACKAGED", "cache_folder", "digest_of_folder", "load_profiles", "packaged_profile", "profile_for",
    "schemes_of",
]  # fmt: skip

BUILDERS = {"cachegen": "kvstore.codec.profiling_cachegen", "kvt": "kvstore.codec.kvt_profiling"}
"""Codec → module whose `build_profile(model, tokenizer, token_lists)` makes its profile."""

PACKAGED = Path(__file__).with_name("profiles")
"""Folder of the profiles that come with the package."""


def cache_folder() -> Path:
    """Where profiles that were made here are kept: `.cache/profiles` in the current folder."""
    return Path(".cache/profiles")


def load_profiles(paths: Sequence[str]) -> dict[str, Profile]:
    """Profiles from files, registered, by codec.

    Raises:
        ConfigError: a file is no profile, or two are for one codec.
    """
    found: dict[str, Profile] = {}
    for path in paths:
        profile = Profile.load(path)
        if profile.codec in found:
            raise ConfigError(f"--profile {path}: there is another profile for codec {profile.codec!r} already")
        register(profile)
        found[profile.codec] = profile
    return found


def profile_for(
    codec: str,
    model: Any,
    tokenizer: Any,
    token_lists: Sequence[Sequence[int]],
    *,
    model_digest: str,
    folder: Path | None = None,
    unseen: Sequence[Sequence[int]] | None = None,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[Profile, str]:
    """The profile of a codec for a model, from texts; and a sentence on where it is from.

    It is kept under a name that depends on the model, the texts, the options and the sources of whatever makes it.

    Args:
        model: a causal language model of transformers.
        token_lists: what the profile is made of.
        model_digest: see `digest_of_folder`; "" keeps nothing.
        unseen: take the one that comes with the package if none was made here and it has not seen these token lists;
            None, or with `options`: never.
        tell: told what is being done while one is made.
        options: of `build_profile`.
    """
    module = importlib.import_module(BUILDERS[codec])
    path = None
    if model_digest:
        digest = hashlib.sha256(f"{codec} {model_digest} {_code_digest(codec)}".encode())
        if options:
            digest.update(repr(sorted(options.items())).encode())
        for tokens in token_lists:
            digest.update(repr(list(tokens)).encode())
        path = (folder or cache_folder()) / f"{codec}-{digest.hexdigest()[:16]}.kvprofile"
        if path.exists():
            profile = Profile.load(path)
            register(profile)
            return profile, f"{profile}: found as {path}, made of {_texts(token_lists)}"
    refused = ""
    if unseen is not None and not options:
        try:
            profile, of = packaged_profile(codec, model, unseen)
        except ConfigError as error:
            refused = f"; the packaged one does not serve: {error.message}"
        else:
            register(profile)
            return profile, f"{profile}: packaged with kvstore-bench, made of {of}"
    lists = [list(tokens) for tokens in token_lists]
    if tell is not None:
        tell(f"it is made now, which takes a minute or more{refused}")
    made: Profile = module.build_profile(model, tokenizer, lists, progress=tell, **options)
    register(made)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    return made, f"{made}: made in this run of {_texts(token_lists)}{refused}"


def packaged_profile(codec: str, model: Any, unseen: Sequence[Sequence[int]]) -> tuple[Profile, str]:
    """The profile that comes with the package, and what it was made of.

    Args:
        model: a causal language model of transformers that it must fit.
        unseen: token lists that it must not be made of.

    Raises:
        ConfigError: there is none for this codec, or it is of another model or shape, has seen what it must not, or is
            no profile that this release's codec takes.
    """
    from kvstore.codec import codec_by_name
    from kvstore.codec.profiling import model_name

    try:
        index = json.loads((PACKAGED / "index.json").read_text("utf-8"))
        entry, texts = index["files"][codec], index["texts"]
        file, wanted, described = entry["file"], entry["id"], texts["what"]
        seen = np.load(PACKAGED / texts["file"], allow_pickle=False).tolist()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{PACKAGED / 'index.json'} names no profile of {codec} with its texts", cause=error
        ) from error
    profile = Profile.load(PACKAGED / file)
    if (profile.codec, profile.id) != (codec, wanted):
        raise ConfigError(f"{file} is {profile}, not profile {wanted} ({codec})")
    name, config = model_name(model), model.config
    if not profile.is_of(name):
        raise ConfigError(f"{profile} is not of {name}")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    profile.check_layout(KVLayout(config.num_hidden_layers, config.num_key_value_heads, size), "bfloat16")
    if shared := shared_runs(seen, unseen):
        raise ConfigError(f"{profile} has seen {shared} runs of tokens of what is judged")
    codec_by_name(codec, profile)  # reads its tables
    return profile, described


def _texts(token_lists: Sequence[Sequence[int]]) -> str:
    return f"{len(token_lists)} lists of {len(token_lists[0]) if token_lists else 0} tokens of the profile texts"


def schemes_of(name: str, profile: Profile | None) -> list[Scheme]:
    """A codec as what can be measured: once, or once per level where each level is a record of its own."""
    from kvstore.codec import codec_by_name

    if name == "cachegen" and profile is not None:
        from kvstore.codec.cachegen import CachegenCodec
        from kvstore.codec.cachegen_tables import tables_for

        tables = tables_for(profile)
        if not tables.embedded:
            return [Scheme(name, CachegenCodec(profile, level=level), level) for level in range(len(tables.levels))]
    return [Scheme(name, codec_by_name(name, profile))]


def digest_of_folder(folder: Path) -> str:
    """Identity of a model: its configuration and its weights.

    Raises:
        ConfigError: the folder has no config.json.
    """
    from xxhash import xxh3_128

    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder}: there is no config.json in it")
    digest = xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin", ".model"):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def _code_digest(codec: str) -> str:
    """Of the sources that a profile depends on."""
    import kvstore.codec

    folder = Path(next(iter(kvstore.codec.__path__)))
    digest = hashlib.sha256()
    names = {"profile.py", "profiling.py", f"profiling_{codec}.py", "rans/tables.py"}
    for path in (*sorted(folder.glob("*.py")), folder / "rans" / "tables.py"):
        name = str(path.relative_to(folder))
        if name in names or name.startswith(codec):
            digest.update(path.read_bytes())
    return digest.hexdigest()
