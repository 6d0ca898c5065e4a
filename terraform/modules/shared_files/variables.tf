variable "name" {
  description = "Prefix of all names in this module."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", var.name)) && !strcontains(var.name, "--")
    error_message = "name: write 1 to 20 lower case letters, digits and single hyphens, beginning with a letter and not ending in a hyphen, such as kv-prod."
  }
}

variable "tags" {
  description = "Tags of every resource, besides the provider's default_tags."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "kind" {
  description = "File system: none, efs (simple, elastic, 1,500 MiB/s per client), lustre (FSx for Lustre: hot shared KV, EFA) or openzfs (FSx for OpenZFS: NFS with a fixed throughput)."
  type        = string
  nullable    = false
  validation {
    condition     = contains(["none", "efs", "lustre", "openzfs"], var.kind)
    error_message = "kind: write none, efs, lustre or openzfs."
  }
}

variable "vpc_id" {
  description = "VPC of the file system."
  type        = string
  nullable    = false
}

variable "subnet_ids" {
  description = "Zone id to private subnet id. EFS gets a mount target in each; FSx stands in one (zone_id)."
  type        = map(string)
  nullable    = false
  validation {
    condition     = length(var.subnet_ids) >= 1
    error_message = "subnet_ids: write at least one, such as { use1-az4 = \"subnet-0123456789abcdef0\" }."
  }
}

variable "zone_id" {
  description = "Zone of the FSx file system, one of subnet_ids: that of the GPU nodes. Default: the first by name."
  type        = string
  default     = null
  validation {
    condition     = try(contains(keys(var.subnet_ids), var.zone_id), var.zone_id == null)
    error_message = "zone_id: write one of the zones of subnet_ids (${join(", ", keys(var.subnet_ids))})."
  }
}

variable "client_security_group_id" {
  description = "Security group of the nodes. Only they reach the file system, and get the rule that lets them."
  type        = string
  nullable    = false
}

variable "efs_throughput" {
  description = "Throughput mode of EFS: elastic (pay per byte, recommended), bursting, or provisioned (with efs_provisioned_mibps)."
  type        = string
  default     = "elastic"
  nullable    = false
  validation {
    condition     = contains(["elastic", "bursting", "provisioned"], var.efs_throughput)
    error_message = "efs_throughput: write elastic, bursting or provisioned."
  }
}

variable "efs_provisioned_mibps" {
  description = "Provisioned throughput of EFS in MiB/s."
  type        = number
  default     = null
  validation {
    condition     = (var.efs_throughput == "provisioned") == (var.efs_provisioned_mibps != null) && coalesce(var.efs_provisioned_mibps, 1) >= 1
    error_message = "efs_provisioned_mibps: write 1 or more with efs_throughput = \"provisioned\", and nothing with the other modes."
  }
}

variable "efs_archive_days" {
  description = "Days without access after which EFS moves a file to infrequent access (it comes back at the first read); 0: never."
  type        = number
  default     = 7
  nullable    = false
  validation {
    condition     = contains([0, 1, 7, 14, 30, 60, 90, 180, 270, 365], var.efs_archive_days)
    error_message = "efs_archive_days: write 0, 1, 7, 14, 30, 60, 90, 180, 270 or 365."
  }
}

variable "storage_gib" {
  description = "Size of the FSx file system in GiB. Lustre: 1200 or a multiple of 2400; OpenZFS: 64 to 524288. Not used by EFS, which grows."
  type        = number
  default     = 1200
  nullable    = false
  validation {
    condition     = var.kind != "lustre" || var.storage_gib == 1200 || var.storage_gib >= 2400 && var.storage_gib % 2400 == 0
    error_message = "storage_gib: for lustre write 1200 or a multiple of 2400."
  }
  validation {
    condition     = var.kind != "openzfs" || var.storage_gib >= 64 && var.storage_gib <= 524288 && floor(var.storage_gib) == var.storage_gib
    error_message = "storage_gib: for openzfs write a whole number from 64 to 524288."
  }
}

variable "lustre_mbps_per_tib" {
  description = "Throughput of Lustre in MB/s per TiB."
  type        = number
  default     = 250
  nullable    = false
  validation {
    condition     = contains([125, 250, 500, 1000], var.lustre_mbps_per_tib)
    error_message = "lustre_mbps_per_tib: write 125, 250, 500 or 1000."
  }
}

variable "lustre_efa" {
  description = "Whether clients may reach Lustre over EFA (GPUDirect). Decided at creation; cannot be changed later."
  type        = bool
  default     = false
  nullable    = false
  validation {
    condition     = !var.lustre_efa || var.kind == "lustre"
    error_message = "lustre_efa: only lustre has EFA; write kind = \"lustre\" or lustre_efa = false."
  }
}

variable "openzfs_mbps" {
  description = "Throughput capacity of OpenZFS (SINGLE_AZ_2) in MB/s."
  type        = number
  default     = 320
  nullable    = false
  validation {
    condition     = contains([160, 320, 640, 1280, 2560, 3840, 5120, 7680, 10240], var.openzfs_mbps)
    error_message = "openzfs_mbps: write 160, 320, 640, 1280, 2560, 3840, 5120, 7680 or 10240."
  }
}

variable "backup_days" {
  description = "Days that automatic snapshots are kept (FSx) or AWS Backup is on (EFS: any number over 0). 0: none, since a lost cache is computed again."
  type        = number
  default     = 0
  nullable    = false
  validation {
    condition     = var.backup_days >= 0 && var.backup_days <= 90 && floor(var.backup_days) == var.backup_days
    error_message = "backup_days: write a whole number from 0 to 90."
  }
}
