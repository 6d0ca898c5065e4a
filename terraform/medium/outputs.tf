output "remote_url" {
  description = "Where records go, of the first zone of gpu_zone_ids: the last tier of the nodes' configuration."
  value       = yamldecode(local.config_yaml[var.gpu_zone_ids[0]]).remote_url
}

output "config_yaml" {
  description = "Configuration of kvstore on the nodes of the first zone: terraform output -raw config_yaml > kvstore.yaml; kvstore config check kvstore.yaml."
  value       = local.config_yaml[var.gpu_zone_ids[0]]
}

output "config_yaml_by_zone" {
  description = "Zone id to configuration."
  value       = local.config_yaml
}

output "express_buckets" {
  description = "Zone id to S3 Express bucket."
  value       = module.object_store.express_buckets
}

output "bucket" {
  description = "S3 bucket."
  value       = module.object_store.bucket
}

output "autoscaling_group_name" {
  description = "Auto Scaling group of the nodes."
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
