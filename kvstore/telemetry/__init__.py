"""What can be seen of kvstore from outside: numbers for Prometheus, the last hour, traces, and log lines.

* `exposition(*sources)`: the text that a daemon answers to GET /metrics, and `CONTENT_TYPE`, its content type. A source
  is a `kvstore.metrics.Metrics` (hooks given to `Metrics.before_snapshot` fill gauges when it is read), or a function
  that gives such a snapshot.
* `node_source(node.stats, instance.usage)`: what a node counts, as such a source.
* `History(*sources)`: the last hour by minutes: hits, saved seconds, bytes, errors; what the page draws. `tick()` it
  every second or so; it does something once a minute.
* `open_tracer(mode)`: spans, one for each batch and one for each of its jobs on a lane; None if they are off.
* `configure_logs(...)`: one JSON object a line, with the id of the request that `request_scope(id)` says it is about.
* `RequestReport` and `report_request`: what an engine (or whoever knows it) says of one finished request: TTFT, tokens,
  hits. It becomes metrics, and the log lines with the markers `kv_cache_hit` and `token_usage`.

`prometheus_client` and `opentelemetry` are imported when they are used; without them: `ConfigError`, with what to
install.
"""

from __future__ import annotations

from .history import History, Minute
from .logs import configure_logs, current_request_id, request_scope
from .node import node_source
from .prometheus import CONTENT_TYPE, Source, exposition
from .requests import RequestReport, report_request
from .tracing import Tracer, open_tracer

__all__ = [
    "CONTENT_TYPE",
    "History",
    "Minute",
    "RequestReport",
    "Source",
    "Tracer",
    "configure_logs",
    "current_request_id",
    "exposition",
    "node_source",
    "open_tracer",
    "report_request",
    "request_scope",
]
