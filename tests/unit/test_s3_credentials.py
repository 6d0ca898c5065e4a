"""Credentials: refreshed once for all lanes and never past a deadline, fetched anew when the service says that they
have expired or when there were none, and named when there are none."""

from __future__ import annotations

import datetime
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import RefreshableCredentials

from kvstore.backend import Outcome, Read, Status
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.credentials import Gate, Session
from kvstore_backends.s3.http import LinkError
from kvstore_backends.s3.native import NativeClient
from kvstore_backends.s3.session import make_session
from tests.s3_support import SECRET_KEY, Asked, Raw, ScriptedServer, answer, error_answer, open_s3, range_of, settings

DATA = bytes(range(256)) * 16
CLIENTS = ("native", "boto3", "aioboto3")
NO_CHAIN = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def get(backend: S3Backend, seconds: float = 30.0) -> Outcome:
    (outcome,) = backend.get_into([Read(key("k"), memoryview(bytearray(10)))], deadline=soon(seconds))
    return outcome


def failure(outcome: Outcome, kind: type[KVStoreError] = KVStoreError) -> str:
    assert isinstance(outcome.error, kind), outcome
    assert SECRET_KEY not in str(outcome.error) + repr(outcome.error)
    return str(outcome.error)


def serving(asked: Asked) -> Raw:
    return range_of(asked, DATA) if asked.method == "GET" else answer(200, etag='"v1"')


class Expiring:
    """A source of temporary credentials, the first of which end after `seconds`."""

    def __init__(self, seconds: float, life: float = 3600.0) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.release = threading.Event()
        self.release.set()
        self._life = life
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        self.credentials = RefreshableCredentials("old", "o", "t", until, self._refresh, "test")

    def _refresh(self) -> dict[str, str]:
        self.asked += 1
        assert self.release.wait(60)
        if self.error is not None:
            raise self.error
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self._life)
        return {"access_key": "new", "secret_key": "n", "token": "t", "expiry_time": until.isoformat()}


class Chain:
    """A provider chain that knows one thing."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked = 0

    def load_credentials(self) -> Any:
        self.asked += 1
        return self.found


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """What the standard chain finds from now on."""
    made = Chain(None)

    def with_chain(settings: Any) -> Any:
        session = make_session(settings)
        session.register_component("credential_provider", made)
        return session

    monkeypatch.setattr("kvstore_backends.s3.native.make_session", with_chain)
    return made


def from_chain(server: ScriptedServer, **options: Any) -> S3Backend:
    return open_s3(server.endpoint, access_key_id=None, secret_access_key=None, **options)


def run_together(count: int, work: Callable[[], None]) -> None:
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait(60)
        work()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def join_refreshes() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvstore-s3-credentials":
            thread.join(60)


# The gate.


def test_credentials_that_expire_amid_64_lanes_are_refreshed_once(chain: Chain) -> None:
    source = Expiring(-1)
    chain.found = source.credentials
    with ScriptedServer(serving) as server:
        backend = from_chain(server, lanes=4)
        outcomes: list[Outcome] = []
        run_together(64, lambda: outcomes.append(get(backend)))
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 64
        assert source.asked == 1
        assert all("Credential=new/" in asked.headers["authorization"] for asked in server.asked)
        backend.close()


def test_a_refresh_that_hangs_costs_no_more_than_the_deadline() -> None:
    source = Expiring(-1)
    source.release.clear()
    until = [time.monotonic() + 0.05]
    gate = Gate(source.credentials, lambda: until[0])
    begin = time.monotonic()
    with pytest.raises(LinkError, match="refreshed"):
        gate.get_frozen_credentials()
    assert time.monotonic() - begin < 5.0
    until[0] = soon()
    source.release.set()
    assert gate.get_frozen_credentials().access_key == "new"
    assert source.asked == 1


def test_valid_credentials_are_used_while_new_ones_are_fetched() -> None:
    source = Expiring(300)  # botocore would have a lane fetch new ones now, and the others wait for it
    source.release.clear()
    gate = Gate(source.credentials, soon)
    for _ in range(10):
        assert gate.get_frozen_credentials().access_key == "old"
    source.release.set()
    join_refreshes()
    assert gate.get_frozen_credentials().access_key == "new"


def test_a_refresh_that_fails_is_not_repeated_at_once_and_never_in_a_lane() -> None:
    """botocore's lanes would each ask the source themselves, with its timeouts, past any deadline."""
    source = Expiring(300)
    source.error = OSError("no answer")
    asking: set[str] = set()
    refresh = source.credentials._refresh_using

    def seen() -> Any:
        asking.add(threading.current_thread().name)
        return refresh()

    source.credentials._refresh_using = seen
    gate = Gate(source.credentials, soon)
    for _ in range(20):
        assert gate.get_frozen_credentials().access_key == "old"
        join_refreshes()
    assert gate.refreshes == source.asked == 1
    assert asking == {"kvstore-s3-credentials"}


def test_what_the_source_says_is_raised_when_nothing_valid_is_left_and_asked_again() -> None:
    source = Expiring(-1)
    source.error = OSError("no answer")
    gate = Gate(source.credentials, soon)
    for _ in range(2):
        with pytest.raises(OSError, match="no answer"):
            gate.get_frozen_credentials()
    source.error = None
    assert gate.get_frozen_credentials().access_key == "new"
    assert source.asked == 3


def test_credentials_that_last_cost_nothing() -> None:
    source = Expiring(7200)
    gate = Gate(source.credentials, soon)
    for _ in range(5):
        assert gate.get_frozen_credentials().secret_key == "o"
    assert (gate.refreshes, source.asked) == (0, 0)


def test_a_session_lives_by_the_clock_of_the_service() -> None:
    """Ours may be wrong by hours."""
    begin = datetime.datetime(2031, 5, 1, tzinfo=datetime.UTC)
    made: list[int] = []
    going_on = threading.Event()
    going_on.set()

    def create() -> dict[str, Any]:
        assert going_on.wait(60)
        made.append(1)
        keys = {"AccessKeyId": f"A{len(made)}", "SecretAccessKey": "s", "SessionToken": "t"}
        return {
            "Credentials": {**keys, "Expiration": begin + datetime.timedelta(seconds=300)},
            "ResponseMetadata": {"HTTPHeaders": {"date": "Thu, 01 May 2031 00:00:00 GMT"}},
        }

    session = Session(create)
    gate = Gate(session, soon, early=60.0)
    for _ in range(3):
        assert gate.get_frozen_credentials().access_key == "A1"
    assert session.refresh_needed(301)
    assert not session.refresh_needed(200)
    gate._tried_at = -1e9
    session._ends = time.monotonic() + 30  # time has passed: it still signs, and the next one is fetched
    going_on.clear()
    assert gate.get_frozen_credentials().access_key == "A1"
    going_on.set()
    join_refreshes()
    assert gate.get_frozen_credentials().access_key == "A2"
    assert len(made) == 2


# The service says that they have expired.


@pytest.mark.parametrize("operation", ["get", "stat"])
@pytest.mark.parametrize("client", CLIENTS)
def test_expired_tokens_are_renewed_once_for_all_lanes(client: str, operation: str) -> None:
    """The service refuses the old token; the chain is asked once more, and every lane tries once more. The answer to a
    HEAD has no code, so a GET asks for the reason."""
    expired = [True]

    def script(asked: Asked) -> Raw:
        if expired[0]:
            return answer(400) if asked.method == "HEAD" else error_answer(400, "ExpiredToken")
        return serving(asked)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, client=client, lanes=4)
        reopened: list[int] = []
        reopen = backend.client.reopen

        def counted() -> None:
            reopened.append(1)
            reopen()
            expired[0] = False

        backend.client.reopen = counted  # type: ignore[method-assign]
        outcomes: list[Outcome] = []
        call = get if operation == "get" else lambda backend: backend.stat([key("k")], deadline=soon())[0]
        run_together(16, lambda: outcomes.append(call(backend)))
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 16
        assert len(reopened) == 1
        asked = [asked.method for asked in server.asked]
        assert asked.count("GET") <= (32 if operation == "get" else 1)
        assert asked.count("HEAD") <= 48, "botocore asks once more, for the bucket's region, after each 400 to a HEAD"
        backend.close()


def test_tokens_that_stay_expired_are_an_error_after_one_more_try() -> None:
    with ScriptedServer(lambda asked: error_answer(400, "ExpiredToken")) as server:
        backend = open_s3(server.endpoint)
        assert "have expired" in failure(get(backend), PermanentError)
        assert len(server.asked) == 2
        get(backend)
        assert len(server.asked) == 3, "the source is not asked again within seconds"
        backend.close()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("code", "said"),
    [("RequestTimeTooSkewed", "clock"), ("AccessDenied", "s3:ListBucket"), ("SignatureDoesNotMatch", "secret key")],
)
def test_a_refused_head_names_the_reason_which_is_asked_once_for_many(client: str, code: str, said: str) -> None:
    with ScriptedServer(lambda asked: answer(403) if asked.method == "HEAD" else error_answer(403, code)) as server:
        backend = open_s3(server.endpoint, client=client, hedge_reads=False)
        outcomes = backend.stat([key(number) for number in range(40)], deadline=soon())
        assert all(said in failure(outcome, PermanentError) for outcome in outcomes)
        assert sum(asked.method == "HEAD" for asked in server.asked) == 40
        assert sum(asked.method == "GET" for asked in server.asked) <= 2
        backend.close()


# None at all.


def forget_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NO_CHAIN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


@pytest.mark.parametrize("client", CLIENTS)
def test_no_credentials_at_all(client: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_credentials(monkeypatch, tmp_path)
    with ScriptedServer(serving) as server:
        backend = from_chain(server, client=client)
        assert "no credentials were found" in failure(get(backend), PermanentError)
        assert not server.asked
        backend.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_credentials_that_come_later_are_found(client: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that starts before its pod has an identity need not be restarted."""
    forget_credentials(monkeypatch, tmp_path)
    with ScriptedServer(serving) as server:
        backend = from_chain(server, client=client)
        assert "no credentials were found" in failure(get(backend))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "late")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        backend.client._renewed_at = -1e9  # seconds later
        assert get(backend).status is Status.OK
        assert "Credential=late/" in server.asked[-1].headers["authorization"]
        backend.close()


@pytest.mark.parametrize("client", ["native", "boto3"])
def test_a_configuration_that_makes_no_sense_is_refused_at_open(
    client: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget_credentials(monkeypatch, tmp_path)
    for profile, said in (("nobody", "nobody"), ("broken", "credentials could not be fetched from custom-process")):
        config = tmp_path / "config"
        config.write_text("[profile broken]\ncredential_process = false hunter2\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        with pytest.raises(ConfigError, match=said) as caught:
            S3Backend(settings("http://127.0.0.1:9", client=client, profile=profile, access_key_id=None,
                               secret_access_key=None))  # fmt: skip
        assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half a pair")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        S3Backend(settings("http://127.0.0.1:9", client=client, access_key_id=None, secret_access_key=None))


def test_a_source_that_is_slow_costs_each_call_its_deadline(chain: Chain) -> None:
    source = Expiring(-1)
    source.release.clear()
    chain.found = source.credentials
    with ScriptedServer(serving) as server:
        backend = from_chain(server)
        client = backend.client
        assert isinstance(client, NativeClient)
        begin = time.monotonic()
        outcomes: list[Outcome] = []
        run_together(8, lambda: outcomes.append(get(backend, 0.2)))
        assert time.monotonic() - begin < 10.0
        assert all("credentials were being refreshed" in failure(outcome, TransientError) for outcome in outcomes)
        assert not server.asked
        source.release.set()
        assert get(backend).status is Status.OK
        assert source.asked == 1
        backend.close()
