# GPUs that nobody uses cost what those in use cost. Groups are emptied at night and at the weekend, and when their GPUs are
# idle; the caches on S3 stay.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  # Keys by place, since names may be known only after the groups were made.
  groups     = { for i, n in var.autoscaling_group_names : tostring(i) => n }
  scheduled  = var.nights ? local.groups : {}
  idle       = var.idle_stop ? local.groups : {}
  any        = length(local.scheduled) + length(local.idle) > 0 ? 1 : 0
  partition  = data.aws_partition.current.partition
  region     = data.aws_region.current.region
  account    = data.aws_caller_identity.current.account_id
  group_arns = [for n in var.autoscaling_group_names : "arn:${local.partition}:autoscaling:${local.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${n}"]
  start      = split(":", var.start)
  stop       = split(":", var.stop)
  idle_runs  = var.idle.minutes / 5
}

# ---- nights and weekends: EventBridge Scheduler calls Auto Scaling by itself

data "aws_iam_policy_document" "scheduler_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["scheduler.amazonaws.com", "ssm.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

data "aws_iam_policy_document" "resize" {
  statement {
    sid       = "Resize"
    actions   = ["autoscaling:UpdateAutoScalingGroup"]
    resources = local.group_arns
  }
}

resource "aws_iam_role" "resize" {
  count                = local.any
  name_prefix          = "${var.name}-resize-"
  description          = "kvstore: empties and fills Auto Scaling groups"
  assume_role_policy   = data.aws_iam_policy_document.scheduler_trust.json
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags
}

resource "aws_iam_role_policy" "resize" {
  count  = local.any
  name   = "resize"
  role   = aws_iam_role.resize[0].id
  policy = data.aws_iam_policy_document.resize.json
}

resource "aws_scheduler_schedule_group" "this" {
  count = length(local.scheduled) > 0 ? 1 : 0
  name  = var.name
  tags  = var.tags
}

# Friday's stop lasts until Monday's start.
resource "aws_scheduler_schedule" "stop" {
  for_each                     = local.scheduled
  name                         = "${var.name}-stop-${each.key}"
  group_name                   = aws_scheduler_schedule_group.this[0].name
  description                  = "Empty the group after work"
  schedule_expression          = "cron(${tonumber(local.stop[1])} ${tonumber(local.stop[0])} ? * * *)"
  schedule_expression_timezone = var.timezone
  flexible_time_window { mode = "OFF" }
  target {
    arn      = "arn:${local.partition}:scheduler:::aws-sdk:autoscaling:updateAutoScalingGroup"
    role_arn = aws_iam_role.resize[0].arn
    input    = jsonencode({ AutoScalingGroupName = each.value, MinSize = 0, DesiredCapacity = 0 })
    retry_policy {
      maximum_retry_attempts       = 5
      maximum_event_age_in_seconds = 3600
    }
  }
}

resource "aws_scheduler_schedule" "start" {
  for_each                     = local.scheduled
  name                         = "${var.name}-start-${each.key}"
  group_name                   = aws_scheduler_schedule_group.this[0].name
  description                  = "Fill the group before work"
  schedule_expression          = "cron(${tonumber(local.start[1])} ${tonumber(local.start[0])} ? * ${var.workdays} *)"
  schedule_expression_timezone = var.timezone
  flexible_time_window { mode = "OFF" }
  target {
    arn      = "arn:${local.partition}:scheduler:::aws-sdk:autoscaling:updateAutoScalingGroup"
    role_arn = aws_iam_role.resize[0].arn
    input    = jsonencode({ AutoScalingGroupName = each.value, MinSize = var.working_size.min, DesiredCapacity = var.working_size.desired })
    retry_policy {
      maximum_retry_attempts       = 5
      maximum_event_age_in_seconds = 3600
    }
  }
}

# ---- idle GPUs: alarm -> EventBridge rule -> Systems Manager runbook (a rule cannot call Auto Scaling by itself)

resource "aws_cloudwatch_metric_alarm" "idle" {
  for_each            = local.idle
  alarm_name          = "${var.name}-idle-${each.key}"
  alarm_description   = "No GPU of the group did more than ${var.idle.percent} % for ${var.idle.minutes} minutes; EventBridge empties it."
  namespace           = var.idle.namespace
  metric_name         = var.idle.metric
  dimensions          = { (var.idle.dimension) = each.value }
  statistic           = "Maximum"
  comparison_operator = "LessThanThreshold"
  threshold           = var.idle.percent
  period              = 300
  evaluation_periods  = local.idle_runs
  datapoints_to_alarm = local.idle_runs
  treat_missing_data  = "notBreaching" # a node that says nothing is not idle
  tags                = var.tags
}

resource "aws_ssm_document" "empty" {
  count           = length(local.idle) > 0 ? 1 : 0
  name            = "${var.name}-empty-group"
  document_type   = "Automation"
  document_format = "JSON"
  tags            = var.tags
  content = jsonencode({
    schemaVersion = "0.3"
    description   = "Set an Auto Scaling group to no instances."
    assumeRole    = aws_iam_role.resize[0].arn
    parameters    = { Group = { type = "String", description = "Name of the group", allowedPattern = "^[^*]{1,255}$" } }
    mainSteps = [{
      name   = "Empty"
      action = "aws:executeAwsApi"
      inputs = { Service = "autoscaling", Api = "UpdateAutoScalingGroup", AutoScalingGroupName = "{{ Group }}", MinSize = 0, DesiredCapacity = 0 }
    }]
  })
}

data "aws_iam_policy_document" "events_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

data "aws_iam_policy_document" "run" {
  count = length(local.idle) > 0 ? 1 : 0
  statement {
    sid       = "RunRunbook"
    actions   = ["ssm:StartAutomationExecution"]
    resources = ["arn:${local.partition}:ssm:${local.region}:${local.account}:automation-definition/${aws_ssm_document.empty[0].name}:*"]
  }
  statement {
    sid       = "PassRole"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.resize[0].arn]
    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ssm.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "events" {
  count                = length(local.idle) > 0 ? 1 : 0
  name_prefix          = "${var.name}-events-"
  description          = "kvstore: EventBridge starts the runbook"
  assume_role_policy   = data.aws_iam_policy_document.events_trust.json
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags
}

resource "aws_iam_role_policy" "events" {
  count  = length(local.idle) > 0 ? 1 : 0
  name   = "run"
  role   = aws_iam_role.events[0].id
  policy = data.aws_iam_policy_document.run[0].json
}

resource "aws_cloudwatch_event_rule" "idle" {
  for_each    = local.idle
  name        = "${var.name}-idle-${each.key}"
  description = "The group's GPUs are idle"
  event_pattern = jsonencode({
    source      = ["aws.cloudwatch"]
    detail-type = ["CloudWatch Alarm State Change"]
    resources   = [aws_cloudwatch_metric_alarm.idle[each.key].arn]
    detail      = { state = { value = ["ALARM"] } }
  })
  tags = var.tags
}

resource "aws_cloudwatch_event_target" "idle" {
  for_each = local.idle
  rule     = aws_cloudwatch_event_rule.idle[each.key].name
  arn      = "arn:${local.partition}:ssm:${local.region}:${local.account}:automation-definition/${aws_ssm_document.empty[0].name}:$DEFAULT"
  role_arn = aws_iam_role.events[0].arn
  input    = jsonencode({ Group = [each.value] })
}

# ---- snapshots of EBS volumes, as an option

data "aws_iam_policy_document" "dlm_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["dlm.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_iam_role" "dlm" {
  count                = var.snapshots == null ? 0 : 1
  name_prefix          = "${var.name}-dlm-"
  description          = "kvstore: Data Lifecycle Manager"
  assume_role_policy   = data.aws_iam_policy_document.dlm_trust.json
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags
}

resource "aws_iam_role_policy_attachment" "dlm" {
  count      = var.snapshots == null ? 0 : 1
  role       = aws_iam_role.dlm[0].name
  policy_arn = "arn:${local.partition}:iam::aws:policy/service-role/AWSDataLifecycleManagerServiceRole"
}

resource "aws_dlm_lifecycle_policy" "this" {
  count              = var.snapshots == null ? 0 : 1
  description        = "${var.name} daily snapshots"
  execution_role_arn = aws_iam_role.dlm[0].arn
  state              = "ENABLED"
  tags               = var.tags
  policy_details {
    resource_types = ["VOLUME"]
    target_tags    = var.snapshots.tags
    schedule {
      name      = "daily"
      copy_tags = true
      create_rule {
        interval      = 24
        interval_unit = "HOURS"
        times         = [var.snapshots.at]
      }
      retain_rule { count = var.snapshots.keep }
    }
  }
}
