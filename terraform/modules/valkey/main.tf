# ElastiCache for Valkey, over TLS, with a password that is made while applying, handed to the cache and to Secrets Manager
# by write-only arguments, and kept in neither plan nor state.

locals {
  serverless = var.mode == "serverless" ? 1 : 0
  cluster    = var.mode == "cluster" ? 1 : 0
  family     = "valkey${split(".", var.engine_version)[0]}"
  username   = var.mode == "serverless" ? "${var.name}-kvstore" : ""
  # What kvstore sends (docs/valkey.md), on its own names only.
  commands = join(" ", [
    "+hello", "+select", "+info", "+cluster|slots", "+set", "+getrange", "+strlen", "+exists", "+pexpiretime", "+pexpire", "+unlink",
    "+rename", "+watch", "+unwatch", "+multi", "+exec", "+scan", "+object|idletime", "+client|no-touch",
  ])
  port     = 6379
  endpoint = var.mode == "serverless" ? try(aws_elasticache_serverless_cache.this[0].endpoint[0].address, null) : one(aws_elasticache_replication_group.this[*].configuration_endpoint_address)
  cluster_ids = var.mode == "serverless" ? [] : flatten([
    for s in range(var.shards) : [for n in range(var.replicas + 1) : format("%s-%04d-%03d", var.name, s + 1, n + 1)]
  ])
}

module "key" {
  source      = "../kms_key"
  alias       = "${var.name}/valkey"
  description = "kvstore: Valkey and its password"
  tags        = var.tags
}

ephemeral "random_password" "this" {
  length  = 64
  special = false
}

resource "aws_secretsmanager_secret" "this" {
  name_prefix             = "${var.name}/valkey-"
  description             = "kvstore: username and password of the Valkey cache"
  kms_key_id              = module.key.arn
  recovery_window_in_days = 7
  tags                    = var.tags
}

resource "aws_secretsmanager_secret_version" "this" {
  secret_id                = aws_secretsmanager_secret.this.id
  secret_string_wo         = jsonencode({ username = local.username, password = ephemeral.random_password.this.result })
  secret_string_wo_version = var.password_version
}

# ---- cluster of nodes

resource "aws_elasticache_subnet_group" "this" {
  count       = local.cluster
  name        = var.name
  description = "kvstore"
  subnet_ids  = values(var.subnet_ids)
  tags        = var.tags
}

resource "aws_elasticache_parameter_group" "this" {
  count       = local.cluster
  name        = "${var.name}-${local.family}"
  family      = local.family
  description = "kvstore: a cache of records"
  tags        = var.tags
  parameter {
    name  = "cluster-enabled"
    value = "yes"
  }
  # With noeviction a full cache would refuse writers.
  parameter {
    name  = "maxmemory-policy"
    value = var.eviction
  }
  lifecycle { create_before_destroy = true }
}

resource "aws_elasticache_replication_group" "this" {
  count                      = local.cluster
  replication_group_id       = var.name
  description                = "kvstore: records"
  engine                     = "valkey"
  engine_version             = var.engine_version
  node_type                  = var.node_type
  port                       = local.port
  num_node_groups            = var.shards
  replicas_per_node_group    = var.replicas
  automatic_failover_enabled = true # a cluster wants it, with or without replicas
  multi_az_enabled           = var.replicas > 0
  parameter_group_name       = aws_elasticache_parameter_group.this[0].name
  subnet_group_name          = aws_elasticache_subnet_group.this[0].name
  security_group_ids         = [aws_security_group.this.id]
  transit_encryption_enabled = true
  at_rest_encryption_enabled = true
  kms_key_id                 = module.key.arn
  auth_token_wo              = ephemeral.random_password.this.result
  auth_token_wo_version      = var.password_version
  # The password before stays valid beside the new one, so that nodes that run go on; the next rotation ends it.
  auth_token_update_strategy = "ROTATE"
  auto_minor_version_upgrade = true
  snapshot_retention_limit   = var.snapshot_days
  apply_immediately          = true
  tags                       = var.tags
}

# ---- serverless: no tokens there, so one user with a password, who may do what kvstore does

resource "aws_elasticache_user" "this" {
  count                = local.serverless
  user_id              = local.username
  user_name            = local.username
  engine               = "valkey"
  access_string        = "on ~${var.key_prefix}/* resetchannels -@all ${local.commands}"
  passwords_wo         = ephemeral.random_password.this.result
  passwords_wo_version = var.password_version
  tags                 = var.tags
}

resource "aws_elasticache_user_group" "this" {
  count         = local.serverless
  user_group_id = var.name
  engine        = "valkey"
  user_ids      = [aws_elasticache_user.this[0].user_id]
  tags          = var.tags
}

resource "aws_elasticache_serverless_cache" "this" {
  count                    = local.serverless
  name                     = var.name
  description              = "kvstore: records"
  engine                   = "valkey"
  major_engine_version     = split(".", var.engine_version)[0]
  kms_key_id               = module.key.arn
  user_group_id            = aws_elasticache_user_group.this[0].user_group_id
  subnet_ids               = values(var.subnet_ids)
  security_group_ids       = [aws_security_group.this.id]
  snapshot_retention_limit = var.snapshot_days
  tags                     = var.tags
  cache_usage_limits {
    data_storage {
      maximum = var.serverless_max_gb
      unit    = "GB"
    }
    ecpu_per_second { maximum = var.serverless_max_ecpu }
  }
}

# ---- who reaches it

resource "aws_security_group" "this" {
  name        = "${var.name}-valkey"
  description = "Valkey cache of kvstore"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-valkey" })
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  security_group_id            = aws_security_group.this.id
  description                  = "Nodes (6380: replicas of a serverless cache)"
  referenced_security_group_id = var.client_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port + local.serverless
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = var.client_security_group_id
  description                  = "To the Valkey cache"
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port + local.serverless
  tags                         = var.tags
}
