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
  mode                     = "cluster"
}

run "cluster" {
  command = plan
  variables {
    shards   = 3
    replicas = 2
  }
  assert {
    condition     = aws_elasticache_replication_group.this[0].transit_encryption_enabled && aws_elasticache_replication_group.this[0].at_rest_encryption_enabled == "true" && aws_elasticache_replication_group.this[0].multi_az_enabled && aws_elasticache_replication_group.this[0].automatic_failover_enabled
    error_message = "not encrypted, or no failover"
  }
  assert {
    condition     = { for p in aws_elasticache_parameter_group.this[0].parameter : p.name => p.value } == { cluster-enabled = "yes", maxmemory-policy = "allkeys-lru" }
    error_message = "wrong parameters"
  }
  assert {
    condition     = aws_elasticache_parameter_group.this[0].family == "valkey8" && aws_elasticache_replication_group.this[0].engine == "valkey"
    error_message = "not Valkey 8"
  }
  assert {
    condition     = length(output.cluster_ids) == 9 && output.cluster_ids[0] == "kv-0001-001" && output.cluster_ids[8] == "kv-0003-003"
    error_message = "wrong ids for alarms"
  }
  assert {
    condition     = output.port == 6379 && length(aws_elasticache_serverless_cache.this) == 0
    error_message = "wrong port, or a serverless cache too"
  }
}

run "password_is_write_only" {
  command = plan
  variables { password_version = 2 }
  assert {
    condition     = aws_elasticache_replication_group.this[0].auth_token == null && aws_elasticache_replication_group.this[0].auth_token_wo_version == 2
    error_message = "the password of the cluster would be kept in the state, or is not rotated"
  }
  assert {
    condition     = aws_secretsmanager_secret_version.this.secret_string == null && aws_secretsmanager_secret_version.this.secret_string_wo_version == 2
    error_message = "the password in Secrets Manager would be kept in the state, or is not rotated"
  }
}

run "one_node_without_replica" {
  command = plan
  variables {
    replicas   = 0
    subnet_ids = { use1-az4 = "subnet-0123456789abcdef0" }
  }
  assert {
    condition     = !aws_elasticache_replication_group.this[0].multi_az_enabled
    error_message = "multi-AZ wants replicas"
  }
}

run "serverless_in_three_zones" {
  command = plan
  variables {
    mode       = "serverless"
    subnet_ids = { use1-az4 = "subnet-0123456789abcdef0", use1-az5 = "subnet-0123456789abcdef1", use1-az6 = "subnet-0123456789abcdef2" }
  }
  assert {
    condition     = length(aws_elasticache_serverless_cache.this[0].subnet_ids) == 3
    error_message = "not in all three zones"
  }
}

run "serverless" {
  command = plan
  variables { mode = "serverless" }
  assert {
    condition     = aws_elasticache_serverless_cache.this[0].engine == "valkey" && aws_elasticache_serverless_cache.this[0].major_engine_version == "8" && aws_elasticache_serverless_cache.this[0].user_group_id == "kv"
    error_message = "wrong serverless cache"
  }
  assert {
    condition     = aws_elasticache_user.this[0].passwords == null && aws_elasticache_user.this[0].passwords_wo_version == 1
    error_message = "the user's password would be kept in the state"
  }
  assert {
    condition     = startswith(aws_elasticache_user.this[0].access_string, "on ~kv/* resetchannels -@all +") && !strcontains(aws_elasticache_user.this[0].access_string, "flush")
    error_message = "the user may do more than kvstore does"
  }
  assert {
    condition     = one(one(aws_elasticache_serverless_cache.this[0].cache_usage_limits).data_storage).maximum == 100
    error_message = "no limit of cost"
  }
}
