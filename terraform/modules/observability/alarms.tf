# One alarm per line of the table. Metrics of ours come from `kvstore cloudwatch`; where nothing publishes there is no data,
# which is no alarm (GPUUtilization comes from the CloudWatch agent of the nodes, vLLM's from its own endpoint).

locals {
  ns = var.namespaces
  defaults = {
    ttft_p95_ms_warning       = 3000
    ttft_p95_ms_critical      = 5000
    hit_rate_percent_warning  = 50
    hit_rate_percent_critical = 30
    gpu_memory_percent        = 90
    kv_cache_percent          = 95
    gpu_use_percent_high      = 95
    gpu_use_percent_low       = 10
    gpu_use_minutes           = 15
    valkey_memory_percent     = 90
    efs_throughput_percent    = 80
    efs_io_limit_percent      = 95
  }
  t = merge(local.defaults, var.thresholds)
  # name: namespace, metric, statistic, comparison, threshold, periods of 5 minutes, what to do
  ours = {
    ttft-p95-warning      = [local.ns.rag, "TTFT_P95", "Maximum", ">", local.t.ttft_p95_ms_warning, 3, "TTFT p95 is above ${local.t.ttft_p95_ms_warning} ms: look at hit rate and recompute ratio; a slow tier shows in the dashboard."]
    ttft-p95-critical     = [local.ns.rag, "TTFT_P95", "Maximum", ">", local.t.ttft_p95_ms_critical, 1, "TTFT p95 is above ${local.t.ttft_p95_ms_critical} ms: add nodes, or take a slow tier out of the configuration."]
    rag-hit-rate-warning  = [local.ns.rag, "CacheHitRate", "Average", "<", local.t.hit_rate_percent_warning, 3, "Blended chunks hit below ${local.t.hit_rate_percent_warning} %: has the corpus, the model or the chunking changed?"]
    rag-hit-rate-critical = [local.ns.rag, "CacheHitRate", "Average", "<", local.t.hit_rate_percent_critical, 3, "Blended chunks hit below ${local.t.hit_rate_percent_critical} %: kvstore doctor says whether the store answers at all."]
    hit-rate-warning      = [local.ns.lmcache, "CacheHitRate", "Average", "<", local.t.hit_rate_percent_warning, 3, "Prefixes hit below ${local.t.hit_rate_percent_warning} %: are records expiring before they are used again?"]
    hit-rate-critical     = [local.ns.lmcache, "CacheHitRate", "Average", "<", local.t.hit_rate_percent_critical, 3, "Prefixes hit below ${local.t.hit_rate_percent_critical} %: kvstore doctor says whether the store answers at all."]
    gpu-memory            = [local.ns.cachegen, "GPUMemoryUtilization", "Maximum", ">", local.t.gpu_memory_percent, 3, "GPU memory is above ${local.t.gpu_memory_percent} %: lower --gpu-memory-utilization or the context length."]
    gpu-use-high          = [local.ns.cachegen, "GPUUtilization", "Average", ">", local.t.gpu_use_percent_high, local.t.gpu_use_minutes / 5, "GPUs are above ${local.t.gpu_use_percent_high} % for ${local.t.gpu_use_minutes} minutes: add nodes."]
    gpu-use-low           = [local.ns.cachegen, "GPUUtilization", "Average", "<", local.t.gpu_use_percent_low, local.t.gpu_use_minutes / 5, "GPUs are below ${local.t.gpu_use_percent_low} % for ${local.t.gpu_use_minutes} minutes: take nodes away."]
  }
  compare = { ">" = "GreaterThanThreshold", "<" = "LessThanThreshold" }
}

resource "aws_cloudwatch_metric_alarm" "ours" {
  for_each            = local.ours
  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = each.value[6]
  namespace           = each.value[0]
  metric_name         = each.value[1]
  statistic           = each.value[2]
  comparison_operator = local.compare[each.value[3]]
  threshold           = each.value[4]
  period              = 300
  evaluation_periods  = each.value[5]
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.topic]
  ok_actions          = [local.topic]
  tags                = var.tags
}

# vLLM says how full its device cache is as a fraction.
resource "aws_cloudwatch_metric_alarm" "kv_cache" {
  alarm_name          = "${var.name}-kv-cache"
  alarm_description   = "The engine's KV cache is above ${local.t.kv_cache_percent} %: requests are preempted and computed again; add nodes or shorten contexts."
  comparison_operator = "GreaterThanThreshold"
  threshold           = local.t.kv_cache_percent
  evaluation_periods  = 3
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.topic]
  ok_actions          = [local.topic]
  tags                = var.tags
  metric_query {
    id          = "percent"
    expression  = "100 * used"
    label       = "device KV cache in use, %"
    return_data = true
  }
  metric_query {
    id = "used"
    metric {
      namespace   = local.ns.vllm
      metric_name = "vllm:kv_cache_usage_perc"
      period      = 300
      stat        = "Maximum"
      dimensions  = { cluster = var.name }
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "valkey_node" {
  for_each            = toset(try(var.valkey.mode, "") == "cluster" ? var.valkey.member_ids : [])
  alarm_name          = "${var.name}-valkey-memory-${each.key}"
  alarm_description   = "Valkey ${each.key} uses more than ${local.t.valkey_memory_percent} % of its memory: it evicts what is still warm; add shards, or lower the ttl."
  namespace           = "AWS/ElastiCache"
  metric_name         = "DatabaseMemoryUsagePercentage"
  dimensions          = { CacheClusterId = each.key }
  statistic           = "Average"
  comparison_operator = "GreaterThanThreshold"
  threshold           = local.t.valkey_memory_percent
  period              = 300
  evaluation_periods  = 3
  treat_missing_data  = "missing"
  alarm_actions       = [local.topic]
  ok_actions          = [local.topic]
  tags                = var.tags
}

# Serverless has no limit of its own: the percentage is of the limit that it was given.
resource "aws_cloudwatch_metric_alarm" "valkey_serverless" {
  count               = try(var.valkey.mode, "") == "serverless" ? 1 : 0
  alarm_name          = "${var.name}-valkey-memory"
  alarm_description   = "Valkey Serverless uses more than ${local.t.valkey_memory_percent} % of the memory it may take."
  namespace           = "AWS/ElastiCache"
  metric_name         = "BytesUsedForCache"
  dimensions          = { clusterId = var.valkey.id }
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.valkey.max_bytes * local.t.valkey_memory_percent / 100
  period              = 300
  evaluation_periods  = 3
  treat_missing_data  = "missing"
  alarm_actions       = [local.topic]
  ok_actions          = [local.topic]
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "efs_throughput" {
  count               = var.watch_efs ? 1 : 0
  alarm_name          = "${var.name}-efs-throughput"
  alarm_description   = "EFS moves more than ${local.t.efs_throughput_percent} % of what it is allowed: KV caches belong into S3 Express, or take Lustre."
  comparison_operator = "GreaterThanThreshold"
  threshold           = local.t.efs_throughput_percent
  evaluation_periods  = 3
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.topic]
  ok_actions          = [local.topic]
  tags                = var.tags
  metric_query {
    id          = "percent"
    expression  = "100 * moved / PERIOD(moved) / permitted"
    label       = "permitted throughput in use, %"
    return_data = true
  }
  metric_query {
    id = "moved"
    metric {
      namespace   = "AWS/EFS"
      metric_name = "MeteredIOBytes"
      period      = 300
      stat        = "Sum"
      dimensions  = { FileSystemId = var.efs_id }
    }
  }
  metric_query {
    id = "permitted"
    metric {
      namespace   = "AWS/EFS"
      metric_name = "PermittedThroughput"
      period      = 300
      stat        = "Average"
      dimensions  = { FileSystemId = var.efs_id }
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "efs_io_limit" {
  count               = var.watch_efs ? 1 : 0
  alarm_name          = "${var.name}-efs-io-limit"
  alarm_description   = "EFS is near the operations per second of its general purpose mode: make records larger (chunk_size), or take them off EFS."
  namespace           = "AWS/EFS"
  metric_name         = "PercentIOLimit"
  dimensions          = { FileSystemId = var.efs_id }
  statistic           = "Average"
  comparison_operator = "GreaterThanThreshold"
  threshold           = local.t.efs_io_limit_percent
  period              = 300
  evaluation_periods  = 3
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.topic]
  ok_actions          = [local.topic]
  tags                = var.tags
}
