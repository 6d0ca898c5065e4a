mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { region = "us-east-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  name             = "kv"
  bucket_base      = "acme-kv"
  express_zone_ids = ["use1-az4", "use1-az6"]
}

run "names" {
  command = plan
  assert {
    condition     = output.bucket == "acme-kv" && output.express_buckets == { use1-az4 = "acme-kv--use1-az4--x-s3", use1-az6 = "acme-kv--use1-az6--x-s3" }
    error_message = "wrong names of buckets"
  }
  assert {
    condition     = alltrue([for z, b in aws_s3_directory_bucket.this : one(b.location).name == z])
    error_message = "a directory bucket is not in the zone of its name"
  }
}

run "longest_name_fits" {
  command = plan
  variables { bucket_base = "a23456789-123456789-123456789-123456789-1234567" }
  assert {
    condition     = length(output.express_buckets["use1-az4"]) == 63
    error_message = "47 characters and --use1-az4--x-s3 make 63"
  }
}

run "default_name_has_the_account" {
  command = plan
  variables { bucket_base = null }
  assert {
    condition     = output.bucket == "kv-123456789012"
    error_message = "the default name is not NAME-ACCOUNT"
  }
}

run "closed_and_encrypted" {
  command = plan
  assert {
    condition     = aws_s3_bucket_public_access_block.this.block_public_acls && aws_s3_bucket_public_access_block.this.block_public_policy && aws_s3_bucket_public_access_block.this.ignore_public_acls && aws_s3_bucket_public_access_block.this.restrict_public_buckets
    error_message = "public access is not blocked"
  }
  assert {
    condition     = one(aws_s3_bucket_ownership_controls.this.rule).object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs are not off"
  }
  assert {
    condition     = alltrue([for e in concat([aws_s3_bucket_server_side_encryption_configuration.this], values(aws_s3_bucket_server_side_encryption_configuration.express)) : one(e.rule).bucket_key_enabled && one(one(e.rule).apply_server_side_encryption_by_default).sse_algorithm == "aws:kms"])
    error_message = "not KMS with a bucket key"
  }
  assert {
    condition     = one(data.aws_iam_policy_document.bucket.statement).effect == "Deny" && one(one(data.aws_iam_policy_document.bucket.statement).condition).variable == "aws:SecureTransport"
    error_message = "the policy does not refuse plain HTTP"
  }
  assert {
    condition     = !aws_s3_bucket.this.force_destroy && alltrue([for b in aws_s3_directory_bucket.this : !b.force_destroy])
    error_message = "destroy would delete records without being asked to"
  }
}

run "lifecycle" {
  command = plan
  variables { expiration_days = { "kv/" = 3, "sessions/" = 30 } }
  assert {
    condition     = { for r in aws_s3_bucket_lifecycle_configuration.this.rule : r.id => one(r.expiration[*].days) if length(r.expiration) > 0 } == { expire-kv = 3, expire-sessions = 30, quarantine-kv = 7, quarantine-sessions = 7 }
    error_message = "wrong days of expiry"
  }
  assert {
    condition     = one([for r in aws_s3_bucket_lifecycle_configuration.this.rule : one(r.abort_incomplete_multipart_upload).days_after_initiation if r.id == "abort-uploads"]) == 1
    error_message = "unfinished uploads stay"
  }
  assert {
    condition     = alltrue([for c in aws_s3_bucket_lifecycle_configuration.express : alltrue([for r in c.rule : length(r.transition) == 0]) && length(c.rule) == 3])
    error_message = "a directory bucket knows no transitions; it has a rule for each prefix and one for uploads"
  }
  assert {
    condition     = alltrue([for d in data.aws_iam_policy_document.express : one([for s in d.statement : one(flatten([for p in s.principals : p.identifiers])) if s.sid == "Lifecycle"]) == "lifecycle.s3.amazonaws.com"])
    error_message = "without this statement directory buckets expire nothing"
  }
}

run "express_expires_sooner" {
  command = plan
  variables { express_expiration_days = { "kv/" = 1 } }
  assert {
    condition     = alltrue([for c in aws_s3_bucket_lifecycle_configuration.express : [for r in c.rule : one(r.expiration[*].days) if r.id == "expire-kv"] == [1]])
    error_message = "the dear storage is kept as long as the cheap one"
  }
  assert {
    condition     = [for r in aws_s3_bucket_lifecycle_configuration.this.rule : one(r.expiration[*].days) if r.id == "expire-kv"] == [7]
    error_message = "S3 expires as S3 Express does"
  }
}

run "no_transitions_by_default" {
  command = plan
  assert {
    condition     = alltrue([for r in aws_s3_bucket_lifecycle_configuration.this.rule : length(r.transition) == 0])
    error_message = "records move to another class without being asked to"
  }
}

run "intelligent_tiering" {
  command = plan
  variables { intelligent_tiering = true }
  assert {
    condition     = one([for r in aws_s3_bucket_lifecycle_configuration.this.rule : one(r.transition).storage_class if r.id == "tiering-kv"]) == "INTELLIGENT_TIERING"
    error_message = "records do not move to Intelligent-Tiering"
  }
}

run "express_without_kms" {
  command = plan
  variables { express_kms = false }
  assert {
    condition     = length(aws_s3_bucket_server_side_encryption_configuration.express) == 0
    error_message = "express_kms = false still sets KMS"
  }
}

run "no_express" {
  command = plan
  variables { express_zone_ids = [] }
  assert {
    condition     = output.express_buckets == {} && output.express_bucket_arns == {}
    error_message = "directory buckets that nobody asked for"
  }
}
