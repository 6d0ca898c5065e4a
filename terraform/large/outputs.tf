output "remote_url" {
  description = "Where records go: the last tier of the engines' configuration."
  value       = yamldecode(local.config_yaml[var.gpu_zone_ids[0]]).remote_url
}

output "config_yaml" {
  description = "Configuration of kvstore in engines of the first zone: terraform output -raw config_yaml > kvstore.yaml; kvstore config check kvstore.yaml."
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

output "cluster_name" {
  description = "Cluster: aws eks update-kubeconfig --name …"
  value       = module.cluster.cluster_name
}

output "manifests" {
  description = "What goes into the cluster: terraform output -raw manifests | kubectl apply -f -"
  value       = join("---\n", [for f in sort(keys(module.cluster.manifests)) : module.cluster.manifests[f]])
}

output "karpenter_values" {
  description = "Values for Karpenter's chart."
  value       = module.cluster.karpenter_values
}

output "role_arns" {
  description = "Roles by what they may do with records."
  value       = { reader = module.iam.reader_role_arn, writer = module.iam.writer_role_arn, evictor = module.iam.evictor_role_arn }
}

output "dashboard_name" {
  description = "CloudWatch dashboard."
  value       = module.observability.dashboard_name
}
