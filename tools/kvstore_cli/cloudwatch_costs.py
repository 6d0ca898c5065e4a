"""The daily cost report: what a project cost yesterday, by service of AWS, from Cost Explorer; and a message to an SNS
topic when it was more than a threshold."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kvstore.errors import ConfigError, PermanentError

from .cloudwatch_publish import aws_call

__all__ = ["CostReport", "alert", "read_costs"]

_MOST_PAGES = 100


@dataclass(frozen=True, slots=True)
class CostReport:
    """What one day cost.

    Attributes:
        day: in UTC, as Cost Explorer counts.
        tags: by which it was filtered.
        services: (name, cost), the dearest first.
        currency: of all amounts.
        estimated: AWS may still change it; a day is final some days later.
    """

    day: dt.date
    tags: Mapping[str, str]
    services: Sequence[tuple[str, Decimal]]
    currency: str
    estimated: bool

    @property
    def total(self) -> Decimal:
        """Of all services."""
        return sum((cost for _, cost in self.services), Decimal(0))

    def level(self, warning: Decimal, critical: Decimal) -> str:
        """ok, warning (above `warning`) or critical (above `critical`)."""
        return "critical" if self.total > critical else "warning" if self.total > warning else "ok"

    @property
    def about(self) -> str:
        """The filter, for people."""
        return ", ".join(f"{name} {value}" for name, value in self.tags.items()) or "the whole account"

    def text(self, warning: Decimal, critical: Decimal) -> str:
        """For a mail."""
        level = self.level(warning, critical)
        limit = {"critical": critical, "warning": warning}.get(level)
        head = f"{self.about} cost {self.total:.2f} {self.currency} on {self.day}"
        head += f", more than the {level} threshold of {limit:.2f} a day." if limit is not None else "."
        lines = [f"  {cost:>12.2f}  {name}" for name, cost in self.services if cost]
        notes = ["AWS's figure is still an estimate."] if self.estimated else []
        if not self.services:
            head = f"AWS has no costs of {self.about} on {self.day}."
            reason = "its figures of a day come some hours after its end"
            if self.tags:
                reason = f"a tag counts from when it is activated as a cost allocation tag; and {reason}"
            notes = [f"If there should be some: {reason}."]
        return "\n".join([head, "", *lines, "", *notes, "Thresholds: kvstore cloudwatch costs --warning, --critical."])


def read_costs(client: Any, day: dt.date, tags: Mapping[str, str]) -> CostReport:
    """What `day` cost, unblended, by service.

    Args:
        client: of boto3, for ce.
        tags: tag → value; only what has all of them counts. They must be activated as cost allocation tags.

    Raises:
        TransientError: AWS refuses, or cannot be reached.
        PermanentError: the answer makes no sense.
    """
    request: dict[str, Any] = {
        "TimePeriod": {"Start": day.isoformat(), "End": (day + dt.timedelta(days=1)).isoformat()},
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "GroupBy": [{"Type": "DIMENSION", "Key": "SERVICE"}],
    }
    terms = [{"Tags": {"Key": name, "Values": [value], "MatchOptions": ["EQUALS"]}} for name, value in tags.items()]
    if terms:
        request["Filter"] = terms[0] if len(terms) == 1 else {"And": terms}
    costs: dict[str, Decimal] = {}
    currencies: set[str] = set()
    estimated = False
    for _ in range(_MOST_PAGES):
        answer = aws_call(client.get_cost_and_usage, **request)
        try:
            for period in answer["ResultsByTime"]:
                estimated |= bool(period.get("Estimated"))
                for group in period.get("Groups", ()):
                    name, cost = group["Keys"][0], group["Metrics"]["UnblendedCost"]
                    amount = Decimal(cost["Amount"])
                    if not amount.is_finite():
                        raise ValueError(cost["Amount"])
                    costs[name] = costs.get(name, Decimal(0)) + amount
                    if amount:  # what costs nothing may be in no currency
                        currencies.add(cost["Unit"])
        except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            text = f"Cost Explorer's answer makes no sense: {type(error).__name__}: {error}"
            raise PermanentError(text[:200], operation="costs", cause=error) from error
        if not (token := answer.get("NextPageToken")):
            break
        request["NextPageToken"] = token
    else:
        raise PermanentError(f"Cost Explorer has more than {_MOST_PAGES} pages", operation="costs")
    if len(currencies) > 1:
        raise PermanentError(f"amounts in several currencies: {', '.join(sorted(currencies))}", operation="costs")
    services = sorted(costs.items(), key=lambda item: (-item[1], item[0]))
    return CostReport(day, dict(tags), services, next(iter(currencies), "USD"), estimated)


def alert(client: Any, topic: str, report: CostReport, warning: Decimal, critical: Decimal) -> str:
    """Send a message if a threshold was passed. Returns its id, "" if there was no need.

    Args:
        client: of boto3, for sns.

    Raises:
        TransientError: AWS refuses, or cannot be reached.
    """
    level = report.level(warning, critical)
    if level == "ok":
        return ""
    subject = f"kvstore cost {level}: {report.total:.2f} {report.currency} on {report.day} ({report.about})"
    subject = "".join(char if " " <= char <= "~" else "?" for char in subject)  # what SNS takes
    answer = aws_call(
        client.publish,
        TopicArn=topic,
        Subject=subject[:100],
        Message=report.text(warning, critical),
        MessageAttributes={"level": {"DataType": "String", "StringValue": level}},
    )
    return str(answer["MessageId"])


def yesterday(now: dt.datetime) -> dt.date:
    """The day before `now`, in UTC."""
    return (now.astimezone(dt.UTC) - dt.timedelta(days=1)).date()


def parse_day(text: str) -> dt.date:
    """YYYY-MM-DD. Raises `ConfigError`."""
    try:
        return dt.date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--date {text!r:.40} is not a day; write YYYY-MM-DD") from error
