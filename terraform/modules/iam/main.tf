# Three roles. A reader cannot write, a writer cannot delete, only the evictor deletes. What each API call of kvstore's S3
# backend wants: GetObject and HeadObject s3:GetObject; PutObject, multipart uploads and CopyObject s3:PutObject;
# ListObjectsV2 s3:ListBucket, which also makes a missing key a 404 and not a 403; DeleteObject and DeleteObjects
# s3:DeleteObject; ListMultipartUploads s3:ListBucketMultipartUploads (the sweep); AbortMultipartUpload by its own name.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  roles       = toset(["reader", "writer", "evictor"])
  objects     = [for a in var.bucket_arns : "${a}/${var.prefix}*"]
  quarantined = [for a in var.bucket_arns : "${a}/${var.prefix}quarantine/*"]
  # Without their bucket's action lists stay empty: a statement without resources is no statement.
  object_actions = {
    reader  = ["s3:GetObject"]
    writer  = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
    evictor = ["s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
  }
  bucket_actions = {
    reader  = ["s3:ListBucket"]
    writer  = ["s3:ListBucket"]
    evictor = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
  }
  # S3 wants GenerateDataKey of who writes. A session on a directory bucket with KMS wants both, whatever its mode; a data
  # key alone writes nothing.
  key_actions = {
    reader  = concat(["kms:Decrypt"], length(var.express_bucket_arns) > 0 ? ["kms:GenerateDataKey"] : [])
    writer  = ["kms:Decrypt", "kms:GenerateDataKey"]
    evictor = ["kms:Decrypt", "kms:GenerateDataKey"] # quarantine copies
  }
}

data "aws_iam_policy_document" "data" {
  for_each = local.roles
  dynamic "statement" {
    for_each = length(var.bucket_arns) > 0 ? [1] : []
    content {
      sid       = "Records"
      actions   = local.object_actions[each.key]
      resources = local.objects
    }
  }
  dynamic "statement" {
    for_each = length(var.bucket_arns) > 0 ? [1] : []
    content {
      sid       = "Buckets"
      actions   = local.bucket_actions[each.key]
      resources = var.bucket_arns
    }
  }
  # Corrupt records are copied aside before they are deleted.
  dynamic "statement" {
    for_each = each.key == "evictor" && length(var.bucket_arns) > 0 ? [1] : []
    content {
      sid       = "Quarantine"
      actions   = ["s3:PutObject"]
      resources = local.quarantined
    }
  }
  # Directory buckets know one action. A ReadWrite session may also delete: AWS has no finer grain there.
  dynamic "statement" {
    for_each = length(var.express_bucket_arns) > 0 ? [1] : []
    content {
      sid       = "Express"
      actions   = ["s3express:CreateSession"]
      resources = var.express_bucket_arns
      dynamic "condition" {
        for_each = each.key == "reader" ? [1] : []
        content {
          test     = "StringEquals"
          variable = "s3express:SessionMode"
          values   = ["ReadOnly"]
        }
      }
    }
  }
  dynamic "statement" {
    for_each = length(var.kms_key_arns) > 0 ? [1] : []
    content {
      sid       = "Keys"
      actions   = local.key_actions[each.key]
      resources = var.kms_key_arns
    }
  }
}

# What a node does besides: read its configuration, install, tell how it is.
data "aws_iam_policy_document" "node" {
  dynamic "statement" {
    for_each = length(var.secret_arns) > 0 ? [1] : []
    content {
      sid       = "Secrets"
      actions   = concat(["secretsmanager:GetSecretValue"], var.trust == "pods" ? ["secretsmanager:DescribeSecret"] : []) # the driver of pods looks for new versions
      resources = var.secret_arns
    }
  }
  dynamic "statement" {
    for_each = length(var.download_arns) > 0 ? [1] : []
    content {
      sid       = "Downloads"
      actions   = ["s3:GetObject"]
      resources = var.download_arns
    }
  }
  dynamic "statement" {
    for_each = length(var.model_urls) > 0 ? [1] : []
    content {
      sid       = "Models"
      actions   = ["s3:GetObject"]
      resources = [for u in var.model_urls : "arn:${data.aws_partition.current.partition}:s3:::${trimsuffix(trimprefix(u, "s3://"), "/")}/*"]
    }
  }
  # One for each folder: the bucket and the prefix belong together.
  dynamic "statement" {
    for_each = var.model_urls
    content {
      sid       = "ListModels${statement.key}"
      actions   = ["s3:ListBucket"]
      resources = ["arn:${data.aws_partition.current.partition}:s3:::${regex("^s3://([^/]+)", statement.value)[0]}"]
      condition {
        test     = "StringLike"
        variable = "s3:prefix"
        values   = ["${trimsuffix(regex("^s3://[^/]+/(.+)$", statement.value)[0], "/")}*"]
      }
    }
  }
  dynamic "statement" {
    for_each = length(var.ecr_repository_arns) > 0 ? [1] : []
    content {
      sid       = "Images"
      actions   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
      resources = var.ecr_repository_arns
    }
  }
  # These know no resources; a condition stands in.
  dynamic "statement" {
    for_each = length(var.ecr_repository_arns) > 0 ? [1] : []
    content {
      sid       = "ImageLogin"
      actions   = ["ecr:GetAuthorizationToken"]
      resources = ["*"]
      condition {
        test     = "StringEquals"
        variable = "aws:RequestedRegion"
        values   = [data.aws_region.current.region]
      }
    }
  }
  statement {
    sid       = "Metrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = var.metric_namespaces
    }
  }
  dynamic "statement" {
    for_each = length(var.log_group_arns) > 0 ? [1] : []
    content {
      sid       = "Logs"
      actions   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
      resources = flatten([for a in var.log_group_arns : [a, "${a}:*"]])
    }
  }
  dynamic "statement" {
    for_each = var.xray ? [1] : []
    content {
      sid       = "Traces"
      actions   = ["xray:PutTraceSegments", "xray:PutTelemetryRecords", "xray:GetSamplingRules", "xray:GetSamplingTargets"]
      resources = ["*"]
      condition {
        test     = "StringEquals"
        variable = "aws:RequestedRegion"
        values   = [data.aws_region.current.region]
      }
    }
  }
}

data "aws_iam_policy_document" "trust" {
  dynamic "statement" {
    for_each = var.trust == "ec2" ? [1] : []
    content {
      actions = ["sts:AssumeRole"]
      principals {
        type        = "Service"
        identifiers = ["ec2.amazonaws.com"]
      }
    }
  }
  dynamic "statement" {
    for_each = var.trust == "pods" ? [1] : []
    content {
      actions = ["sts:AssumeRole", "sts:TagSession"]
      principals {
        type        = "Service"
        identifiers = ["pods.eks.amazonaws.com"]
      }
      condition {
        test     = "StringEquals"
        variable = "aws:SourceAccount"
        values   = [data.aws_caller_identity.current.account_id]
      }
      dynamic "condition" {
        for_each = var.cluster_arn == null ? [] : [var.cluster_arn]
        content {
          test     = "ArnEquals"
          variable = "aws:SourceArn"
          values   = [condition.value]
        }
      }
    }
  }
  dynamic "statement" {
    for_each = length(var.trusted_arns) > 0 ? [1] : []
    content {
      sid     = "People"
      actions = ["sts:AssumeRole"]
      principals {
        type        = "AWS"
        identifiers = var.trusted_arns
      }
    }
  }
}

resource "aws_iam_role" "this" {
  for_each             = local.roles
  name_prefix          = "${var.name}-${each.key}-"
  description          = "kvstore: ${each.key} of records"
  assume_role_policy   = data.aws_iam_policy_document.trust.json
  permissions_boundary = var.permissions_boundary
  max_session_duration = 3600
  tags                 = var.tags
}

resource "aws_iam_role_policy" "data" {
  for_each = local.roles
  name     = "records"
  role     = aws_iam_role.this[each.key].id
  policy   = data.aws_iam_policy_document.data[each.key].json
}

resource "aws_iam_role_policy" "node" {
  for_each = local.roles
  name     = "node"
  role     = aws_iam_role.this[each.key].id
  policy   = data.aws_iam_policy_document.node.json
}

resource "aws_iam_role_policy_attachment" "ssm" {
  for_each   = toset(var.trust == "ec2" && var.ssm ? local.roles : [])
  role       = aws_iam_role.this[each.key].name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "node" {
  count       = var.trust == "ec2" ? 1 : 0
  name_prefix = "${var.name}-node-"
  role        = aws_iam_role.this["writer"].name
  tags        = var.tags
}
