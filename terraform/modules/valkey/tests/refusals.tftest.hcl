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
  mode                     = "cluster"
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

run "refuses_unknown_mode" {
  command = plan
  variables {
    mode = "single"
  }
  expect_failures = [var.mode]
}

run "refuses_serverless_in_one_zone" {
  command = plan
  variables {
    mode       = "serverless"
    subnet_ids = { "use1-az4" = "subnet-0123456789abcdef0" }
  }
  expect_failures = [var.subnet_ids]
}

run "refuses_serverless_in_four_zones" {
  command = plan
  variables {
    mode       = "serverless"
    subnet_ids = { "use1-az1" = "subnet-0123456789abcdef1", "use1-az2" = "subnet-0123456789abcdef2", "use1-az3" = "subnet-0123456789abcdef3", "use1-az4" = "subnet-0123456789abcdef4" }
  }
  expect_failures = [var.subnet_ids]
}

run "refuses_no_subnet" {
  command = plan
  variables {
    subnet_ids = {}
    replicas   = 0
  }
  expect_failures = [var.subnet_ids]
}

run "refuses_replicas_in_one_zone" {
  command = plan
  variables {
    subnet_ids = { "use1-az4" = "subnet-0123456789abcdef0" }
    replicas   = 1
  }
  expect_failures = [var.replicas]
}

run "refuses_redis_version" {
  command = plan
  variables {
    engine_version = "6.2"
  }
  expect_failures = [var.engine_version]
}

run "refuses_ec2_type" {
  command = plan
  variables {
    node_type = "r7g.large"
  }
  expect_failures = [var.node_type]
}

run "refuses_no_shard" {
  command = plan
  variables {
    shards = 0
  }
  expect_failures = [var.shards]
}

run "refuses_many_replicas" {
  command = plan
  variables {
    replicas = 6
  }
  expect_failures = [var.replicas]
}

run "refuses_noeviction" {
  command = plan
  variables {
    eviction = "noeviction"
  }
  expect_failures = [var.eviction]
}

run "refuses_no_data" {
  command = plan
  variables {
    serverless_max_gb = 0
  }
  expect_failures = [var.serverless_max_gb]
}

run "refuses_few_ecpu" {
  command = plan
  variables {
    serverless_max_ecpu = 10
  }
  expect_failures = [var.serverless_max_ecpu]
}

run "refuses_long_snapshots" {
  command = plan
  variables {
    snapshot_days = 36
  }
  expect_failures = [var.snapshot_days]
}

run "refuses_prefix_with_slash" {
  command = plan
  variables {
    key_prefix = "kv/"
  }
  expect_failures = [var.key_prefix]
}

run "refuses_password_version_0" {
  command = plan
  variables {
    password_version = 0
  }
  expect_failures = [var.password_version]
}
