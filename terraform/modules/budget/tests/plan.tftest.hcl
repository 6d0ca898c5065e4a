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
  amount = 8000
  emails = ["ops@example.com"]
}

run "actual_and_forecast" {
  command = plan
  assert {
    condition     = { for n in aws_budgets_budget.this.notification : n.notification_type => n.threshold } == { ACTUAL = 80, FORECASTED = 100 }
    error_message = "not 80 % actual and 100 % forecast"
  }
  assert {
    condition     = aws_budgets_budget.this.limit_amount == "8000.00" && aws_budgets_budget.this.limit_unit == "USD" && aws_budgets_budget.this.time_unit == "MONTHLY"
    error_message = "not 8,000 $ a month"
  }
  assert {
    condition     = aws_ce_anomaly_monitor.this[0].monitor_type == "DIMENSIONAL" && aws_ce_anomaly_monitor.this[0].monitor_dimension == "SERVICE" && length(aws_ce_anomaly_subscription.emails) == 1 && length(aws_ce_anomaly_subscription.topic) == 0
    error_message = "wrong anomaly detection"
  }
}

run "one_project" {
  command = plan
  variables {
    project       = "kvstore"
    sns_topic_arn = "arn:aws:sns:us-east-1:123456789012:kv-alarms"
  }
  assert {
    condition     = one(aws_budgets_budget.this.cost_filter).values == tolist(["user:Project$kvstore"])
    error_message = "the budget does not count the tag Project"
  }
  assert {
    condition     = jsondecode(aws_ce_anomaly_monitor.this[0].monitor_specification).Tags.Values == ["kvstore"] && aws_ce_anomaly_monitor.this[0].monitor_dimension == null && aws_ce_anomaly_subscription.topic[0].frequency == "IMMEDIATE"
    error_message = "anomalies are not those of the project, or are not told at once"
  }
}

run "no_anomalies" {
  command = plan
  variables { anomalies = false }
  assert {
    condition     = length(aws_ce_anomaly_monitor.this) == 0 && output.anomaly_monitor_arn == null
    error_message = "anomaly detection that nobody asked for"
  }
}
