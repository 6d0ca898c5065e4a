# One instance with a GPU; its host memory and NVMe in front of an S3 bucket that outlives it.

locals {
  remote_url = "s3://${module.object_store.bucket}/kv?region=${var.region}&ttl=${var.ttl_days}d"
  config_yaml = yamlencode({
    tiers      = ["node:///run/kvstore/node.sock"]
    remote_url = local.remote_url
  })
  node_yaml = yamlencode(merge(
    { unix = "/run/kvstore/node.sock", memory = var.host_memory, ttl = "${var.ttl_days}d" },
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
  nat                 = var.nat
  interface_endpoints = var.nat == "none" ? ["secretsmanager", "logs", "monitoring", "ec2", "ssm", "ssmmessages", "ecr.api", "ecr.dkr"] : []
}

module "object_store" {
  source              = "../modules/object_store"
  name                = var.name
  bucket_base         = var.bucket_base
  expiration_days     = { "kv/" = var.ttl_days }
  intelligent_tiering = var.intelligent_tiering
  force_destroy       = var.force_destroy
}

module "settings" {
  source      = "../modules/settings"
  name        = var.name
  config_yaml = { for z in var.zone_ids : z => local.config_yaml }
  node_yaml   = local.node_yaml
  model       = var.model
  kms_key_arn = module.object_store.kms_key_arn
}

module "iam" {
  source         = "../modules/iam"
  name           = var.name
  trust          = "ec2"
  bucket_arns    = [module.object_store.bucket_arn]
  kms_key_arns   = [module.object_store.kms_key_arn]
  secret_arns    = module.settings.secret_arns
  log_group_arns = module.gpu_nodes.log_group_arns
  model_urls     = startswith(var.model.id, "s3://") ? [var.model.id] : []
  trusted_arns   = var.trusted_arns
}

module "gpu_nodes" {
  source                = "../modules/gpu_nodes"
  name                  = var.name
  region                = var.region
  instance_type         = var.instance_type
  alternative_types     = var.alternative_types
  spot                  = var.spot
  capacity              = { min = 0, max = 1, desired = 1 }
  subnet_ids            = module.network.private_subnet_ids
  security_group_ids    = [module.network.node_security_group_id]
  instance_profile_name = module.iam.node_instance_profile_name
  role_name             = module.iam.role_names["writer"]
  config_secret_arn     = module.settings.config_secret_arn
  config_version        = module.settings.config_version
  package               = var.package
  engine                = var.engine
  kms_key_arn           = module.observability.kms_key_arn
}

module "observability" {
  source          = "../modules/observability"
  name            = var.name
  emails          = var.emails
  thresholds      = var.thresholds
  log_group_names = [module.gpu_nodes.log_group_names["node"], module.gpu_nodes.log_group_names["engine"]]
  bucket          = { name = module.object_store.bucket, filter_id = module.object_store.metrics_filter_id }
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
  working_size            = { min = 0, desired = 1 }
  nights                  = var.nights
  idle_stop               = var.idle_stop
  snapshots               = var.snapshots
}
