# Where the provider is simulated (tests/terraform) or mocked, as here, nothing is asked of AWS. To run this against your
# account, remove the mock_provider blocks: everything is only planned.
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
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_default_tags" {
    defaults = { tags = { Project = "kvstore" } }
  }
}

variables {
  owner = "me"
  image = "acme/kvstore:0.1.0"
  gpu   = { ami_alias = "al2023@v20251029" }
}

run "tiers_by_zone" {
  command = plan
  assert {
    condition     = output.remote_url == "s3://kv-large-123456789012/kv?region=us-east-1&ttl=7d"
    error_message = "S3 is the last tier"
  }
  assert {
    condition = [for z in var.gpu_zone_ids : [for t in yamldecode(output.config_yaml_by_zone[z]).tiers : t.url]] == [
      for z in var.gpu_zone_ids : ["node://node-${z}.kvstore.svc:7070?discover=dns", "s3://kv-large-123456789012--${z}--x-s3/kv?region=us-east-1&ttl=1d"]
    ]
    error_message = "each zone has its own nodes and bucket"
  }
}

run "without_s3" {
  command = plan
  variables { keep_in_s3 = false }
  assert {
    condition     = output.remote_url == "s3://kv-large-123456789012--use1-az4--x-s3/kv?region=us-east-1&ttl=1d"
    error_message = "S3 Express is the last tier"
  }
}

run "refuses_wrong_values" {
  command = plan
  variables {
    nat          = "none"
    gpu_zone_ids = ["use1-az1"]
    express_ttl  = "1w"
  }
  expect_failures = [var.nat, var.gpu_zone_ids, var.express_ttl]
}
