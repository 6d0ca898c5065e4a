output "endpoint" {
  description = "Host name of the cache: the configuration endpoint of a cluster."
  value       = local.endpoint
}

output "port" {
  description = "TCP port of the cache."
  value       = local.port
}

output "secret_arn" {
  description = "Secret with username and password as JSON ({\"username\": …, \"password\": …}); the username is empty where the cache knows only a token."
  value       = aws_secretsmanager_secret.this.arn
}

output "kms_key_arn" {
  description = "KMS key of the cache and of the secret."
  value       = module.key.arn
}

output "cluster_ids" {
  description = "Ids for alarms (dimension CacheClusterId); empty where serverless."
  value       = local.cluster_ids
}
