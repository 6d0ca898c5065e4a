"""Wrong values are refused while planning, and the message says what to write instead. (That each validation refuses is
tested by the modules' own tests/refusals.tftest.hcl; here is what a person reads.)"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.terraform.support import MODULES, check, variables

_CASES: dict[str, tuple[str, str | None, dict[str, Any], list[str]]] = {
    "zone without S3 Express": (
        "object_store", None, {"express_zone_ids": ["use1-az1"]},
        ["S3 Express does not exist in use1-az1", "write one of use1-az4, use1-az5, use1-az6. If", "s3express_zones"],
    ),
    "zone of another region": (
        "object_store", None, {"express_zone_ids": ["usw2-az1"]},
        ["usw2-az1 is not a zone with S3 Express of the provider's region us-east-1", "write one of use1-az4"],
    ),
    "zone name": (
        "network", None, {"zone_ids": ["us-east-1a"]},
        ["write zone ids such as use1-az4", "describe-availability-zones"],
    ),
    "bucket name too long": (
        "object_store", None, {"bucket_base": "a" * 48}, ["bucket_base: write 3 to 47 characters", "at most 63"]
    ),
    "plain bucket name too long": (
        "object_store", None, {"bucket_base": "a" * 64, "express_zone_ids": []}, ["write 3 to 63 characters"]
    ),
    "overlapping networks": (
        "network", None, {"peer_cidrs": ["10.0.0.0/8"]}, ["overlaps cidr (10.60.0.0/16)", "write another cidr, such as"]
    ),
    "overlapping subnets": (
        "network", None,
        {"subnet_cidrs": {
            "use1-az4": {"private": "10.60.0.0/18", "public": "10.60.255.0/24"},
            "use1-az5": {"private": "10.60.16.0/20", "public": "10.60.254.0/24"},
        }},
        ["these ranges overlap", "write ranges that share no address"],
    ),
    "negative budget": ("budget", None, {"amount": -1}, ["what a month may cost in $, more than 0, such as 5000"]),
    "nobody to tell": ("budget", None, {"emails": [], "sns_topic_arn": None}, ["nobody would be told; write emails ="]),
    "the whole internet": (
        "network", None, {"allowed_cidrs": ["0.0.0.0/0"]}, ["/0 lets the whole internet in; write the networks"]
    ),
    "noeviction": ("valkey", "cluster", {"eviction": "noeviction"}, ["noeviction refuses writes once"]),
    "EFA without Lustre": ("shared_files", "efs", {"lustre_efa": True}, ['only lustre has EFA; write kind =']),
    "all buckets": ("iam", "ec2", {"bucket_arns": ["arn:aws:s3:::*"]}, ["write ARNs of buckets", "without wildcards"]),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_refused_with_what_to_write_instead(case: str, tmp_path: Path) -> None:
    module, variant, wrong, words = _CASES[case]
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    files = (variables(module, variant), tmp_path / "wrong.json")
    checked = check(MODULES / module, *(f"--var-file={file}" for file in files), steps=("init", "plan"))
    assert (checked.code, checked.failed) == (1, "plan"), checked.said
    said = re.sub(r"[\s│╷╵]+", " ", checked.said)
    for word in words:
        assert word in said, checked.said
