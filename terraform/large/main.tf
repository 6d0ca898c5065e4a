# A cluster whose GPU nodes lend their memory and NVMe to each other: in each zone a pool of nodes, below it an S3 Express
# bucket of that zone, and below all of them S3.

locals {
  # The finest grain of lifecycle rules.
  express_days = endswith(var.express_ttl, "d") ? tonumber(trimsuffix(var.express_ttl, "d")) : ceil(tonumber(trimsuffix(var.express_ttl, "h")) / 24)
  s3           = "s3://${module.object_store.bucket}/kv?region=${var.region}&ttl=${var.ttl_days}d"
  express      = { for z in var.gpu_zone_ids : z => "s3://${module.object_store.express_buckets[z]}/kv?region=${var.region}&ttl=${var.express_ttl}" }
  config_yaml = {
    for z in var.gpu_zone_ids : z => yamlencode({
      tiers      = concat([{ url = "node://node-${z}.kvstore.svc:7070?discover=dns" }], var.keep_in_s3 ? [{ url = local.express[z] }] : [])
      remote_url = var.keep_in_s3 ? local.s3 : local.express[z]
    })
  }
  node_yaml = yamlencode(merge(
    { listen = "0.0.0.0:7070", unix = "/run/kvstore/node.sock", memory = "${var.node.memory_gib}GiB", ttl = "${var.node.ttl_days}d", token_file = "/run/secrets/kvstore/token" },
    var.node.nvme_gib == 0 ? {} : { disk = "file:///nvme/kv?bytes=${var.node.nvme_gib}GiB" },
  ))
}

module "network" {
  source        = "../modules/network"
  name          = var.name
  cidr          = var.cidr
  zone_ids      = var.zone_ids
  peer_cidrs    = var.peer_cidrs
  allowed_ports = [8000]
  s3express     = true
  nat           = var.nat
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

module "settings" {
  source             = "../modules/settings"
  name               = var.name
  config_yaml        = local.config_yaml
  node_yaml          = local.node_yaml
  model              = { id = var.engine.image == null ? "none" : var.engine.model, args = var.engine.args }
  node_token         = true
  node_token_version = var.node_token_version
  kms_key_arn        = module.object_store.kms_key_arn
}

module "iam" {
  source              = "../modules/iam"
  name                = var.name
  trust               = "pods"
  cluster_arn         = module.cluster.cluster_arn
  bucket_arns         = [module.object_store.bucket_arn]
  express_bucket_arns = values(module.object_store.express_bucket_arns)
  kms_key_arns        = [module.object_store.kms_key_arn]
  secret_arns         = module.settings.secret_arns
  model_urls          = startswith(var.engine.model, "s3://") ? [var.engine.model] : []
  trusted_arns        = var.trusted_arns
}

module "cluster" {
  source                 = "../modules/cluster"
  name                   = var.name
  region                 = var.region
  kubernetes_version     = var.kubernetes_version
  subnet_ids             = module.network.private_subnet_ids
  node_security_group_id = module.network.node_security_group_id
  vpc_cidr               = var.cidr
  service_cidr           = var.service_cidr
  admin_arns             = var.admin_arns
  public_access_cidrs    = var.public_access_cidrs
  deletion_protection    = var.deletion_protection
  gpu                    = merge(var.gpu, { zone_ids = var.gpu_zone_ids })
  efa_more               = var.efa_more
  roles                  = { writer = module.iam.writer_role_arn, evictor = module.iam.evictor_role_arn }
  node_token_secret_arn  = module.settings.node_token_secret_arn
  logs_kms_key_arn       = module.observability.kms_key_arn
  engine                 = var.engine
  store = {
    image       = var.image
    memory_gib  = var.node.memory_gib
    nvme_gib    = var.node.nvme_gib
    ttl         = "${var.node.ttl_days}d"
    efa_devices = var.node.efa_devices
    config_yaml = local.config_yaml
    sweep       = endswith(var.express_ttl, "h") ? local.express : {}
  }
}

module "observability" {
  source           = "../modules/observability"
  name             = var.name
  emails           = var.emails
  thresholds       = var.thresholds
  log_group_names  = module.cluster.log_group_names
  log_field_prefix = "log_processed." # the add-on of CloudWatch puts a line's own fields below this name
  bucket           = { name = module.object_store.bucket, filter_id = module.object_store.metrics_filter_id }
  cloudtrail       = var.audit.cloudtrail
  config_recorder  = var.audit.config
}

module "budget" {
  source        = "../modules/budget"
  name          = var.name
  amount        = var.budget
  emails        = var.emails
  sns_topic_arn = module.observability.topic_arn
  project       = var.project
}
