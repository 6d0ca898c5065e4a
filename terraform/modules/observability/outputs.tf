output "dashboard_name" {
  description = "Name of the CloudWatch dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}

output "topic_arn" {
  description = "SNS topic of the alarms."
  # Put together here, so that it is known before the topic is made: who gets it may count on whether there is one.
  value      = var.sns_topic_arn == null ? "${local.arn}:sns:${local.region}:${local.account}:${var.name}-alarms" : var.sns_topic_arn
  depends_on = [aws_sns_topic_policy.this]
}

output "kms_key_arn" {
  description = "KMS key of alarms, logs below /NAME/ and audit files."
  value       = aws_kms_key.this.arn
}

output "alarm_names" {
  description = "Names of all alarms."
  value = sort(concat(
    [for a in aws_cloudwatch_metric_alarm.ours : a.alarm_name],
    [aws_cloudwatch_metric_alarm.kv_cache.alarm_name],
    [for a in aws_cloudwatch_metric_alarm.valkey_node : a.alarm_name],
    aws_cloudwatch_metric_alarm.valkey_serverless[*].alarm_name,
    aws_cloudwatch_metric_alarm.efs_throughput[*].alarm_name,
    aws_cloudwatch_metric_alarm.efs_io_limit[*].alarm_name,
  ))
}
