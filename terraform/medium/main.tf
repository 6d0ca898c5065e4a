# Instances with GPUs that come and go; Valkey and one S3 Express bucket in each of their zones keep what they computed.

locals {
  # The finest grain of lifecycle rules.
  express_days = endswith(var.express_ttl, "d") ? tonumber(trimsuffix(var.express_ttl, "d")) : ceil(tonumber(trimsuffix(var.express_ttl, "h")) / 24)
  nodes        = { for z in var.gpu_zone_ids : z => module.network.private_subnet_ids[z] }
  urls = {
    s3      = "s3://${module.object_store.bucket}/kv?region=${var.region}&ttl=${var.ttl_days}d"
    express = { for z in var.gpu_zone_ids : z => "s3://${module.object_store.express_buckets[z]}/kv?region=${var.region}&ttl=${var.express_ttl}" }
    valkey  = [for v in module.valkey : "valkeys://${v.endpoint}:${v.port}/kv?ttl=${var.express_ttl}"]
  }
  # Valkey is shared memory across the network: only what was asked for twice comes up into it, and a slow answer is not waited for.
  config_yaml = {
    for z in var.gpu_zone_ids : z => yamlencode({
      tiers = concat(
        [{ url = "node:///run/kvstore/node.sock" }],
        [for u in local.urls.valkey : { url = u, promote = "second_use", timeout = "200ms" }],
        var.keep_in_s3 ? [{ url = local.urls.express[z] }] : [],
      )
      remote_url = var.keep_in_s3 ? local.urls.s3 : local.urls.express[z]
    })
  }
  node_yaml = yamlencode(merge(
    { unix = "/run/kvstore/node.sock", memory = var.host_memory, ttl = "${var.express_ttl}" },
    var.nvme_gib == 0 ? {} : { disk = "file:///nvme/kv?bytes=${var.nvme_gib}GiB" },
  ))
}

module "network" {
  source              = "../modules/network"
  name                = var.name
  cidr                = var.cidr
  zone_ids            = var.zone_ids
  peer_cidrs          = var.peer_cidrs
  allowed_cidrs       = var.allowed_cidrs
  allowed_ports       = [var.engine.port]
  s3express           = true
  nat                 = var.nat
  interface_endpoints = var.nat == "none" ? ["secretsmanager", "logs", "monitoring", "ec2", "ssm", "ssmmessages", "ecr.api", "ecr.dkr"] : []
}

module "object_store" {
  source                  = "../modules/object_store"
  name                    = var.name
  bucket_base             = var.bucket_base
  express_zone_ids        = var.gpu_zone_ids
  s3express_zones         = var.s3express_zones
  expiration_days         = { "kv/" = var.ttl_days }
  express_expiration_days = { "kv/" = local.express_days }
  intelligent_tiering     = var.intelligent_tiering
  force_destroy           = var.force_destroy
}

module "shared_files" {
  source                   = "../modules/shared_files"
  name                     = var.name
  kind                     = var.shared_fs
  vpc_id                   = module.network.vpc_id
  subnet_ids               = module.network.private_subnet_ids
  zone_id                  = var.gpu_zone_ids[0]
  client_security_group_id = module.network.node_security_group_id
}

module "valkey" {
  count                    = var.valkey.mode == "none" ? 0 : 1
  source                   = "../modules/valkey"
  name                     = var.name
  mode                     = var.valkey.mode
  vpc_id                   = module.network.vpc_id
  subnet_ids               = module.network.private_subnet_ids
  client_security_group_id = module.network.node_security_group_id
  node_type                = var.valkey.node_type
  shards                   = var.valkey.shards
  replicas                 = var.valkey.replicas
  serverless_max_gb        = var.valkey.max_gb
  password_version         = var.valkey.password_version
}

module "settings" {
  source      = "../modules/settings"
  name        = var.name
  config_yaml = local.config_yaml
  node_yaml   = local.node_yaml
  model       = var.model
  kms_key_arn = module.object_store.kms_key_arn
}

module "iam" {
  source              = "../modules/iam"
  name                = var.name
  trust               = "ec2"
  bucket_arns         = [module.object_store.bucket_arn]
  express_bucket_arns = values(module.object_store.express_bucket_arns)
  kms_key_arns        = concat([module.object_store.kms_key_arn], module.valkey[*].kms_key_arn)
  secret_arns         = concat(module.settings.secret_arns, module.valkey[*].secret_arn)
  log_group_arns      = module.gpu_nodes.log_group_arns
  model_urls          = startswith(var.model.id, "s3://") ? [var.model.id] : []
  trusted_arns        = var.trusted_arns
}

module "gpu_nodes" {
  source                = "../modules/gpu_nodes"
  name                  = var.name
  region                = var.region
  instance_type         = var.instance_type
  alternative_types     = var.alternative_types
  spot                  = var.spot
  on_demand_base        = var.on_demand_base
  capacity              = var.capacity
  subnet_ids            = local.nodes
  security_group_ids    = [module.network.node_security_group_id]
  instance_profile_name = module.iam.node_instance_profile_name
  role_name             = module.iam.role_names["writer"]
  efa                   = var.efa
  efa_more              = var.efa_more
  config_secret_arn     = module.settings.config_secret_arn
  config_version        = module.settings.config_version
  valkey_secret_arn     = one(module.valkey[*].secret_arn)
  package               = var.package
  engine                = var.engine
  mount                 = module.shared_files.mount
  scaling               = var.gpu_target == null ? null : { target = var.gpu_target }
  kms_key_arn           = module.observability.kms_key_arn
}

module "observability" {
  source          = "../modules/observability"
  name            = var.name
  emails          = var.emails
  thresholds      = var.thresholds
  log_group_names = [module.gpu_nodes.log_group_names["node"], module.gpu_nodes.log_group_names["engine"]]
  bucket          = { name = module.object_store.bucket, filter_id = module.object_store.metrics_filter_id }
  watch_efs       = var.shared_fs == "efs"
  efs_id          = module.shared_files.file_system_id
  valkey = var.valkey.mode == "none" ? null : {
    mode       = var.valkey.mode
    id         = var.name
    member_ids = flatten(module.valkey[*].cluster_ids)
    max_bytes  = var.valkey.max_gb * 1000000000
  }
  cloudtrail      = var.audit.cloudtrail
  config_recorder = var.audit.config
}

module "budget" {
  source        = "../modules/budget"
  name          = var.name
  amount        = var.budget
  emails        = var.emails
  sns_topic_arn = module.observability.topic_arn
  project       = var.project
}

module "schedule" {
  source                  = "../modules/schedule"
  name                    = var.name
  autoscaling_group_names = [module.gpu_nodes.autoscaling_group_name]
  working_size            = { min = var.capacity.min, desired = var.capacity.desired }
  nights                  = var.nights
  idle_stop               = var.idle_stop
  snapshots               = var.snapshots
}
