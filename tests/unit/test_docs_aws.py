"""docs/aws.md judges every service that the guides and our modules name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = dict(
    re.findall(r"^### (.+?)\n(.+?)(?=^##|\Z)", (ROOT / "docs" / "aws.md").read_text(encoding="utf-8"), re.M | re.S)
)
SERVICES = (
    "S3", "S3 Express One Zone", "S3 Intelligent-Tiering", "EFS", "FSx for Lustre", "FSx for OpenZFS",
    "ElastiCache for Valkey", "EC2 GPU instances", "Spot instances", "EC2 instance store (NVMe)", "ECS", "EKS",
    "EKS Pod Identity", "Karpenter", "EFA", "Lambda", "Bedrock", "CloudFront", "SageMaker", "IAM", "KMS",
    "Secrets Manager", "CloudTrail", "AWS Config", "CloudWatch", "X-Ray", "SNS", "Budgets", "Cost Anomaly Detection",
    "EventBridge", "VPC and gateway endpoints", "Reserved instances and Savings Plans",
)  # fmt: skip
# Prefix of a resource's type → the section about it.
RESOURCES = {
    "aws_budgets": "Budgets", "aws_ce_anomaly": "Cost Anomaly Detection", "aws_cloudtrail": "CloudTrail",
    "aws_cloudwatch_event": "EventBridge", "aws_cloudwatch": "CloudWatch", "aws_config": "AWS Config",
    "aws_dlm": "Snapshots (Data Lifecycle Manager)", "aws_efs": "EFS", "aws_eks_pod_identity": "EKS Pod Identity",
    "aws_eks": "EKS", "aws_elasticache": "ElastiCache for Valkey", "aws_fsx_lustre": "FSx for Lustre",
    "aws_fsx_openzfs": "FSx for OpenZFS", "aws_iam": "IAM", "aws_kms": "KMS", "aws_nat": "NAT gateway",
    "aws_s3_directory": "S3 Express One Zone", "aws_s3": "S3", "aws_scheduler": "EventBridge",
    "aws_secretsmanager": "Secrets Manager", "aws_sns": "SNS", "aws_vpc_endpoint": "VPC and gateway endpoints",
    "aws_xray": "X-Ray",
}  # fmt: skip


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_a_verdict_and_a_reason(service: str) -> None:
    text = SECTIONS[service].strip()
    assert len(text) > 60
    first = text.partition(".")[0]
    assert re.match(r"In (all|none|small|medium|large)|An option|Only|The default|Nothing|Off|On EC2", first), first


def test_every_service_that_a_module_uses_is_judged_to_be_in() -> None:
    used = set()
    for path in (ROOT / "terraform").rglob("*.tf"):
        used |= set(re.findall(r'^resource "(aws_[a-z0-9_]+)"', path.read_text(encoding="utf-8"), re.M))
    assert used
    for resource in sorted(used):
        section = next((name for prefix, name in RESOURCES.items() if resource.startswith(prefix)), None)
        if section is not None:
            assert not SECTIONS[section].startswith("In none"), f"{resource} is used, and docs/aws.md says: in none"
