output "cards" {
  description = "Network cards of each of instance_types."
  value       = { for t in var.instance_types : t => local.types[t].cards }
}
