"""`kvstore cloudwatch`: saved queries, and what a day cost. AWS is moto."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import boto3
import pytest
from moto.ce.models import ce_backends
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sns import sns_backends

from kvstore.errors import PermanentError
from kvstore_cli.cloudwatch_costs import CostReport, alert, read_costs, yesterday
from kvstore_cli.main import main
from tests.unit.cloudwatch_support import pretended_aws

DAY = dt.date(2026, 11, 29)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_aws(monkeypatch):
        yield


# Queries.


def test_queries_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cloudwatch", "queries"]) == 0
    names = capsys.readouterr().out.split()
    assert "token_use_per_hour" in names
    assert len(names) == 6
    assert main(["cloudwatch", "queries", "slow_ttft_by_model", "--field-prefix", "log_processed."]) == 0
    assert "pct(log_processed.ttft_ms, 95)" in capsys.readouterr().out
    assert main(["cloudwatch", "queries", "--json", "-"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)) == sorted(names)
    assert main(["cloudwatch", "queries", "nothing"]) == 2
    assert "token_use_per_hour" in capsys.readouterr().err


# Costs.


def page(costs: dict[str, str], *, unit: str = "USD", estimated: bool = True, token: str = "") -> dict[str, Any]:
    groups = [
        {"Keys": [name], "Metrics": {"UnblendedCost": {"Amount": cost, "Unit": unit}}} for name, cost in costs.items()
    ]
    period = {"Start": DAY.isoformat(), "End": (DAY + dt.timedelta(days=1)).isoformat()}
    answer: dict[str, Any] = {
        "ResultsByTime": [{"TimePeriod": period, "Total": {}, "Groups": groups, "Estimated": estimated}],
        "DimensionValueAttributes": [],
    }
    return {**answer, "NextPageToken": token} if token else answer


@contextlib.contextmanager
def costs_are(*pages: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What Cost Explorer answers; gives what it was asked, by the body."""
    backend = ce_backends[DEFAULT_ACCOUNT_ID]["global"]
    backend.cost_usage_results_queue.extend(pages)
    yield backend.cost_usage_results


def sns() -> tuple[str, Any]:
    topic = boto3.client("sns").create_topic(Name="oncall")["TopicArn"]
    return topic, sns_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].topics[topic]


@pytest.mark.usefixtures("aws")
def test_the_days_cost_by_service(capsys: pytest.CaptureFixture[str]) -> None:
    with costs_are(page({"Amazon S3": "12.345", "EC2": "80.1"}, token="more"), page({"Amazon S3": "1"})) as asked:
        words = ["--project", "kv", "--service", "store", "--date", DAY.isoformat(), "--json", "-"]
        assert main(["cloudwatch", "costs", *words]) == 0
        first, second = map(json.loads, asked)
    report = json.loads(capsys.readouterr().out)
    assert report["services"] == {"EC2": 80.1, "Amazon S3": 13.345}
    assert list(report["services"]) == ["EC2", "Amazon S3"], "the dearest first"
    assert (report["total"], report["level"], report["estimated"]) == (93.445, "ok", True)
    assert first["TimePeriod"] == {"Start": "2026-11-29", "End": "2026-11-30"}
    assert first["GroupBy"] == [{"Type": "DIMENSION", "Key": "SERVICE"}]
    assert [(each["Tags"]["Key"], each["Tags"]["Values"]) for each in first["Filter"]["And"]] == [
        ("Project", ["kv"]), ("Service", ["store"]),
    ]  # fmt: skip
    assert second == {**first, "NextPageToken": "more"}


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    ("cost", "level"),
    [("99.99", "ok"), ("100", "ok"), ("100.01", "warning"), ("500", "warning"), ("500.01", "critical")],
)
def test_somebody_is_told_above_a_threshold(cost: str, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    topic, inbox = sns()
    with costs_are(page({"EC2": cost})):
        assert main(["cloudwatch", "costs", "--project", "kv", "--date", DAY.isoformat(), "--topic", topic]) == 0
    sent = [(notification[1], notification[2]) for notification in inbox.sent_notifications]
    assert f"{Decimal(cost):.2f} USD" in capsys.readouterr().out
    if level == "ok":
        assert sent == []
        return
    ((message, subject),) = sent
    assert subject == f"kvstore cost {level}: {Decimal(cost):.2f} USD on 2026-11-29 (Project kv)"
    assert f"more than the {level} threshold" in message
    assert "EC2" in message


@pytest.mark.usefixtures("aws")
def test_yesterday_in_utc_and_the_whole_account() -> None:
    with costs_are(page({"EC2": "1"})) as asked:
        assert main(["cloudwatch", "costs", "--account"]) == 0
        (request,) = map(json.loads, asked)
    assert "Filter" not in request
    assert request["TimePeriod"]["End"] >= (dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)).date().isoformat()
    tokyo = dt.timezone(dt.timedelta(hours=9))
    assert yesterday(dt.datetime(2026, 11, 30, 8, 0, tzinfo=tokyo)) == dt.date(2026, 11, 28)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--project"),
        (["--account", "--project", "kv"], "--account"),
        (["--project", "kv", "--warning", "600"], "--warning"),
        (["--project", "kv", "--warning", "nan"], "--warning"),
        (["--project", "kv", "--date", "yesterday"], "YYYY-MM-DD"),
        (["--project", "kv", "--topic", "oncall"], "oncall"),
    ],
)
def test_costs_of_nothing(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cloudwatch", "costs", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("aws")
def test_a_topic_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"arn:aws:sns:us-east-1:{DEFAULT_ACCOUNT_ID}:gone"
    with costs_are(page({"EC2": "1000"})):
        assert main(["cloudwatch", "costs", "--project", "kv", "--date", DAY.isoformat(), "--topic", gone]) == 1
    said = capsys.readouterr()
    assert "Publish: NotFound" in said.err
    assert "1000.00 USD" in said.out, "what was read, and paid for, is shown all the same"


class Explorer:
    """Cost Explorer with pages of one's own."""

    def __init__(self, *pages: dict[str, Any]) -> None:
        self._pages = list(pages)

    def get_cost_and_usage(self, **_: Any) -> dict[str, Any]:
        return self._pages.pop(0) if len(self._pages) > 1 else self._pages[0]


def test_answers_that_make_no_sense() -> None:
    with pytest.raises(PermanentError, match="several currencies"):
        read_costs(Explorer(page({"a": "1"}, token="x"), page({"b": "1"}, unit="CNY")), DAY, {})
    with pytest.raises(PermanentError, match="pages"):
        read_costs(Explorer(page({"a": "1"}, token="for ever")), DAY, {})


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"ResultsByTime": None},
        {"ResultsByTime": [{"Groups": [{"Keys": [], "Metrics": {}}]}]},
        {"ResultsByTime": [{"Groups": [{"Keys": ["a"], "Metrics": {"UnblendedCost": {"Unit": "USD"}}}]}]},
        page({"a": "a lot"}),
        page({"a": "NaN"}),
        page({"a": "Infinity"}),
    ],
)
def test_an_answer_of_another_form_is_named(answer: dict[str, Any]) -> None:
    with pytest.raises(PermanentError, match="makes no sense"):
        read_costs(Explorer(answer), DAY, {})


def test_another_currency_and_what_costs_nothing() -> None:
    report = read_costs(Explorer(page({"a": "700.5"}, unit="CNY", token="x"), page({"b": "0"}, unit="N/A")), DAY, {})
    assert (report.currency, report.total) == ("CNY", Decimal("700.5"))
    assert "700.50 CNY" in report.text(Decimal(100), Decimal(500))


@pytest.mark.usefixtures("aws")
def test_no_figures_are_not_called_a_cost_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with costs_are(page({})):
        assert main(["cloudwatch", "costs", "--project", "kv", "--date", DAY.isoformat()]) == 0
    out = capsys.readouterr().out
    assert "no costs of Project kv" in out
    assert "activated as a cost allocation tag" in out
    assert "0.00" not in out


def test_costs_without_credentials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert main(["cloudwatch", "costs", "--project", "kv"]) == 1
    assert capsys.readouterr().err.startswith("kvstore: no AWS credentials found: AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert main(["cloudwatch", "costs", "--project", "kv"]) == 2
    assert capsys.readouterr().err.endswith("found in env, missing: AWS_SECRET_ACCESS_KEY\n")


def test_a_subject_is_one_line_of_ascii() -> None:
    sent: list[dict[str, Any]] = []

    class Topic:
        def publish(self, **message: Any) -> dict[str, str]:
            sent.append(message)
            return {"MessageId": "1"}

    alert(
        Topic(),
        "arn",
        CostReport(DAY, {"Project": "a\nb\x1b"}, [("x", Decimal(101))], "USD", True),
        Decimal(1),
        Decimal(500),
    )
    assert all(" " <= char <= "~" for char in sent[0]["Subject"])


def test_a_subject_is_what_sns_takes() -> None:
    sent: list[dict[str, Any]] = []

    class Topic:
        def publish(self, **message: Any) -> dict[str, str]:
            sent.append(message)
            return {"MessageId": "1"}

    report = CostReport(DAY, {"Project": "キャッシュ" * 40}, [("EC2", Decimal(600))], "USD", False)
    assert alert(Topic(), "arn", report, Decimal(100), Decimal(500)) == "1"
    assert sent[0]["Subject"].isascii()
    assert len(sent[0]["Subject"]) <= 100
    assert "estimate" not in sent[0]["Message"]
