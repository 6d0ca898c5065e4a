output "cluster_name" {
  description = "Name of the cluster: aws eks update-kubeconfig --name …"
  value       = aws_eks_cluster.this.name
}

output "cluster_arn" {
  description = "ARN of the cluster."
  value       = aws_eks_cluster.this.arn
}

output "manifests" {
  description = "File name to YAML, in the order of applying."
  value       = local.manifests
}

output "karpenter_values" {
  description = "Values for Karpenter's chart, as YAML."
  value = yamlencode({
    settings = {
      clusterName       = aws_eks_cluster.this.name
      interruptionQueue = aws_sqs_queue.interruption.name
    }
    serviceAccount = { name = "karpenter" }
    nodeSelector   = { "kvstore/system" = "true" }
  })
}

output "log_group_names" {
  description = "Log groups of the pods."
  value       = aws_cloudwatch_log_group.pods[*].name
}
