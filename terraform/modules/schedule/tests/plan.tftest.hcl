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
  name                    = "kv"
  autoscaling_group_names = ["kv-gpu", "kv-spot"]
}

run "nothing_by_default" {
  command = plan
  assert {
    condition     = length(aws_scheduler_schedule.stop) + length(aws_scheduler_schedule.start) + length(aws_cloudwatch_metric_alarm.idle) + length(aws_iam_role.resize) + length(aws_dlm_lifecycle_policy.this) == 0
    error_message = "a group would be emptied that nobody asked to be"
  }
}

run "nights_and_weekends" {
  command = plan
  variables {
    nights       = true
    start        = "06:30"
    stop         = "21:00"
    timezone     = "Asia/Tokyo"
    working_size = { min = 1, desired = 3 }
  }
  assert {
    condition     = alltrue([for s in aws_scheduler_schedule.stop : s.schedule_expression == "cron(0 21 ? * * *)" && s.schedule_expression_timezone == "Asia/Tokyo"])
    error_message = "wrong time to stop"
  }
  assert {
    condition     = alltrue([for s in aws_scheduler_schedule.start : s.schedule_expression == "cron(30 6 ? * MON-FRI *)"])
    error_message = "wrong time to start: not on workdays only"
  }
  assert {
    condition     = jsondecode(one(aws_scheduler_schedule.stop["1"].target).input) == { AutoScalingGroupName = "kv-spot", MinSize = 0, DesiredCapacity = 0 } && jsondecode(one(aws_scheduler_schedule.start["1"].target).input) == { AutoScalingGroupName = "kv-spot", MinSize = 1, DesiredCapacity = 3 }
    error_message = "wrong sizes"
  }
  assert {
    condition     = one(data.aws_iam_policy_document.resize.statement).resources == toset(["arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/kv-gpu", "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/kv-spot"])
    error_message = "the role may resize other groups"
  }
}

run "idle" {
  command = plan
  variables {
    idle_stop = true
    idle      = { percent = 3, minutes = 30 }
  }
  assert {
    condition     = alltrue([for a in aws_cloudwatch_metric_alarm.idle : a.threshold == 3 && a.period * a.evaluation_periods == 1800 && a.treat_missing_data == "notBreaching" && a.comparison_operator == "LessThanThreshold" && a.statistic == "Maximum"])
    error_message = "wrong idea of idle"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.idle["0"].dimensions == tomap({ AutoScalingGroupName = "kv-gpu" }) && jsondecode(aws_cloudwatch_event_target.idle["0"].input) == { Group = ["kv-gpu"] }
    error_message = "the alarm of one group would empty another"
  }
}

run "one_group" {
  command = plan
  variables {
    autoscaling_group_names = ["kv-gpu"]
    nights                  = true
    idle_stop               = true
  }
  assert {
    condition     = output.schedule_names == tolist(["kv-start-0", "kv-stop-0"]) && output.idle_alarm_names == ["kv-idle-0"] && length(aws_iam_role_policy.events) == 1 && length(aws_ssm_document.empty) == 1
    error_message = "something is missing for a single group"
  }
}

run "names_differ" {
  command = plan
  variables { idle_stop = true }
  assert {
    condition     = length(distinct([for r in aws_cloudwatch_event_rule.idle : r.name])) == 2 && length(distinct([for a in aws_cloudwatch_metric_alarm.idle : a.alarm_name])) == 2
    error_message = "two groups have one rule or alarm"
  }
}

run "snapshots" {
  command = plan
  variables { snapshots = { tags = { Snapshot = "daily" }, keep = 3 } }
  assert {
    condition     = one(one(one(aws_dlm_lifecycle_policy.this[0].policy_details).schedule).retain_rule).count == 3
    error_message = "wrong number of snapshots"
  }
}
