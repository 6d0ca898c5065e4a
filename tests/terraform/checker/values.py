"""Planned values against the AWS API models shipped in botocore (enum, pattern, length, range), and a few rules of our
own that neither the schema nor the models know. Usage: values.py PLAN.json (from `terraform show -json PLANFILE`)."""

from __future__ import annotations

import json
import re
import sys

import botocore.session

# resource type -> (service, operation, members to descend into, {argument: API member} where the names differ)
MODELS = {
    "aws_efs_file_system": ("efs", "CreateFileSystem", [], {}),
    "aws_elasticache_replication_group": (
        "elasticache",
        "CreateReplicationGroup",
        [],
        {
            "description": "ReplicationGroupDescription",
            "node_type": "CacheNodeType",
            "subnet_group_name": "CacheSubnetGroupName",
            "parameter_group_name": "CacheParameterGroupName",
        },
    ),
    "aws_elasticache_serverless_cache": ("elasticache", "CreateServerlessCache", [], {"name": "ServerlessCacheName"}),
    "aws_kms_key": ("kms", "CreateKey", [], {}),
    "aws_s3_bucket_lifecycle_configuration": ("s3", "PutBucketLifecycleConfiguration", ["LifecycleConfiguration"], {}),
    "aws_s3_bucket_server_side_encryption_configuration": (
        "s3",
        "PutBucketEncryption",
        ["ServerSideEncryptionConfiguration"],
        {},
    ),
    "aws_cloudwatch_metric_alarm": ("cloudwatch", "PutMetricAlarm", [], {}),
    "aws_placement_group": ("ec2", "CreatePlacementGroup", [], {"name": "GroupName"}),
    "aws_launch_template": ("ec2", "CreateLaunchTemplate", ["LaunchTemplateData"], {}),
    "aws_instance": ("ec2", "RunInstances", [], {}),
    "aws_vpc_endpoint": ("ec2", "CreateVpcEndpoint", [], {}),
    "aws_budgets_budget": ("budgets", "CreateBudget", ["Budget"], {}),
    "aws_iam_role": ("iam", "CreateRole", [], {"name": "RoleName"}),
    "aws_iam_policy": ("iam", "CreatePolicy", [], {"name": "PolicyName"}),
    "aws_eks_cluster": ("eks", "CreateCluster", [], {}),
    "aws_eks_node_group": ("eks", "CreateNodegroup", [], {"node_group_name": "nodegroupName"}),
    "aws_eks_addon": ("eks", "CreateAddon", [], {}),
    "aws_fsx_lustre_file_system": ("fsx", "CreateFileSystem", ["LustreConfiguration"], {}),
    "aws_fsx_openzfs_file_system": ("fsx", "CreateFileSystem", ["OpenZFSConfiguration"], {}),
    "aws_secretsmanager_secret": ("secretsmanager", "CreateSecret", [], {}),
    "aws_cloudwatch_log_group": ("logs", "CreateLogGroup", [], {"name": "logGroupName"}),
}
ALIAS = {
    "networkinterfaces": "NetworkInterfaces",
    "securitygroups": "Groups",
    "rule": "Rules",
    "kmsmasterkeyid": "KMSMasterKeyID",
}
SKIP = {"tags", "tags_all", "region", "id", "timeouts"}
SECURITY_GROUPS = {
    "aws_security_group",
    "aws_vpc_security_group_ingress_rule",
    "aws_vpc_security_group_egress_rule",
}
TEXT_OF_EC2 = re.compile(r"[A-Za-z0-9. _\-:/()#,@\[\]+=&;{}!$*]{0,255}")
ZONE_ID = re.compile(r"[a-z]{3,5}[0-9]-(?:[a-z]{3}[0-9]-)?az[0-9]")


def norm(s):
    return re.sub("[^a-z0-9]", "", s.lower())


def _scalar(val, shape, path, errors):
    md, t = shape.metadata, shape.type_name
    if t == "string" and isinstance(val, str):
        enum = getattr(shape, "enum", None)
        if enum and val not in enum:
            errors.append(f"{path} = {val!r}: not one of {', '.join(enum[:12])}")
        if md.get("pattern"):
            try:
                pat = md["pattern"]
                if not re.search(pat if pat.startswith("^") else f"^(?:{pat})$", val):
                    errors.append(f"{path} = {val!r}: does not match {pat}")
            except re.error:
                pass  # a Java-only pattern: cannot be judged here
        if not (md.get("min") or 0) <= len(val) <= (md.get("max") or 1e9):
            errors.append(f"{path}: length {len(val)} outside {md.get('min')}..{md.get('max')}")
    elif t in ("integer", "long", "double", "float") and isinstance(val, int | float) and not isinstance(val, bool):
        low, high = md.get("min", -1e18), md.get("max", 1e18)
        errors += [] if low <= val <= high else [f"{path} = {val}: outside {md.get('min')}..{md.get('max')}"]


def _walk(val, shape, path, errors, stats):
    if val is None:
        return
    if shape.type_name == "structure":
        if isinstance(val, list):
            val = val[0] if len(val) == 1 else None
        if not isinstance(val, dict):
            return
        members = {norm(k): v for k, v in shape.members.items()}
        for k, v in val.items():
            if v in (None, [], {}, ""):
                continue
            n = norm(k)
            m = next((members[c] for c in (n, norm(ALIAS.get(n, "")), n + "s", n.rstrip("s")) if c in members), None)
            if m is not None:
                _walk(v, m, f"{path}.{k}", errors, stats)
            else:
                stats["unmapped"] += 1
    elif shape.type_name == "list":
        for i, e in enumerate(val if isinstance(val, list) else [val]):
            _walk(e, shape.member, f"{path}[{i}]", errors, stats)
    elif shape.type_name != "map":
        stats["checked"] += 1
        _scalar(val, shape, path, errors)


def rules(kind, v):
    """What the schema and the API models do not know."""
    if kind == "aws_s3_directory_bucket":
        zone = ((v.get("location") or [{}])[0] or {}).get("name")
        if zone and not ZONE_ID.fullmatch(zone):
            yield f"location.name = {zone!r}: wants a zone id such as use1-az4, not a zone name"
        if (
            zone
            and v.get("bucket")
            and not re.fullmatch(rf"[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?--{re.escape(zone)}--x-s3", v["bucket"])
        ):
            yield f"bucket = {v['bucket']!r}: wants NAME--{zone}--x-s3"
        if len(v.get("bucket") or "") > 63:
            yield f"bucket = {v['bucket']!r}: longer than 63 characters"
    elif kind == "aws_s3_bucket_lifecycle_configuration" and str(v.get("bucket") or "").endswith("--x-s3"):
        for r in v.get("rule") or []:
            if r.get("transition") or r.get("noncurrent_version_transition") or r.get("noncurrent_version_expiration"):
                yield f"rule {r.get('id')!r}: a directory bucket knows expiration and abort of multipart uploads only"
            for f in r.get("filter") or []:
                if f.get("tag") or any(a.get("tags") for a in f.get("and") or []):
                    yield f"rule {r.get('id')!r}: a directory bucket knows no tag filter"
    elif kind == "aws_launch_template":
        for i, n in enumerate(v.get("network_interfaces") or []):
            if n.get("interface_type") not in (None, "", "interface", "efa", "efa-only"):
                given = n["interface_type"]
                yield f"network_interfaces[{i}].interface_type = {given!r}: not one of interface, efa, efa-only"
            if n.get("interface_type") == "efa-only" and n.get("network_card_index") in (0, None):
                yield f"network_interfaces[{i}]: efa-only has no IP address and cannot be the primary card"
    elif kind == "aws_fsx_lustre_file_system" and v.get("efa_enabled"):
        if v.get("deployment_type") != "PERSISTENT_2" or not v.get("metadata_configuration"):
            yield "efa_enabled: needs deployment_type PERSISTENT_2 and metadata_configuration"
    elif kind in SECURITY_GROUPS and not TEXT_OF_EC2.fullmatch(v.get("description") or ""):
        yield f"description = {v['description']!r}: EC2 takes letters, digits, blanks and ._-:/()#,@[]+=&;{{}}!$*"
    elif kind == "aws_elasticache_replication_group" and not v.get("transit_encryption_enabled"):
        yield "transit_encryption_enabled: a password needs it, and records would travel in clear text"


def check(plan):
    """-> (errors, {'checked': values compared, 'unmapped': values not compared, 'types': those without a model})"""
    session, errors = botocore.session.get_session(), []
    stats = {"checked": 0, "unmapped": 0, "types": set()}
    models = {}
    for rc in plan.get("resource_changes", []):
        after, kind = rc["change"]["after"] or {}, rc["type"]
        if rc["mode"] != "managed" or not kind.startswith("aws_") or rc["change"]["actions"] == ["delete"]:
            continue
        errors += [f"{rc['address']}: {e}" for e in rules(kind, after)]
        if kind not in MODELS:
            stats["types"].add(kind)
            continue
        service, op, path, names = MODELS[kind]
        if service not in models:
            models[service] = session.get_service_model(service)
        shape = models[service].operation_model(op).input_shape
        for p in path:
            shape = shape.members[p]
        _walk({names.get(k, k): v for k, v in after.items() if k not in SKIP}, shape, rc["address"], errors, stats)
    return errors, stats


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        found, seen = check(json.load(f))
    print(*(found or ["ok"]), f"{seen['checked']} values checked; no model for {sorted(seen['types'])}", sep="\n")
    sys.exit(bool(found))
