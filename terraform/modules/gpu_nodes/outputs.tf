output "autoscaling_group_name" {
  description = "Name of the Auto Scaling group."
  value       = aws_autoscaling_group.this.name
}

output "launch_template_id" {
  description = "Id of the launch template."
  value       = aws_launch_template.this.id
}

output "log_group_names" {
  description = "Log groups by what writes there: node, engine, boot."
  value       = { for what, g in aws_cloudwatch_log_group.this : what => g.name }
}

output "log_group_arns" {
  description = "ARNs of the log groups, for the nodes' role."
  value       = [for g in aws_cloudwatch_log_group.this : g.arn]
}

output "user_data" {
  description = "The script that makes an instance a node. No secret is in it."
  value       = local.user_data
}
