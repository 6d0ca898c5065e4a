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
  owner   = "me"
  package = "s3://acme/wheels/"
}

run "remote_url" {
  command = plan
  assert {
    condition     = output.remote_url == "s3://kv-small-123456789012/kv?region=us-east-1&ttl=7d"
    error_message = "remote_url does not name the bucket"
  }
  assert {
    condition     = yamldecode(output.config_yaml) == { remote_url = output.remote_url, tiers = ["node:///run/kvstore/node.sock"] }
    error_message = "the node stands in front of S3"
  }
}

run "records_survive_destroy" {
  command = plan
  variables { ttl_days = 30 }
  assert {
    condition     = strcontains(output.remote_url, "ttl=30d") && !var.force_destroy
    error_message = "lifetime of records, or force_destroy"
  }
}

run "refuses_wrong_values" {
  command = plan
  variables {
    name        = "a-name-that-is-much-too-long"
    owner       = ""
    region      = "virginia"
    nat         = "none"
    package     = "s3://acme/kvstore-0.1.0-py3-none-any.whl"
    host_memory = "4"
    nvme_gib    = -1
    ttl_days    = 0.5
  }
  expect_failures = [var.name, var.owner, var.region, var.nat, var.host_memory, var.nvme_gib, var.ttl_days]
}
