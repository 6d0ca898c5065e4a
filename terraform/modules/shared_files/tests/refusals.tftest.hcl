# Wrong values are refused while planning. The messages themselves are read by tests/terraform/test_refusals.py.

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
  kind                     = "efs"
  vpc_id                   = "vpc-0123456789abcdef0"
  subnet_ids               = { "use1-az4" = "subnet-0123456789abcdef0", "use1-az5" = "subnet-0123456789abcdef1" }
  client_security_group_id = "sg-0123456789abcdef0"
}

run "refuses_upper_case_name" {
  command = plan
  variables {
    name = "KV"
  }
  expect_failures = [var.name]
}

run "refuses_double_hyphen_in_name" {
  command = plan
  variables {
    name = "k--v"
  }
  expect_failures = [var.name]
}

run "refuses_long_name" {
  command = plan
  variables {
    name = "kv-xxxxxxxxxxxxxxxxxxxx"
  }
  expect_failures = [var.name]
}

run "refuses_unknown_kind" {
  command = plan
  variables {
    kind = "nfs"
  }
  expect_failures = [var.kind]
}

run "refuses_no_subnet" {
  command = plan
  variables {
    subnet_ids = {}
  }
  expect_failures = [var.subnet_ids]
}

run "refuses_foreign_zone" {
  command = plan
  variables {
    kind    = "lustre"
    zone_id = "use1-az1"
  }
  expect_failures = [var.zone_id]
}

run "refuses_unknown_throughput" {
  command = plan
  variables {
    efs_throughput = "fast"
  }
  expect_failures = [var.efs_throughput]
}

run "refuses_provisioned_without_number" {
  command = plan
  variables {
    efs_throughput = "provisioned"
  }
  expect_failures = [var.efs_provisioned_mibps]
}

run "refuses_number_without_provisioned" {
  command = plan
  variables {
    efs_provisioned_mibps = 100
  }
  expect_failures = [var.efs_provisioned_mibps]
}

run "refuses_odd_archive_days" {
  command = plan
  variables {
    efs_archive_days = 8
  }
  expect_failures = [var.efs_archive_days]
}

run "refuses_odd_lustre_size" {
  command = plan
  variables {
    kind        = "lustre"
    storage_gib = 1300
  }
  expect_failures = [var.storage_gib]
}

run "refuses_small_openzfs" {
  command = plan
  variables {
    kind        = "openzfs"
    storage_gib = 10
  }
  expect_failures = [var.storage_gib]
}

run "refuses_odd_lustre_throughput" {
  command = plan
  variables {
    kind                = "lustre"
    lustre_mbps_per_tib = 300
  }
  expect_failures = [var.lustre_mbps_per_tib]
}

run "refuses_efa_on_efs" {
  command = plan
  variables {
    lustre_efa = true
  }
  expect_failures = [var.lustre_efa]
}

run "refuses_odd_openzfs_throughput" {
  command = plan
  variables {
    kind         = "openzfs"
    openzfs_mbps = 100
  }
  expect_failures = [var.openzfs_mbps]
}

run "refuses_negative_backup_days" {
  command = plan
  variables {
    backup_days = -1
  }
  expect_failures = [var.backup_days]
}
