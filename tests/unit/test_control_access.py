"""Who may do what, where a server may listen, and where a prompt goes: everything that needs no server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.control import ControlSettings, DeniedError
from kvstore.control.access import Access
from kvstore.control.instance import Job, TierUsage
from kvstore.control.messages import Finished, Lookup, Place, Worker, decode
from kvstore.control.routing import RoutePolicy, choose
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import Key

TOKENS = {"": b"default-secret", "a": b"secret-a", "b": b"secret-b"}


@pytest.mark.parametrize("listen", ["0.0.0.0:80", ":80", "[::]:80", "10.0.0.1:80", "example.org:80"])
def test_beyond_loopback_everything_needs_a_token(listen: str) -> None:
    with pytest.raises(ConfigError, match="no admin token"):
        ControlSettings(listen=listen)
    with pytest.raises(ConfigError, match="the default namespace has no token"):
        ControlSettings(listen=listen, admin_token=b"x")
    with pytest.raises(ConfigError, match="namespace 'c' has no token"):
        ControlSettings(listen=listen, admin_token=b"x", tokens={**TOKENS, "c": b""})
    ControlSettings(listen=listen, admin_token=b"x", tokens=TOKENS)
    ControlSettings(listen=listen, insecure=True)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:80", "[::1]:80", "localhost:80"])
def test_on_loopback_nothing_does(listen: str) -> None:
    assert ControlSettings(listen=listen).loopback


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        ({"listen": "127.0.0.1"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"listen": "http://127.0.0.1:80"}, "HOST:PORT"),
        ({"admin_token": b"with blank"}, "printable ASCII"),
        ({"tokens": {"": "ü".encode()}}, "printable ASCII"),
        ({"tls_cert": "cert.pem"}, "go together"),
        ({"max_body": 10}, "max_body=10"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(given_settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ControlSettings(**given_settings)


def test_tokens_are_never_shown() -> None:
    shown = repr(ControlSettings(admin_token=b"admin-secret", report_token=b"report-secret", tokens=TOKENS))
    assert "secret" not in shown


def test_a_token_opens_its_namespace_and_no_other() -> None:
    access = Access(ControlSettings(admin_token=b"the-admin", tokens={**TOKENS, "open": b""}))
    who = access.recognise("Bearer secret-a")
    assert who.only(["", "a", "b", "open", "nowhere"]) == ["a", "open"]
    assert not who.admin
    assert not who.operator
    assert not who.reporter
    with pytest.raises(DeniedError) as other:
        who.check("b")
    with pytest.raises(DeniedError) as nowhere:
        who.check("nowhere")
    assert str(other.value) == str(nowhere.value)  # nobody learns which names there are
    admin = access.recognise("bearer the-admin")
    assert admin.admin
    assert admin.operator
    assert admin.reporter
    admin.check("anything")
    nobody = access.recognise(None)
    assert nobody.only(["", "a", "b", "open"]) == ["open"]
    assert not (nobody.admin)
    assert not (nobody.operator)
    assert not (nobody.reporter)


@pytest.mark.parametrize(
    "header", ["Bearer ", "Bearer wrong", "Basic c2VjcmV0LWE=", "secret-a", "", "Bearer secret-", "Bearer é"]
)
def test_a_wrong_token_is_denied(header: str) -> None:
    with pytest.raises(DeniedError):
        Access(ControlSettings(admin_token=b"the-admin", tokens=TOKENS)).recognise(header)


def test_without_any_token_whoever_reaches_loopback_may_do_everything() -> None:
    who = Access(ControlSettings()).recognise(None)
    assert who.admin
    assert who.operator
    assert who.reporter
    # A client that always sends its token is not sent away.
    assert Access(ControlSettings()).recognise("Bearer something").admin


def test_a_report_token_reports_and_does_nothing_else() -> None:
    access = Access(ControlSettings(admin_token=b"the-admin", report_token=b"the-nodes", tokens=TOKENS))
    who = access.recognise("Bearer the-nodes")
    assert who.reporter
    assert not (who.admin)
    assert not (who.operator)
    assert not (who.known)
    # Without other tokens, too: what needs a token for reports is not open.
    assert not Access(ControlSettings(report_token=b"the-nodes")).recognise(None).reporter


# Routing.

FIRST = Key(b"\1" * 32)


def _place(name: str, **tiers: int) -> Place:
    return Place(name, 0, sum(tiers.values()), "", tiers)


def _route(places: list[Place], queued: dict[str, float], tokens: int = 4096, **policy: Any) -> str:
    return choose(
        RoutePolicy(**policy), [*queued], queued=queued, places=places, first=FIRST, tokens=tokens
    ).instance  # fmt: skip


def test_the_longest_hit_wins_until_its_queue_costs_more_than_it_saves() -> None:
    places = [_place("a", memory=2048), _place("b", memory=1024)]
    assert _route(places, {"a": 0, "b": 0, "c": 0}) == "a"
    assert _route(places, {"a": 900, "b": 0, "c": 0}) == "a"
    assert _route(places, {"a": 1100, "b": 0, "c": 0}) == "b"
    assert _route(places, {"a": 5000, "b": 5000, "c": 0}) == "c"
    assert _route(places, {"a": 5000, "b": 0, "c": 0}, load_weight=0.0) == "a"


def test_a_hit_in_a_slower_tier_is_worth_less() -> None:
    assert _route([_place("a", memory=1024), _place("b", remote=1100)], {"a": 0, "b": 0}) == "a"
    assert _route([_place("a", memory=1024), _place("b", remote=4000)], {"a": 0, "b": 0}) == "b"
    assert _route([_place("a", memory=1024), _place("b", remote=1100)], {"a": 0, "b": 0}, worth={}, other=1.0) == "b"


def test_prompts_that_begin_alike_go_to_one_place_and_others_spread() -> None:
    names = dict.fromkeys("abcd", 0.0)
    firsts = [Key(bytes([number]) * 32) for number in range(200)]

    def of(first: Key, order: list[str]) -> str:
        return choose(RoutePolicy(), order, queued=names, places=[], first=first, tokens=512).instance

    chosen = {first: of(first, [*names]) for first in firsts}
    assert {first: of(first, [*names][::-1]) for first in firsts} == chosen  # whoever asks, in whatever order
    counts = [list(chosen.values()).count(name) for name in names]
    assert all(20 < count < 100 for count in counts)
    fewer = {first: of(first, ["a", "b", "c"]) for first in firsts}
    assert all(fewer[first] == name for first, name in chosen.items() if name != "d")


@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(0, 1e6), min_size=1),
    st.dictionaries(
        st.sampled_from("abcde"), st.dictionaries(st.sampled_from(["memory", "disk"]), st.integers(0, 4096))
    ),
    st.integers(0, 8192),
)
def test_the_choice_is_the_least_cost_and_says_why(
    queued: dict[str, float], tiers: dict[str, dict[str, int]], tokens: int
) -> None:
    places = [Place(name, 1, sum(parts.values()), "", parts) for name, parts in tiers.items()]
    found = choose(RoutePolicy(), [*queued], queued=queued, places=places, first=FIRST, tokens=tokens)
    assert sorted(score.instance for score in found.scores) == sorted(queued)
    assert found.scores[0].instance == found.instance
    assert found.scores[0].cost == min(score.cost for score in found.scores)
    assert found.hit_tokens == sum(tiers.get(found.instance, {}).values())


def test_nobody_to_route_to_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nobody to route to"):
        choose(RoutePolicy(), [], queued={}, places=[], first=FIRST, tokens=1)
    with pytest.raises(ConfigError, match="worth of tier 'disk' is 2"):
        RoutePolicy(worth={"disk": 2.0})


# What comes back.


def test_answers_become_objects_again_and_unknown_fields_are_ignored() -> None:
    found = decode(Lookup, {
        "chunks": 2, "tokens": 16, "instance": "a", "tier": "disk", "hit_chunks": 1, "hit_tokens": 8, "new": 1,
        "places": [{"instance": "a", "hit_chunks": 1, "hit_tokens": 8, "tier": "disk", "tiers": {"disk": 8}}],
    })  # fmt: skip
    assert found.places[0] == Place("a", 1, 8, "disk", {"disk": 8})
    job = {"id": "1", "namespace": "", "kind": "clear", "state": "done"}
    assert decode(Finished, {"event": "e", "finished": True, "ok": True, "jobs": {"a": job}}).jobs["a"] == Job(
        "1", "", "clear", "done"
    )


@pytest.mark.parametrize(
    "nonsense", [None, [], "x", {"chunks": 1}, {"chunks": "1"}, {"chunks": True, "tokens": 1}, {"places": {}}]
)
def test_an_answer_that_is_none_of_ours_is_said_to_be(nonsense: Any) -> None:
    with pytest.raises(TransientError, match="not what a control API"):
        decode(Lookup, nonsense)
    with pytest.raises(TransientError):
        decode(list[Worker], {"a": 1})
    with pytest.raises(TransientError):
        decode(TierUsage, {"namespace": 1})
