"""Schemathesis against the OpenAPI documents of a node and of a controller: a fixed seed, so many requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks

from tests.control_support import PlainInstance, controller, keys_of, plain_node, reporting

load_all_checks()

ADMIN = "the-admin-token"
SETTINGS: dict[str, Any] = {"admin_token": ADMIN.encode(), "tokens": {"": b"default-token", "team-a": b"team-a-token"}}
# A body can be as described and make no sense all the same (400): the 17th of 16 ranks. And names of instances, tiers
# and events that nobody has are 404.
NOT_MEANT = {"positive_data_acceptance"}
EXAMPLES = 6
MANY = 40
# The controller's routes are the node's; those behind which it does something of its own are enough for the short form.
ITS_OWN = {"/v1/report", "/v1/lookup", "/v1/route", "/v1/check_finish"}


@contextlib.contextmanager
def _server(role: str) -> Iterator[str]:
    if role == "node":
        with plain_node("n0", **SETTINGS) as (instance, url):
            instance.put("", "memory", keys_of(1, 8))
            yield url
    else:
        with controller(**SETTINGS) as (_, url), reporting(PlainInstance("n0"), url, ADMIN):
            yield url


def _exercise(operation: Any, mode: str, examples: int, statuses: dict[str, set[int]]) -> None:
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    checks = [check for check in CHECKS.get_all() if check.__name__ not in NOT_MEANT]

    @seed(2026)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(strategy)
        headers = {"Authorization": f"Bearer {ADMIN}"}
        response = case.call(headers=headers, timeout=30)
        statuses.setdefault(operation.path, set()).add(response.status_code)
        case.validate_response(response, checks=checks, headers=headers)

    if mode == "negative" and not (operation.body or operation.query):
        return  # nothing that could be wrong
    run()


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("role", ["node", "controller"])
def test_every_operation_does_what_its_description_says(role: str, mode: str, examples: int) -> None:
    statuses: dict[str, set[int]] = {}
    with _server(role) as url:
        operations = [found.ok() for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]
        paths = {operation.path for operation in operations}
        assert {"/v1/lookup", "/v1/pin", "/v1/clear", "/v1/route", "/v1/check_finish", "/healthz"} <= paths
        assert ("/v1/report" in paths) == (role == "controller")
        for operation in operations:
            if role == "controller" and examples == EXAMPLES and operation.path not in ITS_OWN:
                continue
            _exercise(operation, mode, examples, statuses)
    assert not any(status >= 500 and status != 503 for found in statuses.values() for status in found)
    if mode == "positive":
        assert 200 in statuses["/v1/lookup"]
    else:
        assert all(422 in statuses[path] for path in ("/v1/lookup", "/v1/route", "/v1/check_finish"))
