# One S3 bucket, and one S3 Express directory bucket for each zone. They hold a cache: no versions, no replicas, no
# backups; what is lost is computed again.

data "aws_caller_identity" "current" {}
data "aws_region" "current" {}

locals {
  bucket       = coalesce(var.bucket_base, "${var.name}-${data.aws_caller_identity.current.account_id}")
  express      = { for z in var.express_zone_ids : z => "${local.bucket}--${z}--x-s3" }
  region       = data.aws_region.current.region
  region_known = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", local.region)) # a mocked provider has no real region
}

module "key" {
  source        = "../kms_key"
  alias         = "${var.name}/records"
  description   = "kvstore: records in S3 and S3 Express"
  deletion_days = var.kms_deletion_days
  # S3's lifecycle service opens sessions on directory buckets by itself.
  services = var.express_kms && length(var.express_zone_ids) > 0 ? ["lifecycle.s3.amazonaws.com"] : []
  tags     = var.tags
}

# ---- S3

resource "aws_s3_bucket" "this" {
  bucket        = local.bucket
  force_destroy = var.force_destroy
  tags          = var.tags
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.bucket
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.bucket
  rule { object_ownership = "BucketOwnerEnforced" }
}

# Without the bucket key every object would be a request to KMS.
resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.bucket
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = module.key.arn
    }
  }
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OnlyTLS"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket     = aws_s3_bucket.this.bucket
  policy     = data.aws_iam_policy_document.bucket.json
  depends_on = [aws_s3_bucket_public_access_block.this]
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.bucket
  dynamic "rule" {
    for_each = var.expiration_days
    content {
      id     = "expire-${rule.key == "" ? "all" : trimsuffix(rule.key, "/")}"
      status = "Enabled"
      filter { prefix = rule.key }
      expiration { days = rule.value }
    }
  }
  dynamic "rule" {
    for_each = var.expiration_days
    content {
      id     = "quarantine-${rule.key == "" ? "all" : trimsuffix(rule.key, "/")}"
      status = "Enabled"
      filter { prefix = "${rule.key}quarantine/" }
      expiration { days = var.quarantine_days }
    }
  }
  dynamic "rule" {
    for_each = var.intelligent_tiering ? var.expiration_days : {}
    content {
      id     = "tiering-${rule.key == "" ? "all" : trimsuffix(rule.key, "/")}"
      status = "Enabled"
      filter { prefix = rule.key }
      transition {
        days          = 0
        storage_class = "INTELLIGENT_TIERING"
      }
    }
  }
  rule {
    id     = "abort-uploads"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload { days_after_initiation = 1 }
  }
}

# Request metrics: without them CloudWatch has no 5xxErrors to alarm on.
resource "aws_s3_bucket_metric" "all" {
  bucket = aws_s3_bucket.this.bucket
  name   = "EntireBucket"
}

# ---- S3 Express One Zone

resource "aws_s3_directory_bucket" "this" {
  for_each      = local.express
  bucket        = each.value
  force_destroy = var.force_destroy
  tags          = var.tags
  location { name = each.key }
  lifecycle {
    precondition {
      condition     = !local.region_known || contains(lookup(var.s3express_zones, local.region, []), each.key)
      error_message = "express_zone_ids: ${each.key} is not a zone with S3 Express of the provider's region ${local.region}; write one of ${join(", ", lookup(var.s3express_zones, local.region, ["(none is known there: leave it empty, or write another region)"]))}."
    }
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "express" {
  for_each = var.express_kms ? local.express : {}
  bucket   = aws_s3_directory_bucket.this[each.key].bucket
  rule {
    bucket_key_enabled = true # cannot be off there
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = module.key.arn
    }
  }
}

data "aws_iam_policy_document" "express" {
  for_each = aws_s3_directory_bucket.this
  # Without this statement the lifecycle rules below expire nothing.
  statement {
    sid       = "Lifecycle"
    actions   = ["s3express:CreateSession"]
    resources = [each.value.arn]
    principals {
      type        = "Service"
      identifiers = ["lifecycle.s3.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "s3express:SessionMode"
      values   = ["ReadWrite"]
    }
  }
  statement {
    sid       = "OnlyTLS"
    effect    = "Deny"
    actions   = ["s3express:CreateSession"]
    resources = [each.value.arn]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "express" {
  for_each = aws_s3_directory_bucket.this
  bucket   = each.value.bucket
  policy   = data.aws_iam_policy_document.express[each.key].json
}

# Directory buckets know expiration and abort only: no transitions, no tag filters.
resource "aws_s3_bucket_lifecycle_configuration" "express" {
  for_each = aws_s3_directory_bucket.this
  bucket   = each.value.bucket
  dynamic "rule" {
    for_each = coalesce(var.express_expiration_days, var.expiration_days)
    content {
      id     = "expire-${rule.key == "" ? "all" : trimsuffix(rule.key, "/")}"
      status = "Enabled"
      filter { prefix = rule.key }
      expiration { days = rule.value }
    }
  }
  rule {
    id     = "abort-uploads"
    status = "Enabled"
    filter { prefix = "" }
    abort_incomplete_multipart_upload { days_after_initiation = 1 }
  }
  depends_on = [aws_s3_bucket_policy.express]
}
