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
  alias       = "kv/records"
  description = "test"
}

run "rotates" {
  command = plan
  assert {
    condition     = aws_kms_key.this.enable_key_rotation && aws_kms_key.this.deletion_window_in_days == 30
    error_message = "the key does not rotate, or can be lost at once"
  }
  assert {
    condition     = aws_kms_alias.this.name == "alias/kv/records"
    error_message = "wrong alias"
  }
}

run "services_only_for_this_account" {
  command = plan
  variables { services = ["logs.us-east-1.amazonaws.com"] }
  assert {
    condition     = length(data.aws_iam_policy_document.this.statement) == 3 && one([for s in data.aws_iam_policy_document.this.statement : one(s.condition).variable if s.sid == "ServicesUse"]) == "aws:SourceAccount"
    error_message = "a service may use the key for other accounts"
  }
}
