output "schedule_names" {
  description = "Names of the schedules."
  value       = sort(concat([for s in aws_scheduler_schedule.stop : s.name], [for s in aws_scheduler_schedule.start : s.name]))
}

output "idle_alarm_names" {
  description = "Alarms that empty a group."
  value       = [for a in aws_cloudwatch_metric_alarm.idle : a.alarm_name]
}
