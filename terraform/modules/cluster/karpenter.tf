# What Karpenter needs in AWS: a role, and a queue on which EC2 says which nodes are about to go. The chart itself is
# installed with the output karpenter_values.

locals {
  ec2      = "${local.arn}:ec2:${var.region}"
  owned    = "kubernetes.io/cluster/${var.name}"
  profiles = "${local.arn}:iam::${local.account}:instance-profile/*"
  events = {
    spot      = { source = ["aws.ec2"], detail-type = ["EC2 Spot Instance Interruption Warning"] }
    rebalance = { source = ["aws.ec2"], detail-type = ["EC2 Instance Rebalance Recommendation"] }
    state     = { source = ["aws.ec2"], detail-type = ["EC2 Instance State-change Notification"] }
    health    = { source = ["aws.health"], detail-type = ["AWS Health Event"] }
  }
}

resource "aws_sqs_queue" "interruption" {
  name                      = "${var.name}-karpenter"
  message_retention_seconds = 300
  sqs_managed_sse_enabled   = true
  tags                      = var.tags
}

data "aws_iam_policy_document" "interruption" {
  statement {
    sid       = "Events"
    actions   = ["sqs:SendMessage"]
    resources = [aws_sqs_queue.interruption.arn]
    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }
    condition {
      test     = "ArnEquals"
      variable = "aws:SourceArn"
      values   = [for r in aws_cloudwatch_event_rule.interruption : r.arn]
    }
  }
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["sqs:*"]
    resources = [aws_sqs_queue.interruption.arn]
    principals {
      type        = "AWS"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_sqs_queue_policy" "interruption" {
  queue_url = aws_sqs_queue.interruption.id
  policy    = data.aws_iam_policy_document.interruption.json
}

resource "aws_cloudwatch_event_rule" "interruption" {
  for_each      = local.events
  name          = "${var.name}-karpenter-${each.key}"
  description   = "For Karpenter: ${each.value.detail-type[0]}"
  event_pattern = jsonencode(each.value)
  tags          = var.tags
}

resource "aws_cloudwatch_event_target" "interruption" {
  for_each = local.events
  rule     = aws_cloudwatch_event_rule.interruption[each.key].name
  arn      = aws_sqs_queue.interruption.arn
}

# After the policy that Karpenter's own guide gives: everything it makes carries the tag of this cluster, and it touches
# nothing without.
data "aws_iam_policy_document" "karpenter" {
  statement {
    sid       = "LaunchFrom"
    actions   = ["ec2:RunInstances", "ec2:CreateFleet"]
    resources = concat([for what in ["image", "snapshot"] : "${local.ec2}::${what}/*"], [for what in ["security-group", "subnet", "placement-group", "capacity-reservation"] : "${local.ec2}:*:${what}/*"])
  }
  statement {
    sid       = "LaunchByTemplate"
    actions   = ["ec2:RunInstances", "ec2:CreateFleet"]
    resources = ["${local.ec2}:*:launch-template/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/${local.owned}"
      values   = ["owned"]
    }
  }
  statement {
    sid       = "Make"
    actions   = ["ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateLaunchTemplate"]
    resources = [for what in ["fleet", "instance", "volume", "network-interface", "launch-template", "spot-instances-request"] : "${local.ec2}:*:${what}/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/${local.owned}"
      values   = ["owned"]
    }
  }
  statement {
    sid       = "TagWhatIsMade"
    actions   = ["ec2:CreateTags"]
    resources = [for what in ["fleet", "instance", "volume", "network-interface", "launch-template", "spot-instances-request"] : "${local.ec2}:*:${what}/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/${local.owned}"
      values   = ["owned"]
    }
    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["RunInstances", "CreateFleet", "CreateLaunchTemplate"]
    }
  }
  statement {
    sid       = "TagInstances"
    actions   = ["ec2:CreateTags"]
    resources = ["${local.ec2}:*:instance/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/${local.owned}"
      values   = ["owned"]
    }
    condition {
      test     = "ForAllValues:StringEquals"
      variable = "aws:TagKeys"
      values   = ["eks:eks-cluster-name", "karpenter.sh/nodeclaim", "Name"]
    }
  }
  statement {
    sid       = "Remove"
    actions   = ["ec2:TerminateInstances", "ec2:DeleteLaunchTemplate"]
    resources = ["${local.ec2}:*:instance/*", "${local.ec2}:*:launch-template/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/${local.owned}"
      values   = ["owned"]
    }
  }
  statement {
    sid = "Look"
    actions = [
      "ec2:DescribeCapacityReservations", "ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeInstanceStatus", "ec2:DescribeInstanceTypeOfferings",
      "ec2:DescribeInstanceTypes", "ec2:DescribeLaunchTemplates", "ec2:DescribePlacementGroups", "ec2:DescribeSecurityGroups", "ec2:DescribeSpotPriceHistory", "ec2:DescribeSubnets",
    ]
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestedRegion"
      values   = [var.region]
    }
  }
  # Prices are asked for in one of these, wherever the cluster is.
  statement {
    sid       = "Prices"
    actions   = ["pricing:GetProducts"]
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestedRegion"
      values   = ["us-east-1", "eu-central-1", "ap-south-1"]
    }
  }
  statement {
    sid       = "Images"
    actions   = ["ssm:GetParameter"]
    resources = ["${local.arn}:ssm:${var.region}::parameter/aws/service/*"]
  }
  statement {
    sid       = "Interruptions"
    actions   = ["sqs:DeleteMessage", "sqs:GetQueueUrl", "sqs:ReceiveMessage"]
    resources = [aws_sqs_queue.interruption.arn]
  }
  statement {
    sid       = "NodeRole"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.node["gpu"].arn]
    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }
  statement {
    sid       = "MakeProfiles"
    actions   = ["iam:CreateInstanceProfile", "iam:TagInstanceProfile"]
    resources = [local.profiles]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/${local.owned}"
      values   = ["owned"]
    }
  }
  statement {
    sid       = "KeepProfiles"
    actions   = ["iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile", "iam:DeleteInstanceProfile"]
    resources = [local.profiles]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/${local.owned}"
      values   = ["owned"]
    }
  }
  statement {
    sid       = "SeeProfiles"
    actions   = ["iam:GetInstanceProfile", "iam:ListInstanceProfiles"]
    resources = [local.profiles]
  }
  statement {
    sid       = "Cluster"
    actions   = ["eks:DescribeCluster"]
    resources = [aws_eks_cluster.this.arn]
  }
}

resource "aws_iam_role" "karpenter" {
  name_prefix        = "${var.name}-karpenter-"
  description        = "kvstore: Karpenter"
  assume_role_policy = data.aws_iam_policy_document.trust["pods"].json
  tags               = var.tags
}

resource "aws_iam_role_policy" "karpenter" {
  name   = "karpenter"
  role   = aws_iam_role.karpenter.id
  policy = data.aws_iam_policy_document.karpenter.json
}

resource "aws_eks_pod_identity_association" "karpenter" {
  cluster_name    = aws_eks_cluster.this.name
  namespace       = "kube-system"
  service_account = "karpenter"
  role_arn        = aws_iam_role.karpenter.arn
  tags            = var.tags
}
