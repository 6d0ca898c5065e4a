"""terraform/small applied against a moto server: its buckets, keys, roles and policies are really made there. Then
kvstore puts and gets by the `remote_url` and the configuration that came out; only the endpoint is added, moto's."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

import kvstore
from tests.s3_support import ACCESS_KEY, SECRET_KEY, moto_server
from tests.terraform.support import HERE, TERRAFORM, environment, load, outputs
from tests.terraform.test_root_config import assert_configuration, variables_of


class Applied:
    """What is there after the apply.

    Attributes:
        endpoint: of the moto server.
        state: Terraform's.
        outputs: name to value.
        policy: of the bucket, as the emulator took it.
        stored: what nodes read from Secrets Manager.
    """

    def __init__(self, endpoint: str, state: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.state = state
        self.outputs = outputs(state)
        # moto reads no conditions: it takes "deny what is not TLS" for "deny". So it is looked at, and put away.
        with self.client("s3") as s3:
            self.policy = json.loads(s3.get_bucket_policy(Bucket=self.outputs["bucket"])["Policy"])
            s3.delete_bucket_policy(Bucket=self.outputs["bucket"])
        with self.client("secretsmanager") as manager:
            answer = manager.get_secret_value(SecretId=self.outputs["config_secret_arn"])
            self.stored = json.loads(answer["SecretString"])

    def at_endpoint(self, url: str) -> str:
        return f"{url}&endpoint_url={self.endpoint}&addressing=path"

    @contextlib.contextmanager
    def client(self, service: str) -> Iterator[Any]:
        """A stock client. Its connection is gone afterwards, at both ends."""
        client = boto3.client(
            service, endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip
        try:
            yield client
        finally:
            client.close()
            for thread in threading.enumerate():
                if "process_request_thread" in thread.name:
                    thread.join(5)


# All that the emulator can make of small, but CloudWatch: the checker's boto3 speaks a protocol to it that the moto of
# the project's environment does not know.
_SERVICES = "s3,kms,iam,secretsmanager,ec2"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    with moto_server() as endpoint:
        saved = tmp_path_factory.mktemp("small")
        python = environment("requirements.txt", given=os.environ.get("TERRAFORM_CHECKS_VENV"))
        skips = [
            f"--skip={step}"
            for step in ("fmt", "versions", "validate", "test", "replan", "destroy", "values", "policies")
        ]
        options = [f"--var-file={variables_of('small')}", f"--emulator={endpoint}", f"--save={saved}", *skips]
        command = [str(python), "-B", str(HERE / "emulated.py"), _SERVICES, str(TERRAFORM / "small"), *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        yield Applied(endpoint, load(saved / "state.json"))


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("credentials")
def test_records_go_where_remote_url_says(small: Applied) -> None:
    records = {"answer": b"forty-two", "large": secrets.token_bytes(3 << 20)}
    with kvstore.open_store(small.at_endpoint(small.outputs["remote_url"]), on_error="raise") as store:
        store.put_many(records)
        assert store.get_many([*records, "question"]) == [*records.values(), None]
    with kvstore.open_store(small.at_endpoint(small.outputs["remote_url"]), on_error="raise") as again:
        assert again.get_many(["large"]) == [records["large"]]
    with small.client("s3") as s3:
        names = [entry["Key"] for entry in s3.list_objects_v2(Bucket=small.outputs["bucket"])["Contents"]]
    # The roles are for kv/*, and what expires is kv/*.
    assert len([name for name in names if name.startswith("kv/")]) == len(names) >= 2


def test_bucket_is_as_it_should_be(small: Applied) -> None:
    bucket = small.outputs["bucket"]
    with small.client("s3") as s3:
        rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
        block = s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
        encryption = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"][0]
    expiring = {rule["Filter"]["Prefix"]: rule["Expiration"]["Days"] for rule in rules if "Expiration" in rule}
    assert expiring["kv/"] == 7
    assert set(block.values()) == {True}
    assert encryption["BucketKeyEnabled"] is True
    denied = [statement for statement in small.policy["Statement"] if statement["Effect"] == "Deny"]
    assert {"Bool": {"aws:SecureTransport": "false"}} in [statement["Condition"] for statement in denied]
    # Nothing is denied without a condition: who speaks TLS and has a role gets through.
    assert all(statement.get("Condition") for statement in denied)


def test_outputs_are_a_configuration(small: Applied, tmp_path: Path) -> None:
    assert_configuration("small", small.state, tmp_path)


def test_nodes_find_their_configuration_in_secrets_manager(small: Applied) -> None:
    assert small.stored["config_yaml"] == dict.fromkeys(("use1-az4", "use1-az6"), small.outputs["config_yaml"])


def test_roles_were_taken(small: Applied) -> None:
    role = small.outputs["role_arns"]["writer"].rpartition("/")[2]
    with small.client("iam") as iam:
        policies = iam.list_role_policies(RoleName=role)["PolicyNames"]
        records = iam.get_role_policy(RoleName=role, PolicyName="records")["PolicyDocument"]
    assert set(policies) == {"records", "node", "start"}
    allowed = {
        action
        for s in records["Statement"]
        for action in ([s["Action"]] if isinstance(s["Action"], str) else s["Action"])
    }
    assert {"s3:GetObject", "s3:PutObject"} <= allowed
    assert "s3:DeleteObject" not in allowed


@pytest.mark.usefixtures("credentials")
def test_a_node_stands_in_front_of_the_bucket(small: Applied, tmp_path: Path) -> None:
    """`kvstore serve` with the node's configuration, a store with the engine's: as on the instance."""
    node = yaml.safe_load(small.stored["node_yaml"])
    assert node["unix"] == "/run/kvstore/node.sock"
    node.update(unix=f"{tmp_path}/n.sock", memory="64MiB", disk=f"file://{tmp_path}/kv?bytes=64MiB")
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    config = yaml.safe_load(small.stored["config_yaml"]["use1-az4"])
    config["tiers"] = [url.replace("/run/kvstore/node.sock", node["unix"]) for url in config["tiers"]]
    config["remote_url"] = small.at_endpoint(config["remote_url"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "on_error": "raise"}))

    command = [sys.executable, "-m", "kvstore_cli", "serve", "--config", str(tmp_path / "node.yaml"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["unix"] == node["unix"]
            record = secrets.token_bytes(1 << 20)
            with kvstore.open_store(config_file=tmp_path / "config.yaml") as store:
                store.put_many({"in-both": record})
                assert store.get_many(["in-both"]) == [record]
                node_tier, s3_tier = store.stats()["tiers"]
                assert node_tier["hits"] > 0, "the node did not answer"
                assert s3_tier["hits"] == 0
            # What the node loses is in the bucket.
            with kvstore.open_store(config["remote_url"], on_error="raise") as alone:
                assert alone.get_many(["in-both"]) == [record]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
