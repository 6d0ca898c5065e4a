# What is applied to the cluster, as YAML: terraform output -raw manifests | kubectl apply -f -

locals {
  zones = toset(var.gpu.zone_ids)
  serve = concat(
    ["kvstore", "serve", "--listen", "0.0.0.0:7070", "--unix", "/run/kvstore/node.sock", "--memory", "${var.store.memory_gib}GiB"],
    var.store.nvme_gib > 0 ? ["--disk", "file:///nvme/kv?bytes=${var.store.nvme_gib}GiB"] : [],
    ["--ttl", var.store.ttl, "--token-file", "/run/secrets/kvstore/token", "--drain-timeout", "15s"],
  )
  connector = jsonencode({
    kv_connector              = "KVStoreConnector"
    kv_connector_module_path  = "kvstore.integrations.vllm"
    kv_role                   = "kv_both"
    kv_load_failure_policy    = "recompute"
    kv_connector_extra_config = { config_file = "/etc/kvstore/config.yaml" }
  })
  command = concat(
    ["vllm", "serve", var.engine.model, "--host", "0.0.0.0", "--port", "8000", "--tensor-parallel-size", tostring(var.engine.gpus), "--kv-transfer-config", local.connector],
    var.engine.args,
  )

  manifests = merge(
    {
      "00-base.yaml" = templatefile("${path.module}/templates/base.yaml.tftpl", {
        region                = var.region
        node_token_secret_arn = var.node_token_secret_arn
      })
      "10-plugins.yaml" = templatefile("${path.module}/templates/plugins.yaml.tftpl", {
        efa          = var.gpu.efa
        efa_image    = coalesce(var.plugins.efa, "602401143452.dkr.ecr.${var.region}.amazonaws.com/eks/aws-efa-k8s-device-plugin:v0.5.18")
        nvidia_image = var.plugins.nvidia
      })
    },
    {
      for z in local.zones : "20-karpenter-${z}.yaml" => templatefile("${path.module}/templates/karpenter.yaml.tftpl", {
        zone_id            = z
        node_role          = aws_iam_role.node["gpu"].name
        ami_alias          = var.gpu.ami_alias
        subnet_id          = var.subnet_ids[z]
        security_group_ids = [var.node_security_group_id, aws_eks_cluster.this.vpc_config[0].cluster_security_group_id]
        root_volume_gib    = var.gpu.root_volume_gib
        max_gpus           = var.gpu.max_gpus
        spot               = var.gpu.spot
        instance_types     = var.gpu.instance_types
        expire_after       = var.gpu.expire_after
        consolidate_after  = var.gpu.consolidate_after
        tags               = merge(data.aws_default_tags.this.tags, var.tags, { Name = "${var.name}-gpu" })
      })
    },
    {
      for z in local.zones : "30-node-${z}.yaml" => templatefile("${path.module}/templates/node.yaml.tftpl", {
        zone_id     = z
        image       = var.store.image
        serve       = local.serve
        memory_gib  = var.store.memory_gib
        efa_devices = var.gpu.efa ? var.store.efa_devices : 0
      })
    },
    {
      for z in local.zones : "40-engine-${z}.yaml" => templatefile("${path.module}/templates/engine.yaml.tftpl", {
        zone_id     = z
        config_yaml = var.store.config_yaml[z]
        image       = var.engine.image == null ? "" : var.engine.image
        command     = local.command
        replicas    = var.engine.replicas
        gpus        = var.engine.gpus
      })
    },
    {
      for z, url in var.store.sweep : "50-sweep-${z}.yaml" => templatefile("${path.module}/templates/sweep.yaml.tftpl", {
        zone_id = z
        image   = var.store.image
        url     = url
      })
    },
  )
}

data "aws_default_tags" "this" {}
