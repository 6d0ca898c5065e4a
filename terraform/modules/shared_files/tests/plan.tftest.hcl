mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { region = "us-east-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  name                     = "kv"
  vpc_id                   = "vpc-0123456789abcdef0"
  subnet_ids               = { use1-az4 = "subnet-0123456789abcdef0", use1-az5 = "subnet-0123456789abcdef1" }
  client_security_group_id = "sg-0123456789abcdef0"
  kind                     = "none"
}

run "none" {
  command = plan
  assert {
    condition     = output.mount == null && output.file_system_id == null && output.kms_key_arn == null && length(aws_security_group.this) == 0
    error_message = "kind = none makes something"
  }
}

run "efs" {
  command = plan
  variables { kind = "efs" }
  assert {
    condition     = aws_efs_file_system.this[0].encrypted && aws_efs_file_system.this[0].throughput_mode == "elastic"
    error_message = "EFS is not encrypted, or not elastic"
  }
  assert {
    condition     = keys(aws_efs_mount_target.this) == ["use1-az4", "use1-az5"]
    error_message = "not one mount target for each zone"
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.clients["nfs"].from_port == 2049 && aws_vpc_security_group_ingress_rule.clients["nfs"].referenced_security_group_id == "sg-0123456789abcdef0" && length(aws_vpc_security_group_ingress_rule.clients) == 1
    error_message = "others than the nodes reach EFS, or by other ports"
  }
  assert {
    condition     = aws_efs_backup_policy.this[0].backup_policy[0].status == "DISABLED"
    error_message = "backups that nobody asked for"
  }
}

run "efs_options" {
  command = plan
  variables {
    kind                  = "efs"
    efs_throughput        = "provisioned"
    efs_provisioned_mibps = 1024
    efs_archive_days      = 0
    backup_days           = 7
  }
  assert {
    condition     = aws_efs_file_system.this[0].provisioned_throughput_in_mibps == 1024 && length(aws_efs_file_system.this[0].lifecycle_policy) == 0 && aws_efs_backup_policy.this[0].backup_policy[0].status == "ENABLED"
    error_message = "options of EFS do not arrive"
  }
}

run "lustre_with_efa" {
  command = plan
  variables {
    kind       = "lustre"
    lustre_efa = true
    zone_id    = "use1-az5"
  }
  assert {
    condition     = aws_fsx_lustre_file_system.this[0].efa_enabled && aws_fsx_lustre_file_system.this[0].deployment_type == "PERSISTENT_2" && one(aws_fsx_lustre_file_system.this[0].metadata_configuration).mode == "AUTOMATIC"
    error_message = "EFA wants PERSISTENT_2 and a metadata configuration"
  }
  assert {
    condition     = aws_fsx_lustre_file_system.this[0].subnet_ids == tolist(["subnet-0123456789abcdef1"])
    error_message = "the file system is not in zone_id"
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.efa) == 2 && length(aws_vpc_security_group_egress_rule.efa) == 2 && alltrue([for r in aws_vpc_security_group_ingress_rule.efa : r.ip_protocol == "-1"])
    error_message = "EFA wants all traffic both ways on both sides"
  }
  assert {
    condition     = { for k, r in aws_vpc_security_group_ingress_rule.clients : k => [r.from_port, r.to_port] } == { lnet = [988, 988], lustre = [1018, 1023] }
    error_message = "wrong ports of Lustre"
  }
}

run "openzfs" {
  command = plan
  variables {
    kind        = "openzfs"
    storage_gib = 512
  }
  assert {
    condition     = aws_fsx_openzfs_file_system.this[0].throughput_capacity == 320 && aws_fsx_openzfs_file_system.this[0].skip_final_backup
    error_message = "wrong OpenZFS file system"
  }
  assert {
    condition     = length(aws_efs_file_system.this) + length(aws_fsx_lustre_file_system.this) == 0
    error_message = "more than one file system"
  }
}
