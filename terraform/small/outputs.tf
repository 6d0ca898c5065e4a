output "remote_url" {
  description = "Where records go: the store of the nodes' configuration, and of anybody with the reader or writer role."
  value       = local.remote_url
}

output "config_yaml" {
  description = "Configuration of kvstore on the nodes: terraform output -raw config_yaml > kvstore.yaml; kvstore config check kvstore.yaml."
  value       = local.config_yaml
}

output "bucket" {
  description = "Bucket of the records."
  value       = module.object_store.bucket
}

output "autoscaling_group_name" {
  description = "Auto Scaling group of the instance."
  value       = module.gpu_nodes.autoscaling_group_name
}

output "config_secret_arn" {
  description = "Secret that nodes read their configuration from."
  value       = module.settings.config_secret_arn
}

output "role_arns" {
  description = "Roles by what they may do with records."
  value       = { reader = module.iam.reader_role_arn, writer = module.iam.writer_role_arn, evictor = module.iam.evictor_role_arn }
}

output "dashboard_name" {
  description = "CloudWatch dashboard."
  value       = module.observability.dashboard_name
}
