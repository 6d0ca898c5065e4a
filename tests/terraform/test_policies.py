"""What the roles of modules/iam may do, simulated: all that the S3 backend needs, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from tests.terraform import iam
from tests.terraform.support import HERE, MODULES, assert_sound, check, load, outputs, variables

BUCKET = "arn:aws:s3:::acme-kv"
RECORD = f"{BUCKET}/kv/ab/abcdef"
ASIDE = f"{BUCKET}/kv/quarantine/abcdef.1"
EXPRESS = "arn:aws:s3express:us-east-1:123456789012:bucket/acme-kv--use1-az4--x-s3"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
STATE = ("init", "plan", "apply")

# Every API call of the S3 backend: the action that it wants, and on what.
CALLS = {
    "HeadObject": [("s3:GetObject", RECORD)],
    "GetObject": [("s3:GetObject", RECORD)],
    "PutObject": [("s3:PutObject", RECORD)],
    "CreateMultipartUpload": [("s3:PutObject", RECORD)],
    "UploadPart": [("s3:PutObject", RECORD)],
    "CompleteMultipartUpload": [("s3:PutObject", RECORD)],
    "AbortMultipartUpload": [("s3:AbortMultipartUpload", RECORD)],
    "CopyObject": [("s3:GetObject", RECORD), ("s3:PutObject", RECORD)],
    "DeleteObject": [("s3:DeleteObject", RECORD)],
    "DeleteObjects": [("s3:DeleteObject", RECORD)],
    "ListObjectsV2": [("s3:ListBucket", BUCKET)],
    "ListMultipartUploads": [("s3:ListBucketMultipartUploads", BUCKET)],
}
READS = {"HeadObject", "GetObject", "ListObjectsV2"}
WRITES = {
    "PutObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "AbortMultipartUpload",
    "CopyObject",
}
SWEEPS = {"DeleteObject", "DeleteObjects", "ListMultipartUploads", "AbortMultipartUpload"}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Role to its documents, as applied."""
    folder = tmp_path_factory.mktemp("iam")
    checked = check(MODULES / "iam", f"--var-file={variables('iam', 'ec2')}", f"--save={folder}", steps=STATE)
    assert_sound(checked, STATE)
    documents = {name: json.loads(text) for name, text in outputs(load(folder / "state.json"))["policies"].items()}
    node = documents.pop("node")
    return {role: [document, node] for role, document in documents.items()}


def may(policies: dict[str, list[dict[str, Any]]], role: str, call: str) -> bool:
    return all(iam.allowed(policies[role], action, resource) for action, resource in CALLS[call])


def test_every_call_of_the_backend_is_known_here() -> None:
    folder = HERE.parents[1] / "backends" / "kvstore_backends" / "s3"
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
    known = set(botocore.session.get_session().get_service_model("s3").operation_names)
    found = set(re.findall(r'"([A-Z]\w+)"', text)) & known
    assert found - {"CreateSession"} == set(CALLS)  # sessions have a test of their own, below


@pytest.mark.parametrize("call", sorted(CALLS))
def test_roles_may_what_they_need_and_no_more(policies: dict[str, list[dict[str, Any]]], call: str) -> None:
    assert may(policies, "reader", call) == (call in READS)
    assert may(policies, "writer", call) == (call in READS | WRITES)
    assert may(policies, "evictor", call) == (call in READS | SWEEPS)


def test_only_the_evictor_keeps_corrupt_records_aside(policies: dict[str, list[dict[str, Any]]]) -> None:
    assert iam.allowed(policies["evictor"], "s3:PutObject", ASIDE)
    assert not iam.allowed(policies["evictor"], "s3:PutObject", RECORD)
    assert not iam.allowed(policies["reader"], "s3:PutObject", ASIDE)


@pytest.mark.parametrize("role", ["reader", "writer", "evictor"])
def test_nothing_outside(policies: dict[str, list[dict[str, Any]]], role: str) -> None:
    for other in (f"{BUCKET}/elsewhere/x", "arn:aws:s3:::acme-kv-2/kv/ab/abcdef", "arn:aws:s3:::other/kv/x"):
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            assert not iam.allowed(policies[role], action, other), (action, other)
    for action, resource in [
        ("s3:DeleteBucket", BUCKET), ("s3:PutBucketPolicy", BUCKET), ("s3:PutLifecycleConfiguration", BUCKET),
        ("s3:PutObjectAcl", RECORD), ("s3:GetObjectVersion", RECORD),
        ("s3express:CreateSession", EXPRESS.replace("acme", "x")),
        ("s3express:DeleteBucket", EXPRESS), ("kms:ScheduleKeyDeletion", KEY), ("kms:PutKeyPolicy", KEY),
        ("kms:Decrypt", KEY.replace("1234abcd", "ffffffff")), ("iam:PassRole", "arn:aws:iam::123456789012:role/x"),
        ("secretsmanager:GetSecretValue", "arn:aws:secretsmanager:us-east-1:123456789012:secret:other-AbCdEf"),
        ("secretsmanager:PutSecretValue", "arn:aws:secretsmanager:us-east-1:123456789012:secret:kv/config-AbCdEf"),
        ("ec2:RunInstances", "*"), ("cloudwatch:PutMetricData", "*"),
    ]:  # fmt: skip
        assert not iam.allowed(policies[role], action, resource), (action, resource)


def test_sessions(policies: dict[str, list[dict[str, Any]]]) -> None:
    read, write = {"s3express:SessionMode": "ReadOnly"}, {"s3express:SessionMode": "ReadWrite"}
    assert iam.allowed(policies["reader"], "s3express:CreateSession", EXPRESS, read)
    assert not iam.allowed(policies["reader"], "s3express:CreateSession", EXPRESS, write)
    for role in ("writer", "evictor"):
        assert iam.allowed(policies[role], "s3express:CreateSession", EXPRESS, write)


def test_keys_and_secrets(policies: dict[str, list[dict[str, Any]]]) -> None:
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:kv/config-AbCdEf"
    for documents in policies.values():
        assert iam.allowed(documents, "kms:Decrypt", KEY)
        assert iam.allowed(documents, "secretsmanager:GetSecretValue", secret)
    assert iam.allowed(policies["writer"], "kms:GenerateDataKey", KEY)


def test_downloads_are_read_only(policies: dict[str, list[dict[str, Any]]]) -> None:
    wheel = "arn:aws:s3:::acme-artifacts/kvstore/kvstore.whl"
    assert iam.allowed(policies["writer"], "s3:GetObject", wheel)
    assert not iam.allowed(policies["writer"], "s3:PutObject", wheel)
    repository = "arn:aws:ecr:us-east-1:123456789012:repository/kvstore"
    assert iam.allowed(policies["writer"], "ecr:BatchGetImage", repository)
    assert not iam.allowed(policies["writer"], "ecr:PutImage", repository)


def test_telemetry_only_where_it_belongs(policies: dict[str, list[dict[str, Any]]]) -> None:
    ours = {"cloudwatch:namespace": "CacheGen"}
    assert iam.allowed(policies["writer"], "cloudwatch:PutMetricData", "*", ours)
    assert not iam.allowed(policies["writer"], "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "AWS/EC2"})
    group = "arn:aws:logs:us-east-1:123456789012:log-group:/kv-test/nodes"
    assert iam.allowed(policies["writer"], "logs:PutLogEvents", f"{group}:log-stream:x")
    assert not iam.allowed(policies["writer"], "logs:DeleteLogGroup", group)


def test_buckets_refuse_plain_http(tmp_path: Path) -> None:
    checked = check(
        MODULES / "object_store", f"--var-file={variables('object_store')}", f"--save={tmp_path}", steps=STATE
    )
    assert_sound(checked, STATE)
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    resources = load(tmp_path / "state.json")["values"]["root_module"]["resources"]
    found = {
        r["values"]["bucket"]: json.loads(r["values"]["policy"])
        for r in resources
        if r["type"] == "aws_s3_bucket_policy"
    }
    assert sorted(found) == ["acme-kv", "acme-kv--use1-az4--x-s3", "acme-kv--use1-az5--x-s3"]
    plain, tls = {"aws:SecureTransport": "false"}, {"aws:SecureTransport": "true"}
    for bucket, policy in found.items():
        express = bucket.endswith("--x-s3")
        arn = f"arn:aws:s3express:us-east-1:123456789012:bucket/{bucket}" if express else f"arn:aws:s3:::{bucket}/kv/x"
        action = "s3express:CreateSession" if express else "s3:GetObject"
        denies = {**policy, "Statement": [s for s in policy["Statement"] if s["Effect"] == "Deny"]}
        assert not iam.allowed([everything, denies], action, arn, plain), bucket
        assert iam.allowed([everything, denies], action, arn, tls), bucket


def test_the_simulator_refuses_what_it_does_not_know() -> None:
    odd = {"Statement": {"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}}
    with pytest.raises(NotImplementedError, match="NotAction"):
        iam.allowed([odd], "s3:GetObject", RECORD)
    odd = {"Statement": {"Effect": "Allow", "Action": "*", "Resource": "*", "Condition": {"IpAddress": {"a": "b"}}}}
    with pytest.raises(NotImplementedError, match="IpAddress"):
        iam.allowed([odd], "s3:GetObject", RECORD)


def test_valkey_user_may_what_the_manual_says() -> None:
    manual = (HERE.parents[1] / "docs" / "valkey.md").read_text()
    rules = "\n".join(re.findall(r"^ACL SETUSER.*(?:\n +.*)*", manual, re.M))
    module = (MODULES / "valkey" / "main.tf").read_text()
    commands = re.search(r"commands = join\((.*?)\]\)", module, re.S)
    assert commands is not None
    word = r"\+[a-z|-]+"
    assert set(re.findall(word, rules)) == set(re.findall(word, commands.group(1)))
    assert "-@all" in rules
    assert "resetchannels -@all ${local.commands}" in module
