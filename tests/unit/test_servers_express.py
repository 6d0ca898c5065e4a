"""The S3 Express stand-in refuses what a directory bucket refuses. boto3 is the witness: it signs as AWS wants it."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.servers.express_stub import BUCKET, ExpressStub
from tests.servers.sigv4 import canonical_request, parse_authorization, signature


def client_of(stub: ExpressStub, *, secret_key: str = ExpressStub.secret_key, **config: Any) -> Any:
    import boto3

    session = boto3.session.Session(stub.access_key, secret_key, region_name=stub.region)
    retries = {"mode": "standard", "total_max_attempts": 1}
    return session.client("s3", endpoint_url=stub.endpoint, config=Config(retries=retries, **config))


@pytest.fixture
def client(express_stub: ExpressStub) -> Iterator[Any]:
    made = client_of(express_stub)
    yield made
    made.close()


def code_of(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(Bucket=BUCKET, **arguments)
    return f"{caught.value.response['ResponseMetadata']['HTTPStatusCode']} {caught.value.response['Error']['Code']}"


def test_the_signature_of_the_aws_manual() -> None:
    """S3 API reference, "Signature Calculations ... Authorization Header", example GET Object."""
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    headers = {"host": "examplebucket.s3.amazonaws.com", "range": "bytes=0-9", "x-amz-content-sha256": empty,
               "x-amz-date": "20130524T000000Z"}  # fmt: skip
    wanted = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    credential = parse_authorization(
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature={wanted}"
    )
    assert credential is not None
    canonical = canonical_request("GET", "/test.txt", "", headers, credential.signed_headers)
    assert signature("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "20130524T000000Z", credential, canonical) == wanted
    assert parse_authorization("Basic abc") is None


def test_one_session_serves_many_requests(client: Any, express_stub: ExpressStub) -> None:
    for number in range(10):
        client.put_object(Bucket=BUCKET, Key=f"k{number}", Body=b"body", Metadata={"a": "b"})
    answer = client.get_object(Bucket=BUCKET, Key="k3")
    assert answer["Body"].read() == b"body"
    assert answer["Metadata"] == {"a": "b"}
    assert express_stub.counts["create_session"] == 1
    assert express_stub.counts["requests"] == 12
    keys = {seen.access_key for seen in express_stub.seen}
    assert len(keys) == 2, "the account's key for CreateSession, the session's for all else"


def test_a_wrong_secret_is_refused(express_stub: ExpressStub) -> None:
    client = client_of(express_stub, secret_key="wrong")
    assert code_of(client.get_object, Key="k") == "403 SignatureDoesNotMatch"
    client.close()


def test_unsigned_and_tokenless_requests_are_refused(express_stub: ExpressStub) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{express_stub.endpoint}/{BUCKET}/k", timeout=5)
    assert caught.value.code == 403
    caught.value.close()
    plain = client_of(express_stub, s3={"disable_s3_express_session_auth": True})
    assert code_of(plain.get_object, Key="k") == "403 AccessDenied"
    plain.close()


def test_an_expired_session_is_refused(client: Any, express_stub: ExpressStub) -> None:
    client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
    express_stub.expire_sessions()
    assert code_of(client.get_object, Key="k") == "400 ExpiredToken"
    assert express_stub.counts["expired"] == 1


def test_a_bucket_that_slept_answers_503_first(client: Any, express_stub: ExpressStub) -> None:
    express_stub.sleep(2)
    assert code_of(client.get_object, Key="k").startswith("503")
    assert code_of(client.get_object, Key="k").startswith("503")
    assert code_of(client.get_object, Key="k") == "404 NoSuchKey"


def test_etags_are_random_and_conditions_hold(client: Any) -> None:
    first = client.put_object(Bucket=BUCKET, Key="a", Body=b"same")["ETag"]
    second = client.put_object(Bucket=BUCKET, Key="b", Body=b"same")["ETag"]
    assert first != second
    assert code_of(client.put_object, Key="a", Body=b"x", IfNoneMatch="*") == "412 PreconditionFailed"
    assert code_of(client.get_object, Key="a", IfMatch=second) == "412 PreconditionFailed"
    assert code_of(client.delete_object, Key="a", IfMatch=second) == "412 PreconditionFailed"
    client.delete_object(Bucket=BUCKET, Key="a", IfMatch=first)
    assert code_of(client.get_object, Key="a") == "404 NoSuchKey"


def test_ranges(client: Any) -> None:
    client.put_object(Bucket=BUCKET, Key="r", Body=bytes(range(200)))
    answer = client.get_object(Bucket=BUCKET, Key="r", Range="bytes=10-19")
    assert (answer["Body"].read(), answer["ContentRange"]) == (bytes(range(10, 20)), "bytes 10-19/200")
    assert code_of(client.get_object, Key="r", Range="bytes=200-") == "416 InvalidRange"


def test_listing_rules(client: Any) -> None:
    names = [f"p/{number}" for number in range(30)]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=name, Body=b"x")
    client.create_multipart_upload(Bucket=BUCKET, Key="p/pending/x")
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix="p/", PaginationConfig={"PageSize": 7}
    )
    found = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert sorted(found) == sorted(names)
    assert found != sorted(found), "no order"
    answer = client.list_objects_v2(Bucket=BUCKET, Prefix="p/", Delimiter="/")
    assert [entry["Prefix"] for entry in answer["CommonPrefixes"]] == ["p/pending/"]
    for bad in ({"Prefix": "p"}, {"Delimiter": "-"}, {"StartAfter": "p/1"}):
        assert code_of(client.list_objects_v2, **bad) == "400 InvalidRequest"


def test_parts_are_consecutive(client: Any) -> None:
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    parts = []
    for number in (1, 3):
        etag = client.upload_part(Bucket=BUCKET, Key="m", UploadId=upload, PartNumber=number, Body=b"x")["ETag"]
        parts.append({"PartNumber": number, "ETag": etag})
    assert code_of(
        client.complete_multipart_upload, Key="m", UploadId=upload, MultipartUpload={"Parts": parts}
    ) == "400 InvalidPart"  # fmt: skip
    assert len(client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]) == 1
    client.abort_multipart_upload(Bucket=BUCKET, Key="m", UploadId=upload)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)


def test_copy_and_delete_many(client: Any) -> None:
    client.put_object(Bucket=BUCKET, Key="from", Body=b"x", Metadata={"a": "1"})
    client.copy_object(Bucket=BUCKET, Key="to", CopySource={"Bucket": BUCKET, "Key": "from"}, Metadata={"a": "2"},
                       MetadataDirective="REPLACE")  # fmt: skip
    assert client.head_object(Bucket=BUCKET, Key="to")["Metadata"] == {"a": "2"}
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "from"}, {"Key": "to"}, {"Key": "none"}]})
    assert code_of(client.head_object, Key="to") == "404 404"


def test_checksums_are_verified(client: Any) -> None:
    client.put_object(Bucket=BUCKET, Key="c", Body=b"body", ChecksumAlgorithm="CRC32")
    assert code_of(client.put_object, Key="c", Body=b"body", ChecksumCRC32="AAAAAA==") == "400 BadDigest"
    assert (
        code_of(client.put_object, Key="c", Body=b"body", ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==") == "400 InvalidRequest"
    )


@pytest.mark.parametrize("call", ["get_object_tagging", "get_object_acl"])
def test_what_directory_buckets_lack(client: Any, call: str) -> None:
    assert code_of(getattr(client, call), Key="k") == "501 NotImplemented"
