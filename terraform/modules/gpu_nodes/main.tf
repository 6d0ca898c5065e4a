# Instances with GPUs: the engine, and beside it a kvstore node that owns host memory and the local NVMe.

data "aws_partition" "this" {}

module "efa" {
  count          = var.efa ? 1 : 0
  source         = "../efa"
  region         = var.region
  instance_types = [var.instance_type]
  more           = var.efa_more
}

locals {
  image        = !startswith(var.package, "s3://")
  engine_image = local.image && can(regex("[/@:]", var.engine.package)) && !can(regex("==", var.engine.package)) ? var.engine.package : var.package
  registries   = local.image ? regexall("^[0-9]{12}\\.dkr\\.ecr\\.[a-z0-9-]+\\.amazonaws\\.com", var.package) : []
  serve        = "kvstore serve --config /etc/kvstore/node.yaml"
  cards        = var.efa ? module.efa[0].cards[var.instance_type] : 1
  arn          = "arn:${data.aws_partition.this.partition}"
  logs         = { for what in ["node", "engine", "boot", "vllm"] : what => "/${var.name}/${what}" }

  shown = {
    image        = local.image
    package      = var.package
    engine_image = local.engine_image
    engine       = var.engine
    serve        = local.serve
    publish      = "kvstore cloudwatch publish --scrape http://127.0.0.1:${var.engine.port}/metrics --gpu off" # the agent has the GPUs
    region       = var.region
    devices      = var.efa ? "--device /dev/infiniband" : ""
    models       = var.mount == null ? "/var/lib/kvstore/models" : "/mnt/shared/models"
  }
  units = {
    for name in concat(["kvstore-boot.service", "kvstore-node.service"], var.engine.name == "none" ? [] : ["kvstore-engine.service", "kvstore-cloudwatch.service"]) :
    name => templatefile("${path.module}/templates/${name}.tftpl", local.shown)
  }
  agent = jsonencode({
    agent = { metrics_collection_interval = 60 }
    metrics = {
      namespace              = "CacheGen"
      append_dimensions      = { AutoScalingGroupName = "$${aws:AutoScalingGroupName}" }
      aggregation_dimensions = [[], ["AutoScalingGroupName"]]
      metrics_collected = {
        nvidia_gpu = { measurement = [{ name = "utilization_gpu", rename = "GPUUtilization", unit = "Percent" }] }
      }
    }
    logs = {
      # The engine's own metrics; the alarm on the device KV cache reads this one.
      metrics_collected = {
        prometheus = {
          prometheus_config_path = "/opt/aws/amazon-cloudwatch-agent/etc/kvstore-prometheus.yaml"
          log_group_name         = local.logs.vllm
          emf_processor = {
            metric_namespace = "vLLM"
            metric_declaration = [{
              source_labels    = ["job"]
              label_matcher    = "^vllm$"
              dimensions       = [["cluster"]]
              metric_selectors = ["^vllm:kv_cache_usage_perc$"]
            }]
          }
        }
      }
      logs_collected = {
        files = {
          collect_list = [
            for what, path in { node = "/var/log/kvstore/node.log", engine = "/var/log/kvstore/engine.log", boot = "/var/log/cloud-init-output.log" } :
            { file_path = path, log_group_name = local.logs[what], log_stream_name = "{instance_id}" }
          ]
        }
      }
    }
  })
  prometheus = yamlencode({
    global = { scrape_interval = "60s" }
    scrape_configs = [{
      job_name       = "vllm"
      static_configs = [{ targets = ["127.0.0.1:${var.engine.port}"], labels = { cluster = var.name } }]
    }]
  })
  user_data = templatefile("${path.module}/templates/user_data.sh.tftpl", merge(local.shown, {
    config_version        = var.config_version
    config_secret_arn     = var.config_secret_arn
    node_token_secret_arn = var.node_token_secret_arn == null ? "" : var.node_token_secret_arn
    valkey_secret_arn     = var.valkey_secret_arn == null ? "" : var.valkey_secret_arn
    mount                 = var.mount
    ecr                   = join("", local.registries)
    configure             = file("${path.module}/templates/configure.py")
    agent                 = local.agent
    prometheus            = local.prometheus
    units                 = local.units
  }))
}

# What the start of a node needs; the rest (data, secrets, logs, metrics, traces, Session Manager) is in module iam.
data "aws_iam_policy_document" "node" {
  dynamic "statement" {
    for_each = local.image ? [] : [regex("^s3://([^/]+)/(.+)$", var.package)]
    content {
      sid       = "Package"
      actions   = ["s3:GetObject"]
      resources = ["${local.arn}:s3:::${statement.value[0]}/${statement.value[1]}${endswith(statement.value[1], "/") ? "*" : ""}"]
    }
  }
  dynamic "statement" {
    for_each = local.image || endswith(var.package, ".whl") ? [] : [regex("^s3://([^/]+)/(.+)$", var.package)]
    content {
      sid       = "ListPackages"
      actions   = ["s3:ListBucket"]
      resources = ["${local.arn}:s3:::${statement.value[0]}"]
      condition {
        test     = "StringLike"
        variable = "s3:prefix"
        values   = ["${statement.value[1]}*"]
      }
    }
  }
  dynamic "statement" {
    for_each = local.registries
    content {
      sid       = "Images"
      actions   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
      resources = [for i in distinct([var.package, local.engine_image]) : "${local.arn}:ecr:${var.region}:${split(".", i)[0]}:repository/${regex("^[^/]+/([^:@]+)", i)[0]}" if startswith(i, statement.value)]
    }
  }
  # These know no resources; the region is what can be limited.
  statement {
    sid       = "Start"
    actions   = concat(["ec2:DescribeTags"], length(local.registries) > 0 ? ["ecr:GetAuthorizationToken"] : [])
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestedRegion"
      values   = [var.region]
    }
  }
}

resource "aws_iam_role_policy" "node" {
  name   = "start"
  role   = var.role_name
  policy = data.aws_iam_policy_document.node.json
}

resource "aws_cloudwatch_log_group" "this" {
  for_each          = local.logs
  name              = each.value
  retention_in_days = var.log_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

resource "aws_placement_group" "this" {
  count    = var.efa ? 1 : 0
  name     = "${var.name}-gpu"
  strategy = "cluster"
  tags     = var.tags
}

resource "aws_launch_template" "this" {
  name_prefix            = "${var.name}-gpu-"
  description            = "kvstore node with ${var.engine.name}"
  image_id               = var.ami
  instance_type          = var.instance_type
  update_default_version = true
  user_data              = base64gzip(local.user_data)
  tags                   = var.tags

  iam_instance_profile {
    name = var.instance_profile_name
  }

  # One hop: containers of their own network do not get the node's credentials.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.root_volume_gib
      volume_type           = "gp3"
      throughput            = 500
      iops                  = 6000
      encrypted             = true
      kms_key_id            = var.ebs_kms_key_arn
      delete_on_termination = true
    }
  }

  # Card 0 carries the IP address; the others have none, so "efa-only".
  dynamic "network_interfaces" {
    for_each = range(local.cards)
    content {
      device_index                = network_interfaces.value == 0 ? 0 : 1
      network_card_index          = network_interfaces.value
      interface_type              = !var.efa ? "interface" : network_interfaces.value == 0 ? "efa" : "efa-only"
      associate_public_ip_address = local.cards == 1 ? "false" : null # with several interfaces EC2 takes no word on it
      delete_on_termination       = "true"
      security_groups             = var.security_group_ids
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]
    content {
      resource_type = tag_specifications.value
      tags          = merge(data.aws_default_tags.this.tags, var.tags, { Name = "${var.name}-gpu" })
    }
  }

  lifecycle {
    create_before_destroy = true
    precondition {
      condition     = length(base64gzip(local.user_data)) <= 21844
      error_message = "engine, package: the user data is longer than the 16 KiB that EC2 takes; write shorter values."
    }
  }
}

# Tags of the provider do not reach what a launch template makes.
data "aws_default_tags" "this" {}

resource "aws_autoscaling_group" "this" {
  name_prefix               = "${var.name}-gpu-"
  min_size                  = var.capacity.min
  max_size                  = var.capacity.max
  desired_capacity          = var.capacity.desired
  vpc_zone_identifier       = values(var.subnet_ids)
  placement_group           = one(aws_placement_group.this[*].name)
  capacity_rebalance        = var.spot
  health_check_type         = "EC2"
  health_check_grace_period = 900
  default_instance_warmup   = 600
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances", "GroupTotalInstances"]
  # Spot may have no capacity for hours; terraform does not wait for it.
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = var.spot ? var.on_demand_base : 0
      on_demand_percentage_above_base_capacity = var.spot ? 0 : 100
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "capacity-optimized-prioritized"
    }
    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.this.id
        version            = aws_launch_template.this.latest_version
      }
      dynamic "override" {
        for_each = concat([var.instance_type], var.alternative_types)
        content {
          instance_type = override.value
        }
      }
    }
  }

  instance_refresh {
    strategy = "Rolling"
    preferences {
      min_healthy_percentage = 50
      instance_warmup        = 600
    }
  }

  dynamic "tag" {
    for_each = merge(var.tags, { Name = "${var.name}-gpu" })
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  # Scaling and the schedule change it; a plan must not take that back. (min_size it does take back: applying at night
  # brings the smallest number of nodes back until the next stop.)
  lifecycle {
    ignore_changes = [desired_capacity]
  }
}

resource "aws_autoscaling_policy" "gpu" {
  count                     = var.scaling == null ? 0 : 1
  name                      = "${var.name}-gpu-use"
  autoscaling_group_name    = aws_autoscaling_group.this.name
  policy_type               = "TargetTrackingScaling"
  estimated_instance_warmup = var.scaling.warmup
  target_tracking_configuration {
    target_value = var.scaling.target
    customized_metric_specification {
      namespace   = "CacheGen"
      metric_name = "GPUUtilization"
      statistic   = "Average"
      metric_dimension {
        name  = "AutoScalingGroupName"
        value = aws_autoscaling_group.this.name
      }
    }
  }
}
