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
  name   = "kv"
  emails = ["ops@example.com"]
}

run "refuses_upper_case_name" {
  command = plan
  variables {
    name = "KV"
  }
  expect_failures = [var.name]
}

run "refuses_double_hyphen_in_name" {
  command = plan
  variables {
    name = "k--v"
  }
  expect_failures = [var.name]
}

run "refuses_long_name" {
  command = plan
  variables {
    name = "kv-xxxxxxxxxxxxxxxxxxxx"
  }
  expect_failures = [var.name]
}

run "refuses_negative_amount" {
  command = plan
  variables {
    amount = -5
  }
  expect_failures = [var.amount]
}

run "refuses_zero_amount" {
  command = plan
  variables {
    amount = 0
  }
  expect_failures = [var.amount]
}

run "refuses_malformed_email" {
  command = plan
  variables {
    emails = ["ops"]
  }
  expect_failures = [var.emails]
}

run "refuses_eleven_emails" {
  command = plan
  variables {
    emails = ["a0@example.com", "a1@example.com", "a2@example.com", "a3@example.com", "a4@example.com", "a5@example.com", "a6@example.com", "a7@example.com", "a8@example.com", "a9@example.com", "a10@example.com"]
  }
  expect_failures = [var.emails]
}

run "refuses_topic_name" {
  command = plan
  variables {
    sns_topic_arn = "alarms"
  }
  expect_failures = [var.sns_topic_arn]
}

run "refuses_zero_percent" {
  command = plan
  variables {
    actual_percent = 0
  }
  expect_failures = [var.actual_percent]
}

run "refuses_negative_forecast" {
  command = plan
  variables {
    forecast_percent = -1
  }
  expect_failures = [var.forecast_percent]
}

run "refuses_empty_project" {
  command = plan
  variables {
    project = ""
  }
  expect_failures = [var.project]
}

run "refuses_negative_anomaly" {
  command = plan
  variables {
    anomaly_usd = -1
  }
  expect_failures = [var.anomaly_usd]
}

run "refuses_nobody_to_tell" {
  command = plan
  variables {
    emails = []
  }
  expect_failures = [aws_budgets_budget.this]
}
