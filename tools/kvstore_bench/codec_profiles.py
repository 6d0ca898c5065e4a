"""Profiles for the codecs that need one: given as files, or made once from the profile texts and kept."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.codec.profile import Profile, register
from kvstore.errors import ConfigError

from .codec_measure import Scheme

__all__ = ["BUILDERS", "cache_folder", "digest_of_folder", "load_profiles", "profile_for", "schemes_of"]

BUILDERS = {"cachegen": "kvstore.codec.profiling_cachegen", "kvt": "kvstore.codec.kvt_profiling"}
"""Codec → module whose `build_profile(model, tokenizer, token_lists)` makes its profile."""


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
    **options: Any,
) -> tuple[Profile, bool]:
    """The profile of a codec for a model, from texts; and whether it was made now rather than found.

    It is kept under a name that depends on the model, the texts, the options and the sources of whatever makes it.

    Args:
        model: a causal language model of transformers.
        token_lists: what the profile is made of.
        model_digest: see `digest_of_folder`; "" keeps nothing.
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
            return profile, False
    made: Profile = module.build_profile(model, tokenizer, [list(tokens) for tokens in token_lists], **options)
    register(made)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    return made, True


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
