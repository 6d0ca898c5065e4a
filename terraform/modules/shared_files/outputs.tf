output "mount" {
  description = "How to mount it: type (of mount -t), dns_name, mount_name (Lustre's, else null), source and options (of mount). null where kind is none."
  value       = local.mount
}

output "file_system_id" {
  description = "Id of the file system, for alarms; null where kind is none."
  value       = local.file_system_id
}

output "kms_key_arn" {
  description = "KMS key of the file system; null where kind is none."
  value       = one(module.key[*].arn)
}
