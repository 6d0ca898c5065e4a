# What the deployment may cost, and whom to tell before it has.

locals {
  topics = var.sns_topic_arn == null ? [] : [var.sns_topic_arn]
}

resource "aws_budgets_budget" "this" {
  name         = var.name
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = format("%.2f", var.amount)
  limit_unit   = "USD"
  tags         = var.tags
  dynamic "cost_filter" {
    for_each = var.project == null ? [] : [var.project]
    content {
      name   = "TagKeyValue"
      values = [format("user:Project$%s", cost_filter.value)]
    }
  }
  notification {
    comparison_operator        = "GREATER_THAN"
    notification_type          = "ACTUAL"
    threshold                  = var.actual_percent
    threshold_type             = "PERCENTAGE"
    subscriber_email_addresses = var.emails
    subscriber_sns_topic_arns  = local.topics
  }
  notification {
    comparison_operator        = "GREATER_THAN"
    notification_type          = "FORECASTED"
    threshold                  = var.forecast_percent
    threshold_type             = "PERCENTAGE"
    subscriber_email_addresses = var.emails
    subscriber_sns_topic_arns  = local.topics
  }
  lifecycle {
    precondition {
      condition     = length(var.emails) + length(local.topics) > 0
      error_message = "budget: nobody would be told; write emails = [\"ops@example.com\"] or sns_topic_arn."
    }
  }
}

# ---- Cost Anomaly Detection

# By tag where there is one; else by service, of which an account may have one monitor only.
resource "aws_ce_anomaly_monitor" "this" {
  count             = var.anomalies ? 1 : 0
  name              = "${var.name}-costs"
  monitor_type      = var.project == null ? "DIMENSIONAL" : "CUSTOM"
  monitor_dimension = var.project == null ? "SERVICE" : null
  monitor_specification = var.project == null ? null : jsonencode({
    And            = null
    CostCategories = null
    Dimensions     = null
    Not            = null
    Or             = null
    Tags           = { Key = "Project", MatchOptions = null, Values = [var.project] }
  })
  tags = var.tags
}

# E-mails are sent once a day; a topic is told at once.
resource "aws_ce_anomaly_subscription" "emails" {
  count            = var.anomalies && length(var.emails) > 0 ? 1 : 0
  name             = "${var.name}-costs-daily"
  frequency        = "DAILY"
  monitor_arn_list = [aws_ce_anomaly_monitor.this[0].arn]
  tags             = var.tags
  dynamic "subscriber" {
    for_each = toset(var.emails)
    content {
      type    = "EMAIL"
      address = subscriber.value
    }
  }
  threshold_expression {
    dimension {
      key           = "ANOMALY_TOTAL_IMPACT_ABSOLUTE"
      match_options = ["GREATER_THAN_OR_EQUAL"]
      values        = [tostring(var.anomaly_usd)]
    }
  }
}

resource "aws_ce_anomaly_subscription" "topic" {
  count            = var.anomalies && var.sns_topic_arn != null ? 1 : 0
  name             = "${var.name}-costs-now"
  frequency        = "IMMEDIATE"
  monitor_arn_list = [aws_ce_anomaly_monitor.this[0].arn]
  tags             = var.tags
  subscriber {
    type    = "SNS"
    address = var.sns_topic_arn
  }
  threshold_expression {
    dimension {
      key           = "ANOMALY_TOTAL_IMPACT_ABSOLUTE"
      match_options = ["GREATER_THAN_OR_EQUAL"]
      values        = [tostring(var.anomaly_usd)]
    }
  }
}
