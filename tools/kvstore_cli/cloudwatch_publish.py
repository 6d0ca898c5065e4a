"""Publishing: numbers of each interval go to CloudWatch by PutMetricData, all of a namespace in one request, or are
printed in the embedded metric format (EMF), which the CloudWatch agent or Fluent Bit turn into metrics.

What could not be sent waits, for an hour at most, and goes with the next interval, under its own time. A value that
CloudWatch refuses is given up, alone. A request that timed out may have arrived, and is sent again all the same: then
CloudWatch has its values twice, which changes no mean, but a sum.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, Protocol

from kvstore.errors import BackendError, ConfigError, PermanentError, TransientError

from .cloudwatch_gpu import Gpu, read_gpus
from .cloudwatch_metrics import Datum, compute
from .cloudwatch_scrape import Endpoint, Interval

__all__ = ["EmfSink", "Publisher", "PutSink", "aws_client"]

logger = logging.getLogger("kvstore.cloudwatch")

_MOST_WAITING = 50_000  # data
_PATIENCE_S = 3600.0
_PER_REQUEST = 500  # CloudWatch takes 1000, and a megabyte

Batch = Sequence[tuple[float, Datum]]
"""Data, each with its time, seconds since the epoch."""


def aws_client(service: str, region: str = "", **more: Any) -> Any:
    """A client of boto3, with bounded time.

    Raises:
        ConfigError: boto3 is not installed, no region is known, or the profile or the credentials make no sense.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, NoRegionError
    except ImportError as error:
        raise ConfigError("kvstore cloudwatch needs boto3: pip install 'kvstore[s3]'", cause=error) from error
    settings = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 3})
    try:
        return boto3.client(service, region_name=region or None, config=settings, **more)
    except BotoCoreError as error:
        hint = " Give --region, or set AWS_REGION." if isinstance(error, NoRegionError) else ""
        raise ConfigError(f"{service}: {error}{hint}", cause=error) from error


_REFUSED = ("InvalidParameter", "MissingParameter", "MissingRequiredParameter", "ValidationE", "InvalidFormat")


class UnreachableError(TransientError):
    """AWS does not answer."""


def aws_call(call: Callable[..., Any], **arguments: Any) -> Any:
    """One call of AWS.

    Raises:
        PermanentError: it makes no sense to AWS, and never will.
        UnreachableError: no answer, or nothing to prove who asks with.
        TransientError: whatever else went wrong: the next one may do.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    from botocore.parsers import ResponseParserError

    try:
        return call(**arguments)
    except ClientError as error:
        found = error.response.get("Error", {})
        what = f"{error.operation_name}: {found.get('Code', 'error')}: {found.get('Message', '')}"
        kind = PermanentError if str(found.get("Code")).startswith(_REFUSED) else TransientError
        raise kind(what[:300], operation="aws", cause=error) from error
    except NoCredentialsError as error:
        what = "no AWS credentials found: AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role give them"
        raise UnreachableError(what, operation="aws", cause=error) from error
    except (BotoCoreError, ResponseParserError) as error:  # the latter: somebody in between answers
        raise UnreachableError(f"AWS cannot be reached: {error}"[:300], operation="aws", cause=error) from error


class PutSink:
    """Sends by PutMetricData, one request per namespace and 500 data.

    Args:
        client: of boto3, for cloudwatch.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._reachable = True

    def send(self, batch: Batch) -> Iterable[tuple[float, Datum]]:
        """Send, and give back what was not.

        Raises nothing: what went wrong is logged.
        """
        failed: list[tuple[float, Datum]] = []
        self._reachable = True
        for namespace in dict.fromkeys(datum.namespace for _, datum in batch):
            some = [pair for pair in batch if pair[1].namespace == namespace]
            for begin in range(0, len(some), _PER_REQUEST):
                failed += self._put(namespace, some[begin : begin + _PER_REQUEST])
        return failed

    def _put(self, namespace: str, part: Batch) -> Batch:
        """Send, and give back what may be sent later. What CloudWatch refuses for ever is given up, alone."""
        if not self._reachable:  # the others need not wait for it as long
            return part
        try:
            aws_call(self._client.put_metric_data, Namespace=namespace, MetricData=[_put(*pair) for pair in part])
        except TransientError as error:
            self._reachable = not isinstance(error, UnreachableError)
            logger.warning("%s: %d values wait: %s", namespace, len(part), error.message)
            return part
        except PermanentError as error:
            if len(part) == 1:
                datum = part[0][1]
                logger.error("%s: %s=%s is given up: %s", namespace, datum.name, [*datum.values], error.message)
                return ()
            half = len(part) // 2
            return [*self._put(namespace, part[:half]), *self._put(namespace, part[half:])]
        return ()


def _put(when: float, datum: Datum) -> dict[str, Any]:
    return {"MetricName": datum.name, "Timestamp": when, "Values": list(datum.values), "Unit": datum.unit}


class EmfSink:
    """Prints one line of the embedded metric format per namespace and interval.
    https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Specification.html
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def send(self, batch: Batch) -> Iterable[tuple[float, Datum]]:
        """Print, and give back what could not be: a disk may be full for a while.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        failed: list[tuple[float, Datum]] = []
        for when, namespace in dict.fromkeys((when, datum.namespace) for when, datum in batch):
            data = [datum for each, datum in batch if (each, datum.namespace) == (when, namespace)]
            line: dict[str, Any] = {
                "_aws": {
                    "Timestamp": int(when * 1000),
                    "CloudWatchMetrics": [
                        {
                            "Namespace": namespace,
                            "Dimensions": [[]],
                            "Metrics": [{"Name": datum.name, "Unit": datum.unit} for datum in data],
                        }
                    ],
                }
            }
            for datum in data:
                line[datum.name] = datum.values[0] if len(datum.values) == 1 else list(datum.values)
            try:
                print(json.dumps(line, separators=(",", ":"), allow_nan=False), file=self._stream, flush=True)
            except BrokenPipeError:
                raise
            except OSError as error:
                logger.warning("%s: %d values wait: %s", namespace, len(data), error.strerror or error)
                failed += [(when, datum) for datum in data]
        return failed


class _Stops(Protocol):
    def wait(self, timeout: float) -> bool: ...


class Publisher:
    """Scrapes, computes, sends.

    Args:
        endpoints: what is scraped.
        sink: where data go; None: nowhere, they are only computed.
        gpu: see `read_gpus`.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        sink: PutSink | EmfSink | None,
        *,
        gpu: str = "auto",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoints = endpoints
        self._sink = sink
        self._gpu = gpu
        self._clock = clock
        self._waiting: deque[tuple[float, Datum]] = deque(maxlen=_MOST_WAITING)
        self._silent: set[str] = set()

    @property
    def waiting(self) -> int:
        """Values that could not be sent."""
        return len(self._waiting)

    @property
    def answering(self) -> int:
        """Endpoints that answered the last time."""
        return len(self._endpoints) - len(self._silent)

    def step(self) -> list[Datum]:
        """End an interval and begin the next: scrape, compute, send. The first one has nothing to count yet; what is
        a value of now (GPUs) it has."""
        interval = Interval()
        for endpoint in self._endpoints:
            try:
                endpoint.advance(interval)
            except BackendError as error:
                if endpoint.url not in self._silent:
                    logger.warning("%s; it is left out until it answers", error.message)
                self._silent.add(endpoint.url)
            else:
                if endpoint.url in self._silent:
                    logger.warning("%s answers again", endpoint.url)
                self._silent.discard(endpoint.url)
        data = compute(interval, self._gpus())
        now = self._clock()
        self._waiting.extend((now, datum) for datum in data)
        self._send(now)
        return data

    def _gpus(self) -> Sequence[Gpu]:
        """None while `nvidia-smi` fails: a driver that is updated must not end the metrics of everything else."""
        try:
            return read_gpus(self._gpu)
        except ConfigError as error:
            logger.warning("%s", error.message)
            return ()

    def _send(self, now: float) -> None:
        batch = [pair for pair in self._waiting if pair[0] >= now - _PATIENCE_S]
        if len(batch) < len(self._waiting):
            logger.warning("%d values are given up: they waited for an hour", len(self._waiting) - len(batch))
        self._waiting.clear()
        if batch and self._sink is not None:
            self._waiting.extend(self._sink.send(batch))

    def run(self, interval: float, stop: _Stops) -> None:
        """Publish every `interval` seconds until `stop.wait` says so; then what happened since the last time."""
        self.step()
        due = time.monotonic() + interval
        while not stop.wait(max(0.0, due - time.monotonic())):
            self.step()
            due = max(due + interval, time.monotonic())
        self.step()
