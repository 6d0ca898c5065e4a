"""Options of `s3://`, and the settings they make together with the URL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvstore.errors import ConfigError
from kvstore.options import Option
from kvstore.registry import BackendURL

from .express import is_express, zone_of
from .zones import AUTO, check_zone

__all__ = ["OPTIONS", "Settings", "settings_from_url"]

MIB = 1 << 20

OPTIONS: tuple[Option, ...] = (
    Option("region", "str", None, "Region of the bucket; unset: AWS_REGION, AWS_DEFAULT_REGION or the profile's."),
    Option("endpoint_url", "str", None, "Where the service is, for anything but AWS: http://127.0.0.1:8333, "
           "https://minio.example:9000."),
    Option("addressing", "choice", "auto", "The bucket in the path or in the host name; auto: what botocore finds "
           "fitting.", choices=("auto", "path", "virtual")),
    Option("client", "choice", "native", "Which client moves the bytes: native (botocore with connections of ours), "
           "or boto3 and aioboto3 as they are.", choices=("native", "boto3", "aioboto3")),
    Option("zone", "str", AUTO, "Id of the availability zone that this machine is in (usw2-az1): of several S3 Express "
           "buckets that hold a record, the one of this zone is read first. auto: AWS_AVAILABILITY_ZONE_ID, else the "
           "instance's metadata, unless AWS_EC2_METADATA_DISABLED is true; asked for only if replicas is 2 or more."),
    Option("profile", "str", None, "Profile of the AWS configuration files; unset: AWS_PROFILE or the default one."),
    Option("access_key_id", "str", None, "Access key; unset: the standard chain (environment, profile, web identity, "
           "container, instance).", secret=True),
    Option("secret_access_key", "str", None, "Secret key that belongs to access_key_id.", secret=True),
    Option("session_token", "str", None, "Session token of temporary credentials.", secret=True),
    Option("ca_bundle", "str", None, "File of the certificates to trust; unset: AWS_CA_BUNDLE, or those of botocore."),
    Option("lanes", "int", 16, "Bodies moved at once.", minimum=1, maximum=512),
    Option("meta_lanes", "int", 64, "Small requests (lookups, deletes) sent at once.", minimum=1, maximum=1024),
    Option("part_size", "size", 8 * MIB, "Bytes of one request when a large read is split; adapted to what is "
           "measured.", minimum=64 << 10, maximum=1 << 30),
    Option("part_adapt", "bool", True, "Adapt part_size to the measured latency and bandwidth, between 4 and 32 MiB."),
    Option("gap", "size", 64 << 10, "Ranges of a record that are at most so far apart come in one request.",
           maximum=16 * MIB),
    Option("multipart_size", "size", 64 * MIB, "Records larger than this are written in several parts.",
           minimum=5 * MIB, maximum=5 << 30),
    Option("write_part_size", "size", 16 * MIB, "Bytes of each part but the last.", minimum=5 * MIB, maximum=5 << 30),
    Option("head_first", "choice", "auto", "Ask whether a record is there before its bytes are sent; auto: from 1 MiB, "
           "and always where conditional writes or a ttl need it.", choices=("auto", "always", "never")),
    Option("conditional_writes", "choice", "auto", "Whether the service honours If-None-Match on a put; auto: yes on "
           "AWS, elsewhere it is tried once with an object of its own.", choices=("auto", "on", "off")),
    Option("checksum", "choice", "none", "Checksum that the service verifies on each put, besides our own in the "
           "record; crc32c and crc64nvme need awscrt.", choices=("none", "crc32", "crc32c", "crc64nvme")),
    Option("hedge_reads", "bool", True, "Send a second request on a fresh connection when the first byte takes longer "
           "than for 95 % of requests; at most 5 % more requests; native only."),
    Option("miss_memory", "duration", 0.25, "How long a lookup's miss is remembered; 0: not at all.", maximum=60.0),
    Option("ttl", "duration", None, "Records expire this long after they were stored or renewed; unset: never.",
           minimum=1.0),
    Option("quarantine", "bool", True, "Keep corrupt records aside under quarantine/ instead of deleting them."),
    Option("connect_timeout", "duration", 1.0, "Longest wait for a connection, TLS included; never past the deadline.",
           minimum=0.01, maximum=60.0),
    Option("read_timeout", "duration", 5.0, "Longest silence of the service before a request is given up (a read is "
           "then followed up); never past the deadline.", minimum=0.01, maximum=600.0),
)  # fmt: skip

# [RFC of names] "Bucket naming rules" of the S3 user guide; old names with capitals and underscores still exist.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)
_AWS_HOST = re.compile(
    r"(?P<bucket>.+)\.(?:s3(?:express-[a-z0-9-]+)?)[.-](?P<region>[a-z]{2}(?:-[a-z]+)+-[0-9]+)\.amazonaws\.com(?:\.cn)?",
    re.ASCII,
)
_BAD_IN_PREFIX = re.compile(r"(^|/)\.{1,2}(/|$)|//")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where records go, and how. Secrets do not show in its repr.

    Attributes:
        prefix: of all object names; "" or ends in "/".
        express: the bucket is a directory bucket (S3 Express One Zone).
        others: see `OPTIONS`.
    """

    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint_url: str | None = None
    addressing: str = "auto"
    client: str = "native"
    zone: str = AUTO
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    lanes: int = 16
    meta_lanes: int = 64
    part_size: int = 8 * MIB
    part_adapt: bool = True
    gap: int = 64 << 10
    multipart_size: int = 64 * MIB
    write_part_size: int = 16 * MIB
    head_first: str = "auto"
    conditional_writes: str = "auto"
    checksum: str = "none"
    hedge_reads: bool = True
    miss_memory: float = 0.25
    ttl: float | None = None
    quarantine: bool = True
    connect_timeout: float = 1.0
    read_timeout: float = 5.0

    def __post_init__(self) -> None:
        for option in OPTIONS:
            option.parse(getattr(self, option.name))
        where = f"s3://{self.bucket}"
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(
                f"{where}: {self.bucket!r} is not the name of a bucket (3 to 63 letters, digits, . and -)"
            )
        if _BAD_IN_PREFIX.search(self.prefix) or self.prefix.startswith("/") or len(self.prefix.encode()) > 800:
            raise ConfigError(f"{where}: a prefix has no empty, '.' or '..' parts and at most 800 bytes")
        if self.prefix and not self.prefix.endswith("/"):
            raise ConfigError(f"{where}: a prefix ends in '/'")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError(f"{where}: access_key_id and secret_access_key come together, or not at all")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError(f"{where}: a session_token needs access_key_id and secret_access_key")
        check_zone(self.zone)
        if self.endpoint_url is not None and not _is_endpoint(self.endpoint_url):
            raise ConfigError(f"{where}: endpoint_url must be http://host:port or https://host:port")
        if self.express:
            zone_of(self.bucket)
            if self.addressing == "path" and self.endpoint_url is None:
                raise ConfigError(f"{where}: S3 Express knows virtual addressing only; leave addressing out")

    @property
    def express(self) -> bool:
        return is_express(self.bucket)

    @property
    def name(self) -> str:
        """For errors and metrics."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def _is_endpoint(text: str) -> bool:
    """Whether this is where a service may be. A path is allowed, what else a URL may hold is not."""
    try:
        parts = urlsplit(text)
        port = parts.port  # raises if it is out of range
    except ValueError:
        return False
    good = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and port != 0
    return good and not parts.query and not parts.fragment


def settings_from_url(url: BackendURL, options: Mapping[str, Any]) -> Settings:
    """`s3://bucket/prefix?region=…`. The host form that AWS shows (`bucket.s3.REGION.amazonaws.com`, LMCache's too) is
    understood.

    Raises:
        ConfigError: no bucket, or an option makes no sense.
    """
    bucket, given = url.authority, dict(options)
    match = _AWS_HOST.fullmatch(bucket)
    if match is not None:
        bucket = match["bucket"]
        given["region"] = given.get("region") or match["region"]
    if not bucket:
        raise ConfigError("s3:// needs a bucket: s3://bucket/prefix?region=…")
    prefix = url.path.strip("/")
    return Settings(bucket=bucket, prefix=f"{prefix}/" if prefix else "", **given)
