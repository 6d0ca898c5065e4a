output "config_secret_arn" {
  description = "Secret with config_yaml (by zone id), node_yaml and model, as JSON."
  value       = aws_secretsmanager_secret.config.arn
}

output "node_token_secret_arn" {
  description = "Secret with the nodes' token, or null."
  value       = one(aws_secretsmanager_secret.node_token[*].arn)
}

output "secret_arns" {
  description = "ARNs of all secrets here."
  value       = concat([aws_secretsmanager_secret.config.arn], aws_secretsmanager_secret.node_token[*].arn)
}

output "config_version" {
  description = "Digest of what the config secret holds: nodes are replaced when it changes."
  value       = sha256(jsonencode([var.config_yaml, var.node_yaml, var.model]))
}
