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
  name            = "kv"
  log_group_names = ["/kv/engine"]
}

run "defaults_of_the_thresholds" {
  command = plan
  assert {
    condition = { for k, a in aws_cloudwatch_metric_alarm.ours : k => "${a.namespace} ${a.metric_name} ${a.comparison_operator} ${a.threshold}" } == {
      ttft-p95-warning      = "CacheBlend/RAG TTFT_P95 GreaterThanThreshold 3000"
      ttft-p95-critical     = "CacheBlend/RAG TTFT_P95 GreaterThanThreshold 5000"
      rag-hit-rate-warning  = "CacheBlend/RAG CacheHitRate LessThanThreshold 50"
      rag-hit-rate-critical = "CacheBlend/RAG CacheHitRate LessThanThreshold 30"
      hit-rate-warning      = "LMCache CacheHitRate LessThanThreshold 50"
      hit-rate-critical     = "LMCache CacheHitRate LessThanThreshold 30"
      gpu-memory            = "CacheGen GPUMemoryUtilization GreaterThanThreshold 90"
      gpu-use-high          = "CacheGen GPUUtilization GreaterThanThreshold 95"
      gpu-use-low           = "CacheGen GPUUtilization LessThanThreshold 10"
    }
    error_message = "alarms, or their defaults, are others"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.ours["gpu-use-low"].period * aws_cloudwatch_metric_alarm.ours["gpu-use-low"].evaluation_periods == 900
    error_message = "low use of GPUs counts after 15 minutes"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.kv_cache.threshold == 95
    error_message = "the device KV cache counts from 95 % on"
  }
  assert {
    condition     = length(aws_cloudwatch_query_definition.this) == 6 && alltrue([for q in aws_cloudwatch_query_definition.this : q.log_group_names == tolist(["/kv/engine"])])
    error_message = "saved queries are missing, or read other groups"
  }
  assert {
    condition     = length(aws_sns_topic.this) == 1 && length(aws_cloudtrail.this) == 0 && length(aws_config_configuration_recorder.this) == 0 && length(aws_s3_bucket.audit) == 0
    error_message = "CloudTrail and Config are options"
  }
}

run "thresholds_of_ones_own" {
  command = plan
  variables { thresholds = { ttft_p95_ms_warning = 500, ttft_p95_ms_critical = 900, gpu_use_minutes = 30 } }
  assert {
    condition     = aws_cloudwatch_metric_alarm.ours["ttft-p95-warning"].threshold == 500 && aws_cloudwatch_metric_alarm.ours["hit-rate-warning"].threshold == 50 && aws_cloudwatch_metric_alarm.ours["gpu-use-high"].evaluation_periods == 6
    error_message = "thresholds are not taken"
  }
}

run "valkey_nodes" {
  command = plan
  variables { valkey = { mode = "cluster", id = "kv", member_ids = ["kv-0001-001", "kv-0001-002"] } }
  assert {
    condition     = alltrue([for id, a in aws_cloudwatch_metric_alarm.valkey_node : a.threshold == 90 && a.metric_name == "DatabaseMemoryUsagePercentage" && a.dimensions.CacheClusterId == id]) && length(aws_cloudwatch_metric_alarm.valkey_node) == 2
    error_message = "each Valkey node has an alarm at 90 %"
  }
}

run "valkey_serverless" {
  command = plan
  variables { valkey = { mode = "serverless", id = "kv", max_bytes = 1000 } }
  assert {
    condition     = aws_cloudwatch_metric_alarm.valkey_serverless[0].threshold == 900
    error_message = "90 % of what it may take"
  }
}

run "efs" {
  command = plan
  variables {
    watch_efs = true
    efs_id    = "fs-1"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.efs_throughput[0].threshold == 80 && aws_cloudwatch_metric_alarm.efs_io_limit[0].threshold == 95
    error_message = "EFS is not watched"
  }
}

run "topic_that_is_there" {
  command = plan
  variables { sns_topic_arn = "arn:aws:sns:us-east-1:123456789012:oncall" }
  assert {
    condition     = length(aws_sns_topic.this) == 0 && alltrue([for a in aws_cloudwatch_metric_alarm.ours : a.alarm_actions == toset(["arn:aws:sns:us-east-1:123456789012:oncall"])])
    error_message = "alarms go elsewhere"
  }
}

run "audit" {
  command = plan
  variables {
    cloudtrail      = true
    config_recorder = true
  }
  assert {
    condition     = aws_cloudtrail.this[0].enable_log_file_validation && aws_config_configuration_recorder_status.this[0].is_enabled && !aws_s3_bucket.audit[0].force_destroy
    error_message = "CloudTrail and Config are not complete"
  }
}

run "refuses_crossed_ttft" {
  command = plan
  variables { thresholds = { ttft_p95_ms_warning = 9000 } }
  expect_failures = [var.thresholds]
}

run "refuses_crossed_hit_rates" {
  command = plan
  variables { thresholds = { hit_rate_percent_critical = 60 } }
  expect_failures = [var.thresholds]
}

run "refuses_more_than_all" {
  command = plan
  variables { thresholds = { gpu_memory_percent = 900 } }
  expect_failures = [var.thresholds]
}

run "refuses_seven_minutes" {
  command = plan
  variables { thresholds = { gpu_use_minutes = 7 } }
  expect_failures = [var.thresholds]
}

run "refuses_no_address" {
  command = plan
  variables { emails = ["oncall"] }
  expect_failures = [var.emails]
}

run "refuses_the_namespace_of_aws" {
  command = plan
  variables { namespaces = { lmcache = "AWS/LMCache" } }
  expect_failures = [var.namespaces]
}

run "refuses_no_topic" {
  command = plan
  variables { sns_topic_arn = "oncall" }
  expect_failures = [var.sns_topic_arn]
}

run "refuses_more_traces_than_all" {
  command = plan
  variables { sampling = { rate = 2 } }
  expect_failures = [var.sampling]
}

run "refuses_half_days" {
  command = plan
  variables { audit_days = 0.5 }
  expect_failures = [var.audit_days]
}

run "lines_of_pods" {
  command = plan
  variables { log_field_prefix = "log_processed." }
  assert {
    condition     = alltrue([for q in aws_cloudwatch_query_definition.this : !can(regex("(^|[^.])\\b(ttft_ms|tokens_saved|model_name|input_tokens)\\b", q.query_string))]) && strcontains(aws_cloudwatch_query_definition.this["slow_ttft_by_model"].query_string, "pct(log_processed.ttft_ms, 95) as ttft_p95")
    error_message = "queries read fields that pods' lines do not have"
  }
  assert {
    condition     = strcontains(aws_cloudwatch_query_definition.this["hits_and_tokens_saved"].query_string, "like /kv_cache_hit/")
    error_message = "a marker is no field"
  }
}

run "refuses_prefix_without_dot" {
  command = plan
  variables { log_field_prefix = "log_processed" }
  expect_failures = [var.log_field_prefix]
}

run "refuses_misspelt_threshold" {
  command = plan
  variables { thresholds = { ttft_p95 = 2000 } }
  expect_failures = [var.thresholds]
}
