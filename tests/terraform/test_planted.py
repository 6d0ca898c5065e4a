"""Planted faults: a copy of the modules with one fault in it must fail, at the step that is there to find it.

A check that lets one of these through checks nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.terraform.support import MODULES, STEPS, check, variables


class Fault(NamedTuple):
    """`old` becomes `new` in a file of a module; then `step` must fail and say `why`."""

    what: str
    step: str
    where: str
    old: str
    new: str
    why: str
    case: str | None = None
    slow: bool = False  # another fault tries the same step by default


_EXPRESS_ABORT = '    filter { prefix = "" }\n    abort_incomplete_multipart_upload'
_READER_SESSION = 'each.key == "reader" ? [1] : []\n        content {\n          test     = "StringEquals"\n'
_BUCKET = 'resource "aws_s3_bucket" "this" {\n'
_KNOWN_ZONES = "length(setsubtract(var.express_zone_ids, flatten(values(var.s3express_zones))))"

_FAULTS = [
    Fault("layout", "fmt", "object_store/main.tf", "  force_destroy = var", "  force_destroy= var", "force_destroy"),
    Fault(
        "module from a registry", "fmt", "object_store/main.tf",
        'source        = "../kms_key"', 'source        = "terraform-aws-modules/kms/aws"', "only local modules",
    ),
    Fault(
        "unknown provider", "init", "valkey/versions.tf",
        '"hashicorp/random"', '"example/random"', "example/random", case="cluster",
    ),
    Fault("provider of the past", "versions", "network/versions.tf", ">= 6.60, < 7.0", "~> 5.0", "excludes 6.69.1"),
    Fault(
        "argument that is none", "validate", "object_store/main.tf",
        "bucket_key_enabled = true\n", "bucket_keys_enabled = true\n", "bucket_keys_enabled", slow=True,
    ),
    Fault(
        "attribute that is none", "validate", "shared_files/main.tf",
        "file_system_id  = aws_efs_file_system.this[0].id", "file_system_id  = aws_efs_file_system.this[0].idd",
        '"idd"', case="efs",
    ),
    Fault(
        "secret in the state", "validate", "valkey/main.tf",
        "  secret_string_wo         =", "  secret_string            =", "Ephemeral", case="cluster",
    ),
    Fault(
        "token in the state", "validate", "valkey/main.tf",
        "  auth_token_wo              =", "  auth_token                 =", "Ephemeral", case="cluster", slow=True,
    ),
    Fault(
        "subnets by place instead of zone", "test", "network/main.tf",
        "availability_zone_id = each.key", "availability_zone_id = var.zone_ids[0]", "not in the zone of its key",
    ),
    Fault(
        "public access", "test", "object_store/main.tf",
        "restrict_public_buckets = true", "restrict_public_buckets = false", "public access is not blocked",
    ),
    Fault(
        "readers open ReadWrite sessions", "test", "iam/main.tf",
        _READER_SESSION, _READER_SESSION.replace("reader", "none"), "a reader could open a ReadWrite session",
        case="ec2", slow=True,
    ),
    Fault(
        "zones without S3 Express pass", "test", "object_store/variables.tf",
        f"{_KNOWN_ZONES} == 0", f"{_KNOWN_ZONES} >= 0", "refuses_zone_without_express",
    ),
    Fault(
        "negative budgets pass", "test", "budget/variables.tf",
        "var.amount > 0", "var.amount != 0", "refuses_negative_amount", slow=True,
    ),
    Fault("forecast forgotten", "test", "budget/main.tf", '"FORECASTED"', '"ACTUAL"', "actual_and_forecast", slow=True),
    Fault(
        "destroy takes records along", "test", "object_store/main.tf",
        "force_destroy = var.force_destroy", "force_destroy = true", "without being asked to", slow=True,
    ),
    Fault(
        "never settles", "replan", "object_store/main.tf",
        "filter { prefix = rule.key }", 'filter { prefix = "${rule.key}${timestamp()}" }', "second plan is not empty",
    ),
    Fault(
        "cannot be destroyed", "destroy", "object_store/main.tf",
        _BUCKET, _BUCKET + "  lifecycle { prevent_destroy = true }\n", "prevent_destroy",
    ),
    Fault(
        "throughput mode that AWS has not", "values", "shared_files/main.tf",
        "= var.efs_throughput\n", '= "elastik"\n', "elastik", case="efs", slow=True,
    ),
    Fault(
        "EFA without metadata", "values", "shared_files/main.tf",
        '  metadata_configuration { mode = "AUTOMATIC" }\n', "", "needs deployment_type PERSISTENT_2",
        case="lustre", slow=True,
    ),
    Fault(
        "plain text", "values", "valkey/main.tf",
        "transit_encryption_enabled = true", "transit_encryption_enabled = false", "clear text", case="cluster",
    ),
    Fault(
        "words that EC2 does not take", "values", "shared_files/main.tf",
        '"Shared file system of kvstore"', '"kvstore\'s shared file system"', "EC2 takes letters", case="efs",
        slow=True,
    ),
    Fault(
        "transition on a directory bucket", "values", "object_store/main.tf",
        _EXPRESS_ABORT, '    transition {\n      days = 1\n      storage_class = "GLACIER"\n    }\n' + _EXPRESS_ABORT,
        "expiration and abort",
    ),
    Fault(
        "action that is none", "policies", "iam/main.tf",
        '"s3express:CreateSession"', '"s3express:CreateSesion"', "CreateSesion", case="ec2",
    ),
    Fault(
        "sessions on all buckets", "policies", "iam/main.tf",
        "resources = var.express_bucket_arns", 'resources = ["*"]', "on * without a condition", case="pods",
    ),
    Fault(
        "every action", "policies", "schedule/main.tf",
        '["autoscaling:UpdateAutoScalingGroup"]', '["autoscaling:*"]', "autoscaling:*", slow=True,
    ),
]  # fmt: skip

# What a fault needs to get as far as its step; the steps between cost time and find nothing there.
_WAY = {
    "versions": ("init", "versions"),
    "validate": ("init", "validate"),
    "test": ("init", "test"),
    "replan": ("init", "plan", "apply", "replan"),
    "destroy": ("init", "plan", "apply", "destroy"),
    "values": ("init", "plan", "values"),
    "policies": ("init", "plan", "apply", "policies"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.what, marks=[pytest.mark.slow] if f.slow else []) for f in _FAULTS]
)
def test_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    module = fault.where.partition("/")[0]
    for name in {module, "kms_key"}:
        shutil.copytree(MODULES / name, tmp_path / "modules" / name)
    path = tmp_path / "modules" / fault.where
    before = path.read_text()
    assert fault.old in before, f"{fault.where} no longer has {fault.old!r}: plant the fault anew"
    path.write_text(before.replace(fault.old, fault.new))
    folder = tmp_path / "modules" / module
    checked = check(folder, f"--var-file={variables(module, fault.case)}", steps=_WAY.get(fault.step, STEPS))
    assert (checked.code, checked.failed) == (1, fault.step), checked.said
    assert fault.why in checked.said, checked.said
