"""Fakes: what AWS would have computed, in the right shape, and real forms of ids and ARNs where policies need them."""

from __future__ import annotations

import base64
import hashlib
import json
import re

ACCOUNT = "123456789012"
ID_PREFIX = {
    "aws_vpc": "vpc",
    "aws_subnet": "subnet",
    "aws_security_group": "sg",
    "aws_launch_template": "lt",
    "aws_efs_file_system": "fs",
    "aws_efs_access_point": "fsap",
    "aws_efs_mount_target": "fsmt",
    "aws_fsx_lustre_file_system": "fs",
    "aws_fsx_openzfs_file_system": "fs",
    "aws_route_table": "rtb",
    "aws_vpc_endpoint": "vpce",
    "aws_internet_gateway": "igw",
    "aws_nat_gateway": "nat",
    "aws_eip": "eipalloc",
    "aws_vpc_security_group_ingress_rule": "sgr",
    "aws_vpc_security_group_egress_rule": "sgr",
    "aws_instance": "i",
}


def digest(*parts, n=17):
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:n]


def zones(region):
    """[(name, id)] of three availability zones, where S3 Express exists in us-east-1; the pairing is made up."""
    area, side, num = region.rsplit("-", 2) if region.count("-") == 2 else ("us", "east", "1")
    short = area.replace("-", "") + "".join(w[0] for w in re.findall(r"north|south|east|west|central", side)) + num
    first = 4 if region == "us-east-1" else 1
    return [(region + c, f"{short}-az{first + i}") for i, c in enumerate("abc")]


def fake(name, ty, rtype, seed, region):
    if isinstance(ty, list):
        kind, el = ty
        if kind == "map":
            return {}
        if kind == "object":
            return {n: fake(n, t, rtype, seed, region) for n, t in el.items()}
        return [fake(name, el, rtype, seed, region)] if isinstance(el, list) and el[0] == "object" else []
    if ty in ("number", "bool"):
        return 0 if ty == "number" else False
    if ty == "dynamic":
        return [b'"string"', "fake"]
    words = rtype.split("_")
    svc = words[1] if len(words) > 1 else rtype
    if name == "arn" or name.endswith("_arn"):
        return f"arn:aws:{svc}:{region}:{ACCOUNT}:{'-'.join(words[2:]) or svc}/{digest(rtype, seed)}"
    if name in ("owner_id", "account_id", "registry_id"):
        return ACCOUNT
    if name == "region":
        return region
    if name == "data":
        return base64.b64encode(b"fake").decode()
    if name == "json":
        return "{}"
    if name in ("issuer", "url"):
        return f"https://{rtype.replace('_', '-')}.example/{digest(rtype, seed, n=32)}"
    if "endpoint" in name or name in ("address", "dns_name", "hostname"):
        return f"{digest(rtype, seed)}.{svc}.{region}.amazonaws.com"
    if name.endswith("cidr_block"):
        return "10.0.0.0/16"
    if name in ("availability_zone", "availability_zone_id"):
        return zones(region)[0][name.endswith("_id")]
    if name == "id" and rtype in ID_PREFIX:
        return f"{ID_PREFIX[rtype]}-{digest(rtype, seed)}"
    return f"{''.join(w[0] for w in words[1:])}-{digest(rtype, seed, name)}"


# ids and ARNs whose form policies and other arguments depend on; f(values, region) -> values to set at creation
FORMS = {
    "aws_s3_bucket": lambda v, r: {"id": v["bucket"], "arn": f"arn:aws:s3:::{v['bucket']}"},
    "aws_s3_directory_bucket": lambda v, r: {
        "id": v["bucket"],
        "arn": f"arn:aws:s3express:{r}:{ACCOUNT}:bucket/{v['bucket']}",
    },
    "aws_iam_role": lambda v, r: {
        "id": v["name"],
        "arn": f"arn:aws:iam::{ACCOUNT}:role{v.get('path') or '/'}{v['name']}",
    },
    "aws_iam_policy": lambda v, r: {
        "arn": f"arn:aws:iam::{ACCOUNT}:policy{v.get('path') or '/'}{v['name']}",
        "id": f"arn:aws:iam::{ACCOUNT}:policy{v.get('path') or '/'}{v['name']}",
    },
    "aws_iam_instance_profile": lambda v, r: {
        "id": v["name"],
        "arn": f"arn:aws:iam::{ACCOUNT}:instance-profile/{v['name']}",
    },
    "aws_kms_key": lambda v, r: {"key_id": v["id"], "arn": f"arn:aws:kms:{r}:{ACCOUNT}:key/{v['id']}"},
    "aws_efs_file_system": lambda v, r: {"arn": f"arn:aws:elasticfilesystem:{r}:{ACCOUNT}:file-system/{v['id']}"},
    "aws_efs_access_point": lambda v, r: {"arn": f"arn:aws:elasticfilesystem:{r}:{ACCOUNT}:access-point/{v['id']}"},
    "aws_secretsmanager_secret": lambda v, r: dict.fromkeys(
        ("id", "arn"), f"arn:aws:secretsmanager:{r}:{ACCOUNT}:secret:{v['name']}-AbCdEf"
    ),
    "aws_sns_topic": lambda v, r: dict.fromkeys(("id", "arn"), f"arn:aws:sns:{r}:{ACCOUNT}:{v['name']}"),
    "aws_cloudwatch_log_group": lambda v, r: {
        "id": v["name"],
        "arn": f"arn:aws:logs:{r}:{ACCOUNT}:log-group:{v['name']}",
    },
    "aws_eks_cluster": lambda v, r: {"id": v["name"], "arn": f"arn:aws:eks:{r}:{ACCOUNT}:cluster/{v['name']}"},
    "random_password": lambda v, r: {
        "id": "none",
        "result": digest(v, n=64)[: int(v["length"])].ljust(int(v["length"]), "x"),
    },
    "random_string": lambda v, r: {"result": digest(v, n=64)[: int(v["length"])].ljust(int(v["length"]), "x")},
    "random_id": lambda v, r: {"hex": digest(v, n=64)[: 2 * int(v["byte_length"])]},
}


def policy_document(c):
    """aws_iam_policy_document, rendered locally as the provider does."""

    def one(x):
        return x[0] if len(x) == 1 else sorted(x, reverse=True)

    statements = [s for d in c.get("source_policy_documents") or [] for s in json.loads(d).get("Statement", [])]
    for s in c.get("statement") or []:
        st = {"Sid": s["sid"]} if s.get("sid") else {}
        st["Effect"] = s.get("effect") or "Allow"
        for arg, key in (("principals", "Principal"), ("not_principals", "NotPrincipal")):
            who = {}
            for p in s.get(arg) or []:
                who.setdefault(p["type"], []).extend(p["identifiers"])
            if who:
                st[key] = "*" if who == {"*": ["*"]} else {k: one(v) for k, v in who.items()}
        for arg, key in (
            ("actions", "Action"),
            ("not_actions", "NotAction"),
            ("resources", "Resource"),
            ("not_resources", "NotResource"),
        ):
            if s.get(arg):
                st[key] = one(s[arg])
        for k in s.get("condition") or []:
            st.setdefault("Condition", {}).setdefault(k["test"], {})[k["variable"]] = one(k["values"])
        statements.append(st)
    doc = {
        "Version": c.get("version") or "2012-10-17",
        **({"Id": c["policy_id"]} if c.get("policy_id") else {}),
        "Statement": statements,
    }
    return json.dumps(doc, indent=2)


def _az(c, r):
    z = next(
        (z for z in zones(r) if z[1] == c.get("zone_id") or z[0] == c.get("name")),
        (c.get("name") or r + "a", c.get("zone_id") or zones(r)[0][1]),
    )
    return {"name": z[0], "zone_id": z[1], "region": r, "id": z[0], "state": "available"}


def _azs(c, r):
    z = zones(r)
    for f in c.get("filter") or []:
        col = {"zone-id": 1, "zone-name": 0}.get(f["name"])
        if col is not None:
            z = [x for x in z if x[col] in f["values"]]
    z = [x for x in z if x[0] not in (c.get("exclude_names") or []) and x[1] not in (c.get("exclude_zone_ids") or [])]
    return {"names": [x[0] for x in z], "zone_ids": [x[1] for x in z], "group_names": [r], "id": r}


# data sources and ephemeral resources answered with more than generic fakes; f(config, region) -> attributes
ANSWERS = {
    "aws_iam_policy_document": lambda c, r: {
        "json": policy_document(c),
        "id": digest(policy_document(c)),
        "minified_json": json.dumps(json.loads(policy_document(c)), separators=(",", ":")),
    },
    "aws_caller_identity": lambda c, r: {
        "account_id": ACCOUNT,
        "arn": f"arn:aws:iam::{ACCOUNT}:user/ci",
        "user_id": "AIDACI",
        "id": ACCOUNT,
    },
    "aws_partition": lambda c, r: {
        "partition": "aws",
        "dns_suffix": "amazonaws.com",
        "id": "aws",
        "reverse_dns_prefix": "com.amazonaws",
    },
    "aws_region": lambda c, r: {
        "region": r,
        "name": r,
        "id": r,
        "endpoint": f"ec2.{r}.amazonaws.com",
        "description": r,
    },
    "aws_availability_zones": _azs,
    "aws_availability_zone": _az,
    "random_password": lambda c, r: {"result": digest(c, n=64)[: int(c["length"])].ljust(int(c["length"]), "x")},
}
