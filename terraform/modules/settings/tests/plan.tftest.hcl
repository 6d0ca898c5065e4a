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
  name        = "kv"
  config_yaml = { use1-az4 = "remote_url: s3://acme-kv/kv?region=us-east-1\n" }
  node_yaml   = "memory: 1GiB\n"
  model       = { id = "m" }
  kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/1"
}

run "configuration" {
  command = plan
  assert {
    condition     = jsondecode(aws_secretsmanager_secret_version.config.secret_string).config_yaml["use1-az4"] == var.config_yaml["use1-az4"] && length(aws_secretsmanager_secret.node_token) == 0
    error_message = "the secret does not hold the configuration, or there is a token that nobody asked for"
  }
}

run "token" {
  command = plan
  variables { node_token = true }
  assert {
    condition     = aws_secretsmanager_secret_version.node_token[0].secret_string_wo_version == 1 && aws_secretsmanager_secret_version.node_token[0].secret_string == null
    error_message = "the token is not write-only"
  }
}

run "refuses_no_configuration" {
  command = plan
  variables { config_yaml = {} }
  expect_failures = [var.config_yaml]
}

run "refuses_secrets_in_the_configuration" {
  command = plan
  variables { config_yaml = { use1-az4 = "backend_options: {s3: {secret_access_key: x}}" } }
  expect_failures = [var.config_yaml]
}

run "refuses_token_in_node_yaml" {
  command = plan
  variables { node_yaml = "memory: 1GiB\ntoken: abc\n" }
  expect_failures = [var.node_yaml]
}

run "refuses_no_model" {
  command = plan
  variables { model = { id = "" } }
  expect_failures = [var.model]
}

run "refuses_version_zero" {
  command = plan
  variables { node_token_version = 0 }
  expect_failures = [var.node_token_version]
}

run "refuses_recovery_of_a_day" {
  command = plan
  variables { recovery_days = 1 }
  expect_failures = [var.recovery_days]
}
