# CloudTrail and AWS Config, as options: most accounts have them centrally.

locals {
  audit = var.cloudtrail || var.config_recorder
  trail = "${local.arn}:cloudtrail:${local.region}:${local.account}:trail/${var.name}" # known before it is made
  # Who writes there, and what it says of itself: CloudTrail for which trail it comes, Config for which account.
  auditors = { cloudtrail = ["aws:SourceArn", local.trail], config = ["aws:SourceAccount", local.account] }
}

resource "aws_s3_bucket" "audit" {
  count         = local.audit ? 1 : 0
  bucket        = "${var.name}-audit-${local.account}-${local.region}"
  force_destroy = false
  tags          = var.tags
}

resource "aws_s3_bucket_public_access_block" "audit" {
  count                   = local.audit ? 1 : 0
  bucket                  = aws_s3_bucket.audit[0].bucket
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "audit" {
  count  = local.audit ? 1 : 0
  bucket = aws_s3_bucket.audit[0].bucket
  rule { object_ownership = "BucketOwnerEnforced" }
}

resource "aws_s3_bucket_versioning" "audit" {
  count  = local.audit ? 1 : 0
  bucket = aws_s3_bucket.audit[0].bucket
  versioning_configuration { status = "Enabled" }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "audit" {
  count  = local.audit ? 1 : 0
  bucket = aws_s3_bucket.audit[0].bucket
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "audit" {
  count  = local.audit ? 1 : 0
  bucket = aws_s3_bucket.audit[0].bucket
  rule {
    id     = "expire"
    status = "Enabled"
    filter { prefix = "" }
    expiration { days = var.audit_days }
    noncurrent_version_expiration { noncurrent_days = 30 }
  }
  rule {
    id     = "uploads"
    status = "Enabled"
    filter { prefix = "" }
    abort_incomplete_multipart_upload { days_after_initiation = 1 }
  }
}

data "aws_iam_policy_document" "audit" {
  count = local.audit ? 1 : 0
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.audit[0].arn, "${aws_s3_bucket.audit[0].arn}/*"]
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
  dynamic "statement" {
    for_each = local.auditors
    content {
      sid       = "Look${title(statement.key)}"
      actions   = ["s3:GetBucketAcl", "s3:ListBucket"]
      resources = [aws_s3_bucket.audit[0].arn]
      principals {
        type        = "Service"
        identifiers = ["${statement.key}.amazonaws.com"]
      }
      condition {
        test     = "StringEquals"
        variable = statement.value[0]
        values   = [statement.value[1]]
      }
    }
  }
  dynamic "statement" {
    for_each = local.auditors
    content {
      sid       = "Write${title(statement.key)}"
      actions   = ["s3:PutObject"]
      resources = ["${aws_s3_bucket.audit[0].arn}/AWSLogs/${local.account}/*"]
      principals {
        type        = "Service"
        identifiers = ["${statement.key}.amazonaws.com"]
      }
      condition {
        test     = "StringEquals"
        variable = statement.value[0]
        values   = [statement.value[1]]
      }
    }
  }
}

resource "aws_s3_bucket_policy" "audit" {
  count  = local.audit ? 1 : 0
  bucket = aws_s3_bucket.audit[0].bucket
  policy = data.aws_iam_policy_document.audit[0].json
}

resource "aws_cloudtrail" "this" {
  count                         = var.cloudtrail ? 1 : 0
  name                          = var.name
  s3_bucket_name                = aws_s3_bucket.audit[0].bucket
  kms_key_id                    = aws_kms_key.this.arn
  is_multi_region_trail         = true
  include_global_service_events = true
  enable_log_file_validation    = true
  tags                          = var.tags
  depends_on                    = [aws_s3_bucket_policy.audit]
}

data "aws_iam_policy_document" "config_trust" {
  count = var.config_recorder ? 1 : 0
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["config.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_iam_role" "config" {
  count              = var.config_recorder ? 1 : 0
  name               = "${var.name}-config"
  assume_role_policy = data.aws_iam_policy_document.config_trust[0].json
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "config" {
  count      = var.config_recorder ? 1 : 0
  role       = aws_iam_role.config[0].name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AWS_ConfigRole"
}

data "aws_iam_policy_document" "config" {
  count = var.config_recorder ? 1 : 0
  statement {
    sid       = "Files"
    actions   = ["s3:PutObject"]
    resources = ["${aws_s3_bucket.audit[0].arn}/AWSLogs/${local.account}/*"]
  }
  statement {
    sid       = "Bucket"
    actions   = ["s3:GetBucketAcl"]
    resources = [aws_s3_bucket.audit[0].arn]
  }
  statement {
    sid       = "Key"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [aws_kms_key.this.arn]
  }
}

resource "aws_iam_role_policy" "config" {
  count  = var.config_recorder ? 1 : 0
  name   = "deliver"
  role   = aws_iam_role.config[0].name
  policy = data.aws_iam_policy_document.config[0].json
}

resource "aws_config_configuration_recorder" "this" {
  count    = var.config_recorder ? 1 : 0
  name     = var.name
  role_arn = aws_iam_role.config[0].arn
  recording_group {
    all_supported                 = true
    include_global_resource_types = true
  }
}

resource "aws_config_delivery_channel" "this" {
  count          = var.config_recorder ? 1 : 0
  name           = var.name
  s3_bucket_name = aws_s3_bucket.audit[0].bucket
  s3_kms_key_arn = aws_kms_key.this.arn
  depends_on     = [aws_config_configuration_recorder.this, aws_s3_bucket_policy.audit]
}

resource "aws_config_configuration_recorder_status" "this" {
  count      = var.config_recorder ? 1 : 0
  name       = aws_config_configuration_recorder.this[0].name
  is_enabled = true
  depends_on = [aws_config_delivery_channel.this]
}
