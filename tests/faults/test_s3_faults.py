"""Every failure between us and S3, each inside the deadline and each named; and that none of them is ever a hit.

Played by `FaultProxy` in front of the null server. Bare backends do not retry (but resume a body that broke); what the
wrappers add is tested in `test_s3_faults_store.py`. Fault numbers are those of the project's list.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status
from kvstore.errors import BackendError, PermanentError, TransientError
from tests.faults.s3_link import (
    BODY,
    BUCKET,
    IMPATIENT,
    OPERATIONS,
    SIZE,
    SLACK_S,
    STALLED_S,
    bad_link,
    begin_with_one_record,
)  # fmt: skip
from tests.servers.fault_proxy import Answer, Cut, Drip, Fault, FaultProxy, IgnoreRange, Link, Run, Silence
from tests.servers.null_server import NullServer
from tests.servers.patience import in_time
from tests.servers.s3_support import data, error_of, get, key, opened, put, soon
from tests.servers.seaweedfs import SeaweedFS

CLIENTS = ("native", "boto3", "aioboto3")


@pytest.fixture
def stored(null_server: NullServer) -> bytes:
    """The record "k"."""
    return begin_with_one_record(null_server)


def refuse(proxy: FaultProxy) -> None:
    proxy.refuse()


def black_hole(proxy: FaultProxy) -> None:
    proxy.black_hole()


def all_get(fault: Fault) -> Callable[[FaultProxy], None]:
    return lambda proxy: proxy.every(fault)


TROUBLE: dict[str, tuple[Callable[[FaultProxy], None], tuple[str, ...]]] = {
    "refused": (refuse, ("connection",)),
    "black hole": (black_hole, ("connect", "deadline", "in time")),
    "silence": (all_get(Silence()), ("silent", "silence", "deadline", "answer")),
    "reset before the answer": (all_get(Cut("rst", after=None)), ("connection", "closed", "reset")),
    "closed before the answer": (all_get(Cut("fin", after=None)), ("connection", "closed")),
    "throttled": (all_get(Answer(503, "SlowDown")), ("503",)),
    "too many requests": (all_get(Answer(429, "TooManyRequests")), ("429",)),
    "internal error": (all_get(Answer(500, "InternalError")), ("500",)),
}


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_trouble_ends_each_call_in_time_and_by_name(
    null_proxy: FaultProxy, stored: bytes, operation: str, trouble: str
) -> None:
    begin, names = TROUBLE[trouble]
    with bad_link(null_proxy, lanes=2, meta_lanes=2, **IMPATIENT) as backend:
        begin(null_proxy)
        outcome = in_time(lambda: OPERATIONS[operation](backend, 0.5), 0.5 + SLACK_S)
        error = error_of(outcome, TransientError)
        assert any(name in str(error).lower() for name in names), str(error)


@pytest.mark.parametrize("trouble", ["refused", "black hole", "silence"])
@pytest.mark.parametrize("client", CLIENTS[1:])
def test_stock_clients_keep_to_the_deadline_too(
    null_proxy: FaultProxy, stored: bytes, client: str, trouble: str
) -> None:
    begin, _ = TROUBLE[trouble]
    with bad_link(null_proxy, client=client) as backend:
        begin(null_proxy)
        for operation in ("stat", "get", "put"):
            outcome = in_time(lambda call=OPERATIONS[operation]: call(backend, 0.4), 0.4 + SLACK_S)  # type: ignore[misc]
            error_of(outcome, TransientError)
        null_proxy.recover()  # what still waits ends now


def test_one_byte_at_a_time_does_not_outlive_the_deadline(null_proxy: FaultProxy, stored: bytes) -> None:
    with bad_link(null_proxy) as backend:
        null_proxy.every(Drip(1, 0.05))
        outcome, _ = in_time(lambda: get(backend, "k", SIZE, seconds=0.6), 0.6 + SLACK_S)
        error_of(outcome, TransientError, "deadline")


# Bodies that break.


_CUTS = [("native", how, after) for how in ("rst", "fin", "stall") for after in (0, SIZE // 2, SIZE - 1)]
_CUTS += [(client, how, SIZE // 2) for client in CLIENTS[1:] for how in ("rst", "fin")]


@pytest.mark.parametrize(("client", "how", "after"), _CUTS)
def test_a_body_that_broke_once_is_resumed_where_it_broke(
    null_proxy: FaultProxy, stored: bytes, client: str, how: Any, after: int
) -> None:
    with bad_link(null_proxy, client=client, read_timeout=STALLED_S if how == "stall" else 10.0) as backend:
        null_proxy.next(Cut(how, after=after), only="GET")
        assert get(backend, "k", SIZE) == (Outcome(Status.OK, SIZE), stored)
        assert null_proxy.pending == 0
        assert null_proxy.count("GET") == 2
        again = next(r for r in reversed(null_proxy.requests) if r.method == "GET")
        if client == "native" and how != "rst":  # a reset may take bytes with it that had arrived
            assert again.headers["range"] == f"bytes={after}-{SIZE - 1}"
        assert "if-match" in again.headers, "from the same version"


_AGAIN = [("native", "rst"), ("native", "fin"), ("native", "stall"), ("boto3", "rst"), ("aioboto3", "fin")]


@pytest.mark.parametrize(("client", "how"), _AGAIN)
def test_a_body_that_breaks_again_and_again_is_an_error(
    null_proxy: FaultProxy, stored: bytes, client: str, how: Any
) -> None:
    with bad_link(null_proxy, client=client, **IMPATIENT) as backend:
        null_proxy.every(Cut(how, after=1000), only="GET")
        outcome, _ = get(backend, "k", SIZE, seconds=3.0)
        error_of(outcome, TransientError)
        assert null_proxy.count("GET") <= 5, "it is given up"


def test_of_a_batch_only_the_record_with_the_broken_body_is_missing(null_proxy: FaultProxy, stored: bytes) -> None:
    """Fault 1."""
    with bad_link(null_proxy) as backend:
        for number in range(4):
            put(backend, f"batch {number}", data(50_000, number))
        broken = key("batch 2").hex()
        null_proxy.every(Cut("rst", after=100), match=lambda r: r.method == "GET" and broken in r.target)
        memory = [bytearray(b"\xa5") * 50_000 for _ in range(4)]
        reads = [Read(key(f"batch {n}"), memoryview(dst)) for n, dst in enumerate(memory)]
        outcomes = backend.get_into(reads, deadline=soon(5))
        assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK, Status.ERROR, Status.OK]
        for number in (0, 1, 3):
            assert memory[number] == data(50_000, number)


# Fault 27: versions.


@pytest.mark.parametrize("client", CLIENTS)
def test_a_record_replaced_between_two_ranges_is_never_mixed(
    null_proxy: FaultProxy, null_server: NullServer, stored: bytes, client: str
) -> None:
    other = data(SIZE, "another version")
    with opened(null_server.endpoint, BUCKET, conditional_writes="on", miss_memory=0.0) as direct:

        def replace() -> None:
            direct.delete([key("k")], deadline=soon())
            assert put(direct, "k", other).status is Status.OK

        for place in (1, 3, 5):
            replace_back = put(direct, "k", stored)
            assert replace_back.stored
            with bad_link(null_proxy, client=client, part_size=64 << 10, part_adapt=False, lanes=2) as backend:
                null_proxy.next(*[Link()] * place, Run(replace), only="GET")
                outcome, brought = get(backend, "k", SIZE)
                assert outcome.status is not Status.OK or brought in (stored, other)
                null_proxy.clear()
            direct.delete([key("k")], deadline=soon())


def test_a_record_replaced_while_a_body_is_resumed_is_never_mixed(
    null_proxy: FaultProxy, null_server: NullServer, stored: bytes
) -> None:
    with opened(null_server.endpoint, BUCKET, conditional_writes="on", miss_memory=0.0) as direct:

        def replace() -> None:
            direct.delete([key("k")], deadline=soon())
            put(direct, "k", data(SIZE, "other"))

        with bad_link(null_proxy) as backend:
            null_proxy.next(Cut("fin", after=1000), Run(replace), only="GET")
            assert get(backend, "k", SIZE)[0].status is Status.MISS


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_ignores_ranges(null_proxy: FaultProxy, stored: bytes, client: str) -> None:
    with bad_link(null_proxy, client=client) as backend:
        null_proxy.every(IgnoreRange(), only="GET")
        assert get(backend, "k", 1000, 5000) == (Outcome(Status.OK, 1000), stored[5000:6000])
        assert get(backend, "k", 1000, SIZE - 10) == (Outcome(Status.OK, 10), stored[-10:])
        assert get(backend, "k", SIZE) == (Outcome(Status.OK, SIZE), stored)
        null_proxy.clear()
        assert get(backend, "k", SIZE) == (Outcome(Status.OK, SIZE), stored)


# Writes.


@pytest.mark.parametrize("how", ["rst", "stall"])
def test_a_put_cut_on_the_way_leaves_nothing_and_can_be_repeated(
    null_proxy: FaultProxy, stored: bytes, how: Any
) -> None:
    with bad_link(null_proxy, read_timeout=STALLED_S) as backend:
        null_proxy.next(Cut(how, after=SIZE // 2, where="request"), only="PUT")
        error_of(put(backend, "new", BODY), TransientError)
        assert get(backend, "new", SIZE)[0].status is Status.MISS
        assert put(backend, "new", BODY) == Outcome(Status.OK, SIZE)


def test_a_put_whose_answer_is_lost_was_stored_and_says_so_when_repeated(null_proxy: FaultProxy, stored: bytes) -> None:
    with bad_link(null_proxy) as backend:
        null_proxy.next(Cut("rst", after=None), only="PUT")
        error_of(put(backend, "new", BODY), TransientError)
        assert put(backend, "new", BODY).status is Status.EXISTS
        assert get(backend, "new", SIZE) == (Outcome(Status.OK, SIZE), BODY)


def test_a_part_that_fails_aborts_the_upload(seaweedfs: SeaweedFS, s3_bucket: str, s3_proxy: FaultProxy) -> None:
    body = data(11 << 20)
    with opened(
        s3_proxy.endpoint, s3_bucket, multipart_size=5 << 20, write_part_size=5 << 20, read_timeout=10.0
    ) as backend:
        s3_proxy.next(Answer(500, "InternalError"), match=lambda r: r.method == "PUT" and "partNumber=2" in r.target)
        error_of(put(backend, "parts", body), TransientError, "500")
        client = seaweedfs.client()
        end = time.monotonic() + 5
        while client.list_multipart_uploads(Bucket=s3_bucket).get("Uploads") and time.monotonic() < end:
            time.sleep(0.02)
        assert not client.list_multipart_uploads(Bucket=s3_bucket).get("Uploads")
        client.close()
        assert get(backend, "parts", 10)[0].status is Status.MISS
        assert put(backend, "parts", body) == Outcome(Status.OK, len(body))


def test_an_error_in_a_200_is_an_error(null_proxy: FaultProxy, stored: bytes) -> None:
    """CompleteMultipartUpload and CopyObject may fail after the status line was sent."""
    failure = Answer(200, "InternalError")
    with bad_link(null_proxy, multipart_size=5 << 20, write_part_size=5 << 20) as backend:
        null_proxy.every(failure, match=lambda r: r.method == "POST" and "uploadId=" in r.target)
        assert put(backend, "large", data(6 << 20)).status is Status.ERROR
        assert get(backend, "large", 10)[0].status is Status.MISS
        get(backend, "k", SIZE)
        null_proxy.every(failure, match=lambda r: "x-amz-copy-source" in r.headers)
        assert backend.quarantine([key("k")], deadline=soon())[0].status is Status.ERROR
        assert get(backend, "k", SIZE) == (Outcome(Status.OK, SIZE), stored), "not deleted without its copy"


# What is permanent is asked once, and says what to do.


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(403, "RequestTimeTooSkewed"), ("clock",)),
        (Answer(403, "AccessDenied"), ("access denied", "s3:ListBucket")),
        (Answer(403, "SignatureDoesNotMatch", message="StringToSign testsecret"), ("secret key",)),
        (Answer(403, "InvalidAccessKeyId"), ("access key",)),
        (Answer(404, "NoSuchBucket"), ("no bucket faults",)),
        (Answer(400, "InvalidArgument"), ("400", "InvalidArgument")),
        (
            Answer(
                400, "AuthorizationHeaderMalformed",
                body=b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>",
            ),
            ("eu-west-1",),
        ),
    ],
    ids=lambda value: value.code if isinstance(value, Answer) else "",
)  # fmt: skip
def test_what_is_permanent_is_named_and_not_repeated(
    null_proxy: FaultProxy, stored: bytes, answer: Answer, said: tuple[str, ...]
) -> None:
    with bad_link(null_proxy) as backend:
        null_proxy.every(answer)
        for operation in ("get", "put"):
            before = null_proxy.count()
            error_of(OPERATIONS[operation](backend, 2.0), PermanentError, *said)
            assert null_proxy.count() - before <= 2, "at most once more, for credentials or a region that has changed"


def test_a_redirect_to_another_region_ends_in_time(null_proxy: FaultProxy, stored: bytes) -> None:
    redirect = Answer(301, "PermanentRedirect", (("x-amz-bucket-region", "eu-west-1"),))
    with bad_link(null_proxy) as backend:
        null_proxy.every(redirect)
        error = error_of(get(backend, "k", SIZE, seconds=20.0)[0], BackendError)
        assert "eu-west-1" in str(error) or "eu-west-1" in repr(error.cause)


def test_a_name_that_does_not_resolve_is_named() -> None:
    with opened("http://no-such-host.invalid:9", "bucket") as backend:
        outcome, _ = in_time(lambda: get(backend, "k", 10, seconds=2.0), 2.0 + SLACK_S)
        error = error_of(outcome, TransientError)
        assert "no-such-host.invalid" in str(error)
