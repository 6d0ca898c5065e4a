"""What tests of `kvstore cloudwatch` share: engines' and GPUs' metrics, a place that answers with them, AWS by moto."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from moto import mock_aws

# What vLLM 0.32 answers with, as far as it is read.
VLLM = """
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total{{engine="0",model_name="m"}} {external_queries}
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} {external_hits}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="m"}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5",model_name="m"}} {all}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {all}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {seconds}
"""
NONE = dict.fromkeys(("queries", "hits", "external_queries", "external_hits", "fast", "all", "seconds"), 0)
DCGM = """
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="a"}} {busy}
DCGM_FI_DEV_GPU_UTIL{{gpu="1",UUID="b"}} 50
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{gpu="0",UUID="a"}} 60
DCGM_FI_DEV_FB_USED{{gpu="1",UUID="b"}} 20
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{{gpu="0",UUID="a"}} 20
DCGM_FI_DEV_FB_FREE{{gpu="1",UUID="b"}} 60
"""


class Place:
    """Something that answers at /metrics."""

    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answered = 0  # `text` may change: what it was is sent
        place = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                place.headers.append({name.lower(): value for name, value in self.headers.items()})
                if place.status == 302:
                    self.send_response(302)
                    self.send_header("Location", "http://127.0.0.1:1/metrics")
                    self.end_headers()
                    return
                place.paths.append(self.path)
                body = place.text.encode()
                self.send_response(place.status if self.path.partition("?")[0] == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                place.answered += 1

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)


@contextlib.contextmanager
def pretended_aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AWS is moto, with credentials that are none."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    with mock_aws():
        yield
