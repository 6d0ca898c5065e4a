"""Optional: send each created resource to a loopback AWS emulator as the API call the provider would make (argument
names matched to the API model in botocore, whose client-side validation is on). Creates only: no update, no delete, so
start a fresh emulator for each module.

Used by `check.py --emulator http://127.0.0.1:PORT` while `moto_server -H 127.0.0.1 -p PORT` runs."""

from __future__ import annotations

import json
import re
from urllib.parse import urlsplit

# type: service, operation, {argument: API name, or None to drop}, root member, response path of id, of arn
CALLS = {
    "aws_s3_bucket": ("s3", "create_bucket", {}, None, None, None),
    "aws_s3_bucket_lifecycle_configuration": (
        "s3",
        "put_bucket_lifecycle_configuration",
        {"rule": "Rules"},
        "LifecycleConfiguration",
        None,
        None,
    ),
    "aws_s3_bucket_server_side_encryption_configuration": (
        "s3",
        "put_bucket_encryption",
        {"rule": "Rules"},
        "ServerSideEncryptionConfiguration",
        None,
        None,
    ),
    "aws_s3_bucket_policy": ("s3", "put_bucket_policy", {}, None, None, None),
    "aws_s3_bucket_public_access_block": (
        "s3",
        "put_public_access_block",
        {},
        "PublicAccessBlockConfiguration",
        None,
        None,
    ),
    "aws_kms_key": ("kms", "create_key", {}, None, "KeyMetadata.KeyId", "KeyMetadata.Arn"),
    "aws_efs_file_system": ("efs", "create_file_system", {}, None, "FileSystemId", "FileSystemArn"),
    "aws_elasticache_subnet_group": (
        "elasticache",
        "create_cache_subnet_group",
        {"name": "CacheSubnetGroupName", "description": "CacheSubnetGroupDescription"},
        None,
        "CacheSubnetGroup.CacheSubnetGroupName",
        None,
    ),
    "aws_elasticache_replication_group": (
        "elasticache",
        "create_replication_group",
        {
            "description": "ReplicationGroupDescription",
            "node_type": "CacheNodeType",
            "subnet_group_name": "CacheSubnetGroupName",
            "auth_token_wo": "AuthToken",
        },
        None,
        "ReplicationGroup.ReplicationGroupId",
        None,
    ),
    "aws_iam_role": (
        "iam",
        "create_role",
        {"name": "RoleName", "assume_role_policy": "AssumeRolePolicyDocument"},
        None,
        "Role.RoleName",
        "Role.Arn",
    ),
    "aws_iam_role_policy": (
        "iam",
        "put_role_policy",
        {"name": "PolicyName", "role": "RoleName", "policy": "PolicyDocument"},
        None,
        None,
        None,
    ),
    "aws_vpc": ("ec2", "create_vpc", {}, None, "Vpc.VpcId", None),
    "aws_subnet": ("ec2", "create_subnet", {}, None, "Subnet.SubnetId", None),
    "aws_vpc_endpoint": (
        "ec2",
        "create_vpc_endpoint",
        {"route_table_ids": None, "policy": None},
        None,
        "VpcEndpoint.VpcEndpointId",
        None,
    ),
    "aws_secretsmanager_secret": ("secretsmanager", "create_secret", {"policy": None}, None, "ARN", "ARN"),
    "aws_secretsmanager_secret_version": (
        "secretsmanager",
        "put_secret_value",
        {"version_stages": None, "secret_string_wo": "SecretString"},
        None,
        None,
        None,
    ),
    "aws_cloudwatch_metric_alarm": ("cloudwatch", "put_metric_alarm", {}, None, None, None),
    "aws_cloudwatch_dashboard": ("cloudwatch", "put_dashboard", {}, None, None, None),
}
DEFAULTS = {
    "aws_elasticache_subnet_group": {"description": "Managed by Terraform"}
}  # what the provider itself fills in


def norm(s):
    return re.sub("[^a-z0-9]", "", s.lower())


def to_api(v, shape, names):
    t = shape.type_name
    if t == "structure":
        v = (v[0] if v else {}) if isinstance(v, list) else v
        members, out = {norm(k): (k, s) for k, s in shape.members.items()}, {}
        for k, x in v.items():
            if x in (None, [], {}, "") or names.get(k, k) is None:
                continue
            m = members.get(norm(names.get(k, k))) or members.get(norm(k) + "s")
            if m:
                out[m[0]] = to_api(x, m[1], {})
        return out
    if t == "list":
        if isinstance(v, dict):  # CloudWatch dimensions
            return [{"Name": a, "Value": b} for a, b in v.items()]
        return [to_api(e, shape.member, {}) for e in v]
    if t == "boolean":
        return v if isinstance(v, bool) else str(v).lower() == "true"
    cast = {"string": str, "integer": int, "long": int, "double": float, "float": float}.get(t)
    return cast(v) if cast else v


class Emulator:
    def __init__(self, url):
        if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"):
            raise SystemExit("check.py: --emulator must be on this machine: a real endpoint would be changed")
        self.url = url

    def apply(self, kind, prior, new, cfg):
        """-> (new state, errors)"""
        if kind not in CALLS or prior:
            return new, []
        import boto3

        service, op, names, root, id_path, arn_path = CALLS[kind]
        client = boto3.client(
            service, endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )
        shape = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[op]).input_shape
        src = {
            **DEFAULTS.get(kind, {}),
            **{k: v for k, v in cfg.items() if v not in (None, [], {})},
        }  # references are resolved by now
        for k in ("name", "bucket"):
            if (
                k in new
                and k not in src
                and (cfg.get(k + "_prefix") or (kind == "aws_iam_role_policy" and k == "name"))
            ):
                src[k] = new[k]
        if str(src.get("bucket", "")).endswith("--x-s3"):
            return new, []  # moto knows no directory buckets
        call = {root: to_api(src, shape.members[root], names)} if root else {}
        call.update(
            {
                k: v
                for k, v in to_api({k: v for k, v in src.items() if k != "tags"}, shape, names).items()
                if k not in call
            }
        )
        try:
            answer = getattr(client, op)(**call)
        except Exception as e:  # the emulator's refusal is the finding
            return new, [f"{kind}: {op}({json.dumps(call, default=str)[:300]}): {e}"]

        def pick(path):
            d = answer
            for p in path.split("."):
                d = d[p]
            return d

        if id_path:
            new["id"] = pick(id_path)
        if arn_path:
            new["arn"] = pick(arn_path)
        if kind == "aws_kms_key":
            new["key_id"] = new["id"]
        return new, []
