output "reader_role_arn" {
  description = "Role that reads records: gets and lookups."
  value       = aws_iam_role.this["reader"].arn
}

output "writer_role_arn" {
  description = "Role of nodes that read and write records; it cannot delete."
  value       = aws_iam_role.this["writer"].arn
}

output "evictor_role_arn" {
  description = "Role of the sweep: lists, deletes, keeps corrupt records aside; it cannot write records."
  value       = aws_iam_role.this["evictor"].arn
}

output "role_names" {
  description = "Names of the roles by what they do: reader, writer, evictor."
  value       = { for k, r in aws_iam_role.this : k => r.name }
}

output "node_instance_profile_name" {
  description = "Instance profile of the writer role; null with trust = pods."
  value       = one(aws_iam_instance_profile.node[*].name)
}

output "policies" {
  description = "The policy documents as JSON: reader, writer, evictor (data), node (secrets, downloads, telemetry; part of all three roles)."
  value = {
    reader  = data.aws_iam_policy_document.data["reader"].json
    writer  = data.aws_iam_policy_document.data["writer"].json
    evictor = data.aws_iam_policy_document.data["evictor"].json
    node    = data.aws_iam_policy_document.node.json
  }
}
