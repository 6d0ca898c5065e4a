"""`kvstore cloudwatch`: what CloudWatch is told, and asked.

    kvstore cloudwatch publish --node http://127.0.0.1:7180 --scrape http://127.0.0.1:8000/metrics
    kvstore cloudwatch queries [NAME]
    kvstore cloudwatch costs --project kv-prod --topic arn:aws:sns:…

Exit status: 0 · 1 AWS, or all that was to be scraped, did not answer · 2 the command line makes no sense.
docs/metrics.md says what each metric is computed from.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from kvstore.errors import BackendError, ConfigError
from kvstore.options import parse_duration

from .cloudwatch_costs import alert, parse_day, read_costs, yesterday
from .cloudwatch_gpu import SOURCES, read_gpus
from .cloudwatch_metrics import Datum
from .cloudwatch_publish import EmfSink, Publisher, PutSink, aws_client
from .cloudwatch_scrape import Endpoint
from .output import check_targets, print_table, write_json
from .signals import stop_on_signals

__all__ = ["cloudwatch", "find_queries"]

_MOST_TOKEN_BYTES = 4096


@click.group()
def cloudwatch() -> None:
    """Metrics for CloudWatch, queries of Logs Insights, the daily cost report."""


# publish


@cloudwatch.command()
@click.option(
    "--node", "nodes", multiple=True, metavar="URL",
    help="Address of a kvstore daemon, http://127.0.0.1:7180. May be given several times.",
)  # fmt: skip
@click.option("--token-file", default="", metavar="FILE", help="Bearer token for --node; nobody else is sent it.")
@click.option(
    "--scrape", "urls", multiple=True, metavar="URL",
    help="Other addresses of metrics: an engine's, the DCGM exporter's. May be given several times.",
)  # fmt: skip
@click.option("--interval", default="60s", metavar="DURATION", help="Seconds between scrapes. Default: 60s.")
@click.option("--once", is_flag=True, help="One interval, then end.")
@click.option("--emf", is_flag=True, help="Print the embedded metric format instead of calling AWS.")
@click.option("--dry-run", is_flag=True, help="Compute and print, publish nothing; implies --once.")
@click.option("--gpu", default="auto", type=click.Choice(SOURCES), help="Where GPUs are read from. Default: auto.")
@click.option("--region", default="", help="Of CloudWatch; default: AWS_REGION, or the profile's.")
@click.option("--json", "as_json", default="", metavar="FILE", help="With --once: what was published; - is stdout.")
def publish(
    nodes: tuple[str, ...], token_file: str, urls: tuple[str, ...], interval: str, once: bool, emf: bool,
    dry_run: bool, gpu: str, region: str, as_json: str,
) -> int:  # fmt: skip
    """Publish metrics of nodes and engines to CloudWatch until SIGTERM."""
    once = once or dry_run
    seconds = parse_duration(interval, name="interval")
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--interval {interval} is out of range; it must be 1s to 1h")
    if as_json and not once:
        raise ConfigError("--json tells what one interval gave; give --once as well")
    if emf and as_json == "-":
        raise ConfigError("--emf and --json - cannot both go to standard output; name a file for --json")
    check_targets(as_json)
    token = _read_token(token_file)
    if not nodes and not urls:
        raise ConfigError("nothing is to be read: name a --node or a --scrape address")
    endpoints = [*(Endpoint(url, token=token) for url in nodes), *map(Endpoint, urls)]
    read_gpus(gpu)  # what is asked for and is not there is said at once
    sink: PutSink | EmfSink | None = EmfSink(sys.stdout) if emf else None
    if not emf and not dry_run:
        sink = PutSink(aws_client("cloudwatch", region))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    publisher = Publisher(endpoints, sink, gpu=gpu)
    with stop_on_signals() as stop:
        if not once:
            publisher.run(seconds, stop)
            return 1 if publisher.waiting else 0
        publisher.step()
        print(f"kvstore: measuring for {seconds:g} s", file=sys.stderr, flush=True)
        stop.wait(seconds)
        data = publisher.step()
    if not data and publisher.answering:  # otherwise the log says who does not answer
        print("kvstore: nothing was asked for in this interval", file=sys.stderr)
    if as_json:
        write_json([_shown(datum) for datum in data], as_json)
    if data and as_json != "-" and not emf:
        _print(data)
    return 1 if not publisher.answering or (sink is not None and publisher.waiting) else 0


def _shown(datum: Datum) -> dict[str, Any]:
    return {
        "namespace": datum.namespace, "name": datum.name, "values": list(datum.values), "unit": datum.unit,
        "from": datum.source,
    }  # fmt: skip


def _print(data: list[Datum]) -> None:
    rows = [
        (datum.namespace, datum.name, ", ".join(f"{value:.4g}" for value in datum.values), datum.unit, datum.source)
        for datum in data
    ]
    print_table(("namespace", "metric", "value", "unit", "from"), rows, text=(0, 1, 3, 4))


def _read_token(path: str) -> str:
    if not path:
        return ""
    try:
        text = Path(path).read_bytes()[: _MOST_TOKEN_BYTES + 1].decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}", cause=error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--token-file {path}: the token is not ASCII text") from error
    if not text or len(text) > _MOST_TOKEN_BYTES or not text.isprintable() or " " in text:
        raise ConfigError(f"--token-file {path}: it holds no token of 1 to {_MOST_TOKEN_BYTES} characters")
    return text


# queries


def find_queries() -> Mapping[str, Path]:
    """The queries of Logs Insights by name: one file each, `NAME.query`, those that terraform/ saves too.

    Raises:
        ConfigError: they are not installed.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "queries", here.parents[2] / "terraform" / "modules" / "observability" / "queries"):
        found = {path.stem: path for path in sorted(folder.glob("*.query"))}
        if found:
            return found
    raise ConfigError("the queries are not installed; they are in terraform/modules/observability/queries")


@cloudwatch.command()
@click.argument("name", default="")
@click.option("--field-prefix", default="", help="Before each field's name: log_processed. for lines of pods.")
@click.option("--json", "as_json", default="", metavar="FILE", help="All of them, by name; - is standard output.")
def queries(name: str, field_prefix: str, as_json: str) -> int:
    """List the queries of Logs Insights, or print one: aws logs start-query --query-string "$(…)"."""
    check_targets(as_json)
    found = {each: prefixed(path.read_text(encoding="utf-8"), field_prefix) for each, path in find_queries().items()}
    if name and name not in found:
        raise ConfigError(f"there is no query {name!r:.60}; choices: {', '.join(found)}")
    shown = {name: found[name]} if name else found
    if as_json:
        write_json(shown, as_json)
    elif name:
        click.echo(found[name], nl=False)
    else:
        for each in found:
            click.echo(each)
    return 0


FIELDS = (
    "ttft_ms", "itl_ms", "recompute_ratio", "compression_ratio", "cache_size_bytes", "encoded_size_bytes",
    "tokens_saved", "input_tokens", "output_tokens", "model_name",
)  # fmt: skip
"""Fields of log lines that queries read."""


def prefixed(query: str, prefix: str) -> str:
    """A query whose fields have something before their names, as terraform's `log_field_prefix`."""
    import re

    return re.sub(rf"\b({'|'.join(FIELDS)})\b", lambda found: prefix + found[1], query) if prefix else query


# costs


@cloudwatch.command()
@click.option("--project", default="", help="Value of the tag Project: what terraform/ gives every resource.")
@click.option("--service", default="", help="Value of the tag Service.")
@click.option("--account", is_flag=True, help="The whole account, whatever its tags.")
@click.option("--date", "day", default="", metavar="YYYY-MM-DD", help="Default: yesterday, in UTC.")
@click.option("--warning", default=100.0, metavar="AMOUNT", help="A day's cost to warn of. Default: 100.")
@click.option("--critical", default=500.0, metavar="AMOUNT", help="… and to cry of. Default: 500.")
@click.option("--topic", default="", metavar="ARN", help="SNS topic that is told when a threshold was passed.")
@click.option("--region", default="", help="Of the topic; default: that in its ARN.")
@click.option("--json", "as_json", default="", metavar="FILE", help="The report; - is standard output.")
def costs(
    project: str, service: str, account: bool, day: str, warning: float, critical: float, topic: str, region: str,
    as_json: str,
) -> int:  # fmt: skip
    """Report what a project cost yesterday, by service; run it once a day (cron, EventBridge)."""
    check_targets(as_json)
    tags = {name: value for name, value in (("Project", project), ("Service", service)) if value}
    if bool(tags) == account:
        raise ConfigError("name --project, --service or both; or --account for everything that the account pays")
    if not 0 <= warning <= critical < float("inf"):
        raise ConfigError(f"--warning {warning:g} must lie between 0 and --critical {critical:g}")
    if topic and (len(topic.split(":")) != 6 or not topic.startswith("arn:")):
        raise ConfigError(f"--topic {topic!r:.80} is not the ARN of an SNS topic")
    when = parse_day(day) if day else yesterday(dt.datetime.now(dt.UTC))
    limits = Decimal(str(warning)), Decimal(str(critical))
    try:
        report = read_costs(aws_client("ce", os.environ.get("AWS_REGION", "us-east-1")), when, tags)
    except BackendError as error:
        print(f"kvstore: {error.message}", file=sys.stderr)
        return 1
    message = ""
    status = 0
    if topic:
        try:
            message = alert(aws_client("sns", region or topic.split(":")[3]), topic, report, *limits)
        except BackendError as error:  # the report is shown all the same
            print(f"kvstore: nobody was told: {error.message}", file=sys.stderr)
            status = 1
    if as_json:
        write_json(
            {
                "day": report.day.isoformat(), "tags": dict(report.tags), "total": float(report.total),
                "currency": report.currency, "estimated": report.estimated, "level": report.level(*limits),
                "services": {name: float(cost) for name, cost in report.services}, "message": message,
            },
            as_json,
        )  # fmt: skip
    if as_json != "-":
        print(report.text(*limits))
    return status
