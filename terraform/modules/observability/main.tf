# What the person on call looks at: dashboard, saved queries, traces.

locals {
  fields = "ttft_ms|itl_ms|recompute_ratio|compression_ratio|cache_size_bytes|encoded_size_bytes|tokens_saved|input_tokens|output_tokens|model_name"
  queries = {
    for f in fileset("${path.module}/queries", "*.query") :
    trimsuffix(f, ".query") => replace(file("${path.module}/queries/${f}"), "/\\b(${local.fields})\\b/", "${var.log_field_prefix}$1")
  }
  widgets = concat(
    [
      ["Time to first token, ms", [[local.ns.rag, "TTFT_P95"], [local.ns.cachegen, "TTFT"]], "Maximum"],
      ["Hit rate by tier, %", [for tier in ["GPU", "CPU", "SSD", "Remote"] : [local.ns.tiers, "${tier}CacheHitRate"]], "Average"],
      ["Hit rate, %", [[local.ns.lmcache, "CacheHitRate"], [local.ns.rag, "CacheHitRate"]], "Average"],
      ["Tokens not computed again", [[local.ns.lmcache, "TokensSaved"]], "Sum"],
      ["Recompute ratio", [[local.ns.rag, "RecomputeRatio"]], "Average"],
      ["Compression ratio", [[local.ns.cachegen, "CompressionRatio"]], "Average"],
      ["GPUs, %", [[local.ns.cachegen, "GPUUtilization"], [local.ns.cachegen, "GPUMemoryUtilization"]], "Average"],
      ["Device KV cache in use (1 is full)", [[local.ns.vllm, "vllm:kv_cache_usage_perc", "cluster", var.name]], "Maximum"],
    ],
    try(var.valkey.mode, "") == "cluster" ? [["Valkey memory, %", [for m in var.valkey.member_ids : ["AWS/ElastiCache", "DatabaseMemoryUsagePercentage", "CacheClusterId", m]], "Average"]] : [],
    try(var.valkey.mode, "") == "serverless" ? [["Valkey bytes", [["AWS/ElastiCache", "BytesUsedForCache", "clusterId", var.valkey.id]], "Maximum"]] : [],
    var.watch_efs ? [["EFS bytes", [["AWS/EFS", "MeteredIOBytes", "FileSystemId", var.efs_id]], "Sum"]] : [],
    var.bucket != null ? [["S3 5xx answers", [["AWS/S3", "5xxErrors", "BucketName", var.bucket.name, "FilterId", var.bucket.filter_id]], "Sum"]] : [],
  )
}

resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = var.name
  dashboard_body = jsonencode({
    widgets = concat(
      [
        for i, w in local.widgets : {
          type   = "metric"
          x      = 12 * (i % 2)
          y      = 6 * floor(i / 2)
          width  = 12
          height = 6
          properties = {
            title   = w[0]
            metrics = w[1]
            stat    = w[2]
            region  = local.region
            period  = 300
            view    = "timeSeries"
          }
        }
      ],
      length(var.log_group_names) == 0 ? [] : [
        {
          type   = "log"
          x      = 0
          y      = 6 * ceil(length(local.widgets) / 2)
          width  = 24
          height = 6
          properties = {
            title  = "TTFT and recompute ratio"
            region = local.region
            view   = "table"
            query  = "${join(" | ", [for g in var.log_group_names : "SOURCE '${g}'"])} | ${local.queries["ttft_and_recompute"]}"
          }
        }
      ],
    )
  })
}

resource "aws_cloudwatch_query_definition" "this" {
  for_each        = local.queries
  name            = "${var.name}/${each.key}"
  query_string    = each.value
  log_group_names = var.log_group_names
}

# Annotations that traces carry: doc_count, cache_hit, prompt_length, chunk_size, operation, model.
resource "aws_xray_group" "this" {
  for_each = {
    all    = "service(\"kvstore\")"
    misses = "service(\"kvstore\") AND annotation.cache_hit = false"
    slow   = "service(\"kvstore\") AND responsetime > ${local.t.ttft_p95_ms_warning / 1000}"
  }
  group_name        = "${var.name}-${each.key}"
  filter_expression = each.value
  tags              = var.tags
  insights_configuration {
    insights_enabled      = each.key == "all"
    notifications_enabled = false
  }
}

resource "aws_xray_sampling_rule" "this" {
  rule_name      = "${var.name}-kvstore"
  priority       = 1000
  version        = 1
  reservoir_size = var.sampling.reservoir
  fixed_rate     = var.sampling.rate
  service_name   = "kvstore"
  service_type   = "*"
  host           = "*"
  http_method    = "*"
  url_path       = "*"
  resource_arn   = "*"
  tags           = var.tags
}
