# One file system that all nodes mount, or none. Only nodes reach it, by rules between its security group and theirs.

locals {
  zone      = coalesce(var.zone_id, sort(keys(var.subnet_ids))[0])
  efs       = var.kind == "efs" ? 1 : 0
  lustre    = var.kind == "lustre" ? 1 : 0
  openzfs   = var.kind == "openzfs" ? 1 : 0
  is_lustre = var.kind == "lustre"

  # Lustre's own ports, and everything where EFA is used: that is what FSx checks before it creates such a file system.
  ports = {
    none    = {}
    efs     = { nfs = { from = 2049, to = 2049, protocol = "tcp" } }
    openzfs = { for n, p in { nfs = [2049, 2049], portmapper = [111, 111], mount = [20001, 20003] } : n => { from = p[0], to = p[1], protocol = "tcp" } }
    lustre  = { for n, p in { lnet = [988, 988], lustre = [1018, 1023] } : n => { from = p[0], to = p[1], protocol = "tcp" } }
  }[var.kind]

  mounts = {
    none = null
    efs = {
      type       = "efs" # amazon-efs-utils: TLS
      dns_name   = one(aws_efs_file_system.this[*].dns_name)
      mount_name = null
      source     = "${try(aws_efs_file_system.this[0].id, "")}:/"
      options    = "tls,noresvport,_netdev"
    }
    lustre = {
      type       = "lustre"
      dns_name   = one(aws_fsx_lustre_file_system.this[*].dns_name)
      mount_name = one(aws_fsx_lustre_file_system.this[*].mount_name)
      source     = "${try(aws_fsx_lustre_file_system.this[0].dns_name, "")}@tcp:/${try(aws_fsx_lustre_file_system.this[0].mount_name, "")}"
      options    = "relatime,flock,_netdev"
    }
    openzfs = {
      type       = "nfs"
      dns_name   = one(aws_fsx_openzfs_file_system.this[*].dns_name)
      mount_name = null
      source     = "${try(aws_fsx_openzfs_file_system.this[0].dns_name, "")}:/fsx/"
      options    = "nfsvers=4.2,nconnect=16,rsize=1048576,wsize=1048576,_netdev"
    }
  }
  mount          = local.mounts[var.kind]
  file_system_id = try(coalesce(one(aws_efs_file_system.this[*].id), one(aws_fsx_lustre_file_system.this[*].id), one(aws_fsx_openzfs_file_system.this[*].id)), null)
}

module "key" {
  count       = var.kind == "none" ? 0 : 1
  source      = "../kms_key"
  alias       = "${var.name}/files"
  description = "kvstore: shared file system"
  tags        = var.tags
}

# ---- EFS

resource "aws_efs_file_system" "this" {
  count                           = local.efs
  encrypted                       = true
  kms_key_id                      = module.key[0].arn
  throughput_mode                 = var.efs_throughput
  provisioned_throughput_in_mibps = var.efs_provisioned_mibps
  tags                            = merge(var.tags, { Name = var.name })
  dynamic "lifecycle_policy" {
    for_each = var.efs_archive_days > 0 ? [var.efs_archive_days] : []
    content { transition_to_ia = lifecycle_policy.value == 1 ? "AFTER_1_DAY" : "AFTER_${lifecycle_policy.value}_DAYS" }
  }
  dynamic "lifecycle_policy" {
    for_each = var.efs_archive_days > 0 ? [1] : []
    content { transition_to_primary_storage_class = "AFTER_1_ACCESS" }
  }
}

resource "aws_efs_mount_target" "this" {
  for_each        = var.kind == "efs" ? var.subnet_ids : {}
  file_system_id  = aws_efs_file_system.this[0].id
  subnet_id       = each.value
  security_groups = [aws_security_group.this[0].id]
}

data "aws_iam_policy_document" "efs" {
  count = local.efs
  # Who may mount is decided by the security group; here, that it is through a mount target and over TLS.
  statement {
    sid       = "MountTargets"
    actions   = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite", "elasticfilesystem:ClientRootAccess"]
    resources = [aws_efs_file_system.this[0].arn]
    principals {
      type        = "AWS"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "elasticfilesystem:AccessedViaMountTarget"
      values   = ["true"]
    }
  }
  statement {
    sid       = "OnlyTLS"
    effect    = "Deny"
    actions   = ["*"]
    resources = [aws_efs_file_system.this[0].arn]
    principals {
      type        = "AWS"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_efs_file_system_policy" "this" {
  count          = local.efs
  file_system_id = aws_efs_file_system.this[0].id
  policy         = data.aws_iam_policy_document.efs[0].json
}

resource "aws_efs_backup_policy" "this" {
  count          = local.efs
  file_system_id = aws_efs_file_system.this[0].id
  backup_policy { status = var.backup_days > 0 ? "ENABLED" : "DISABLED" }
}

# ---- FSx

resource "aws_fsx_lustre_file_system" "this" {
  count                           = local.lustre
  deployment_type                 = "PERSISTENT_2"
  storage_type                    = "SSD"
  storage_capacity                = var.storage_gib
  per_unit_storage_throughput     = var.lustre_mbps_per_tib
  efa_enabled                     = var.lustre_efa
  data_compression_type           = "NONE" # records are compressed by kvstore where that pays
  automatic_backup_retention_days = var.backup_days
  kms_key_id                      = module.key[0].arn
  subnet_ids                      = [var.subnet_ids[local.zone]]
  security_group_ids              = [aws_security_group.this[0].id]
  tags                            = merge(var.tags, { Name = var.name })
  metadata_configuration { mode = "AUTOMATIC" }
  # FSx looks at the rules when it creates the file system.
  depends_on = [
    aws_vpc_security_group_ingress_rule.self, aws_vpc_security_group_egress_rule.self, aws_vpc_security_group_ingress_rule.clients,
    aws_vpc_security_group_ingress_rule.efa, aws_vpc_security_group_egress_rule.efa,
  ]
}

resource "aws_fsx_openzfs_file_system" "this" {
  count                           = local.openzfs
  deployment_type                 = "SINGLE_AZ_2"
  storage_type                    = "SSD"
  storage_capacity                = var.storage_gib
  throughput_capacity             = var.openzfs_mbps
  automatic_backup_retention_days = var.backup_days
  skip_final_backup               = var.backup_days == 0
  kms_key_id                      = module.key[0].arn
  subnet_ids                      = [var.subnet_ids[local.zone]]
  security_group_ids              = [aws_security_group.this[0].id]
  tags                            = merge(var.tags, { Name = var.name })
  root_volume_configuration {
    data_compression_type = "NONE"
    record_size_kib       = 1024
    nfs_exports {
      client_configurations {
        clients = "*" # the security group decides
        options = ["rw", "crossmnt", "no_root_squash"]
      }
    }
  }
}

# ---- who reaches it

resource "aws_security_group" "this" {
  count       = var.kind == "none" ? 0 : 1
  name        = "${var.name}-files"
  description = "Shared file system of kvstore"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-files" })
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each                     = local.ports
  security_group_id            = aws_security_group.this[0].id
  description                  = "Nodes: ${each.key}"
  referenced_security_group_id = var.client_security_group_id
  ip_protocol                  = each.value.protocol
  from_port                    = each.value.from
  to_port                      = each.value.to
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "clients" {
  for_each                     = local.ports
  security_group_id            = var.client_security_group_id
  description                  = "To the shared file system: ${each.key}"
  referenced_security_group_id = aws_security_group.this[0].id
  ip_protocol                  = each.value.protocol
  from_port                    = each.value.from
  to_port                      = each.value.to
  tags                         = var.tags
}

# Lustre's servers talk to each other, and ask their clients to give locks back.
resource "aws_vpc_security_group_ingress_rule" "self" {
  count                        = local.lustre
  security_group_id            = aws_security_group.this[0].id
  description                  = "Servers of the file system among themselves (EFA: all traffic)"
  referenced_security_group_id = aws_security_group.this[0].id
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "self" {
  count                        = local.lustre
  security_group_id            = aws_security_group.this[0].id
  description                  = "Servers of the file system among themselves (EFA: all traffic)"
  referenced_security_group_id = aws_security_group.this[0].id
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "callbacks" {
  for_each                     = local.is_lustre ? local.ports : {}
  security_group_id            = aws_security_group.this[0].id
  description                  = "To nodes: ${each.key} (lock callbacks)"
  referenced_security_group_id = var.client_security_group_id
  ip_protocol                  = each.value.protocol
  from_port                    = each.value.from
  to_port                      = each.value.to
  tags                         = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "callbacks" {
  for_each                     = local.is_lustre ? local.ports : {}
  security_group_id            = var.client_security_group_id
  description                  = "Lock callbacks of Lustre: ${each.key}"
  referenced_security_group_id = aws_security_group.this[0].id
  ip_protocol                  = each.value.protocol
  from_port                    = each.value.from
  to_port                      = each.value.to
  tags                         = var.tags
}

# EFA between two groups: all traffic, both ways, on both sides.
resource "aws_vpc_security_group_ingress_rule" "efa" {
  for_each                     = var.lustre_efa ? { files = [aws_security_group.this[0].id, var.client_security_group_id], nodes = [var.client_security_group_id, aws_security_group.this[0].id] } : {}
  security_group_id            = each.value[0]
  description                  = "EFA between nodes and file system"
  referenced_security_group_id = each.value[1]
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "efa" {
  for_each                     = var.lustre_efa ? { files = [aws_security_group.this[0].id, var.client_security_group_id], nodes = [var.client_security_group_id, aws_security_group.this[0].id] } : {}
  security_group_id            = each.value[0]
  description                  = "EFA between nodes and file system"
  referenced_security_group_id = each.value[1]
  ip_protocol                  = "-1"
  tags                         = var.tags
}
