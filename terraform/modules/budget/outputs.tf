output "budget_name" {
  description = "Name of the budget."
  value       = aws_budgets_budget.this.name
}

output "anomaly_monitor_arn" {
  description = "Monitor of Cost Anomaly Detection, or null."
  value       = one(aws_ce_anomaly_monitor.this[*].arn)
}
