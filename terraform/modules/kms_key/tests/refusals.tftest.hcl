# Wrong values are refused while planning. The messages themselves are read by tests/terraform/test_refusals.py.

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
  alias       = "kv/x"
  description = "test"
}

run "refuses_reserved_alias" {
  command = plan
  variables {
    alias = "aws/x"
  }
  expect_failures = [var.alias]
}

run "refuses_service_without_domain" {
  command = plan
  variables {
    services = ["logs"]
  }
  expect_failures = [var.services]
}

run "refuses_short_deletion" {
  command = plan
  variables {
    deletion_days = 3
  }
  expect_failures = [var.deletion_days]
}
