"""How tiers are configured: the option `tiers`, and what LMCache's names for local tiers mean here. Opens nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES, make_policy
from kvstore.options import Option, format_manual, parse_duration, parse_size, unknown_option
from kvstore.registry import BackendURL, parse_urls

__all__ = ["TIER_OPTIONS", "TierConfig", "parse_tiers", "tier_manual"]

DEFAULT_POLICY = "default"


class TierOption(Option):
    """An option of a tier. One kind besides `Option`'s: "values", a map of names to values."""

    __slots__ = ()

    def _parse_values(self, value: object) -> dict[str, object]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"option {self.name!r} must map names to values")
        return {name: _plain(each) for name, each in value.items()}


def _plain(value: object) -> object:
    """A duration as seconds, a size as bytes, anything else as it is."""
    if isinstance(value, str):
        for parse in (parse_duration, parse_size):
            try:
                return parse(value)
            except ConfigError:
                continue
    return value


TIER_OPTIONS: tuple[TierOption, ...] = (
    TierOption("bytes", "size", None, "Capacity of the tier. Not set: `bytes` of its URL, else the backend's default, "
               "else no limit: nothing ever leaves it, and nothing is accounted.", minimum=1),
    TierOption("policy", "choice", DEFAULT_POLICY, "Which records go first (docs/tiers.md); also as `policy` of the "
               "URL.", choices=tuple(POLICIES)),
    TierOption("policy_options", "values", {}, "Parameters of the policy, by name: `{ttl: 1h}`."),
    TierOption("high_watermark", "float", 0.95, "From this part of the capacity on records move down in the background "
               "…", minimum=0.01, maximum=1.0),
    TierOption("low_watermark", "float", 0.90, "… until this part is reached.", minimum=0.01, maximum=1.0),
    TierOption("promote", "choice", "always", "What comes up here, in the background, when it was read from a slower "
               "tier: all of it, what is read the second time, or nothing.", choices=("always", "second_use", "never")),
    TierOption("write", "choice", "through", "`through`: a put goes on to the next tier before it is acknowledged. "
               "`back`: it is acknowledged once it is here, and brought down in the background.",
               choices=("through", "back")),
    TierOption("queue", "size", 256 << 20, "With `write: back`: bytes that may wait to be brought down; a put beyond "
               "that goes through.", minimum=0),
    TierOption("timeout", "duration", None, "The most that a read or question may wait for this tier while slower ones "
               "are left to ask; not set: half of what is left until the deadline.", minimum=1e-3),
    TierOption("ttl_factor", "float", None, "A record's own time to live is multiplied by this here; not set: 1, 2, 4, "
               "… from the fastest tier on.", minimum=1e-3),
)  # fmt: skip
"""The options of a tier, beside its `url`."""

_BY_NAME = {option.name: option for option in TIER_OPTIONS}


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier, typed and checked. Made by `parse_tiers`.

    Attributes:
        url: its backend.
        values: what was given of `TIER_OPTIONS`, by name.
    """

    url: BackendURL
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def get(self, name: str) -> Any:
        """The value of an option, or its default."""
        return self.values.get(name, _BY_NAME[name].default)

    def __repr__(self) -> str:
        return f"TierConfig({self.shown!r})"

    @property
    def shown(self) -> str:
        """For people: the URL without the values of its options, and which options were given beside it."""
        return self.url.shown + (f" ({', '.join(sorted(self.values))})" if self.values else "")


def parse_tiers(value: object) -> tuple[TierConfig, ...]:
    """Tiers, the fastest first: a list of URLs, or of maps with `url` and `TIER_OPTIONS`; or URLs separated by commas.

    Raises:
        ConfigError: it is neither; an unknown or ill-typed option (named); a URL that is none.
    """
    if isinstance(value, str):
        value = parse_urls(value)
    if not isinstance(value, list | tuple):
        raise ConfigError(f"tiers must be a list of URLs or of maps with a url, not {type(value).__name__}")
    if not value:
        raise ConfigError("tiers is an empty list; name at least one place")
    return tuple(_parse_tier(each) for each in value)


def _parse_tier(value: object) -> TierConfig:
    if isinstance(value, TierConfig):
        return value
    given: Mapping[str, object] = {}
    if isinstance(value, Mapping):
        given = {str(name): each for name, each in value.items() if name != "url"}
        if "url" not in value:
            raise ConfigError("a tier has no url; write {url: 'memory://?bytes=16GiB'}")
        value = value["url"]
    if not isinstance(value, str | BackendURL | list | tuple):
        raise ConfigError(f"a tier must be a URL or a map with a url, not {type(value).__name__}")
    urls = parse_urls(value)
    if len(urls) != 1:
        raise ConfigError(
            f"a tier is one place, but {len(urls)} URLs are given for one; node://a,b is one of many hosts"
        )
    where = f"tier {urls[0].base}"
    for name in given:
        if name not in _BY_NAME:
            raise ConfigError(unknown_option(name, [*_BY_NAME, "url"], where=where))
    values: dict[str, Any] = {}
    for name, each in given.items():
        if each is None or each == "":
            raise ConfigError(f"option {name!r} of {where} is empty; give a value or leave it out")
        try:
            values[name] = _BY_NAME[name].parse(each)
        except ConfigError as error:
            raise ConfigError(f"{error.message} ({where})") from None
    tier = TierConfig(urls[0], values)
    if tier.get("low_watermark") > tier.get("high_watermark"):
        raise ConfigError(f"{where}: low_watermark is above high_watermark")
    policy_of(tier)
    return tier


def policy_of(tier: TierConfig, url_policy: str | None = None) -> str:
    """The name of the policy of a tier: its own option, else the URL's, else the default.

    Raises:
        ConfigError: no policy has that name, or not these parameters.
    """
    name: str = tier.values.get("policy") or url_policy or tier.url.options.get("policy") or DEFAULT_POLICY
    parameters = tier.get("policy_options")
    if wrong := {"name", "clock"}.intersection(parameters):
        raise ConfigError(f"tier {tier.url.base}: policy_options has no {min(wrong)!r}")
    try:
        make_policy(name, **parameters)
    except ConfigError as error:
        raise ConfigError(f"tier {tier.url.base}: {error.message}") from None
    return name


def tier_manual() -> str:
    """The options of a tier as a Markdown table."""
    return format_manual(TIER_OPTIONS)


def check_tiers(tiers: Sequence[TierConfig], remote: Sequence[BackendURL], replicas: int) -> None:
    """Raises `ConfigError` if tiers and the rest of the configuration contradict each other."""
    if not tiers:
        return
    if len(remote) > 1:
        raise ConfigError(
            f"remote_url names {len(remote)} places, but below tiers there is room for one: keys are not spread over "
            "the last tier; node://a,b is one place of many hosts"
        )
    if replicas > 1:
        raise ConfigError("replicas must be 1 with tiers; node:// keeps replicas of its own")
