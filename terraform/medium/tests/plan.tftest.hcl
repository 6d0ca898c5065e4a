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
  valkey  = { mode = "none" } # its endpoint is known only when it is there
}

run "express" {
  command = plan
  assert {
    condition     = output.remote_url == "s3://kv-medium-123456789012--use1-az4--x-s3/kv?region=us-east-1&ttl=1d"
    error_message = "remote_url does not name the directory bucket of the nodes' zone"
  }
}

run "s3_below_express" {
  command = plan
  variables {
    gpu_zone_ids = ["use1-az4", "use1-az6"]
    keep_in_s3   = true
  }
  assert {
    condition     = output.remote_url == "s3://kv-medium-123456789012/kv?region=us-east-1&ttl=7d"
    error_message = "S3 is the last tier"
  }
  assert {
    condition = [for z in var.gpu_zone_ids : [for t in yamldecode(output.config_yaml_by_zone[z]).tiers : t.url]] == [
      for z in var.gpu_zone_ids : ["node:///run/kvstore/node.sock", "s3://kv-medium-123456789012--${z}--x-s3/kv?region=us-east-1&ttl=1d"]
    ]
    error_message = "each zone has its own bucket between node and S3"
  }
}

run "hours" {
  command = plan
  variables { express_ttl = "6h" }
  assert {
    condition     = strcontains(output.remote_url, "ttl=6h")
    error_message = "a lifetime of hours does not reach the URL"
  }
}

run "refuses_wrong_values" {
  command = plan
  variables {
    zone_ids    = ["use1-az4"]
    valkey      = { mode = "redis" }
    express_ttl = "90min"
  }
  expect_failures = [var.zone_ids, var.valkey, var.express_ttl]
}

run "refuses_gpu_zones_outside" {
  command = plan
  variables { gpu_zone_ids = ["use1-az1"] }
  expect_failures = [var.gpu_zone_ids]
}
