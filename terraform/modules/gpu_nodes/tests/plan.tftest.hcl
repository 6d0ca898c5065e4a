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
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_default_tags" {
    defaults = { tags = { Project = "kvstore" } }
  }
}

variables {
  name                  = "kv"
  region                = "us-east-1"
  instance_type         = "g5.xlarge"
  capacity              = { min = 0, max = 2, desired = 1 }
  subnet_ids            = { use1-az4 = "subnet-1" }
  security_group_ids    = ["sg-1"]
  instance_profile_name = "p"
  role_name             = "r"
  config_secret_arn     = "arn:aws:secretsmanager:us-east-1:123456789012:secret:kv/config-AbCdEf"
  config_version        = "0"
  package               = "s3://acme/wheels/"
}

run "without_efa" {
  command = plan
  assert {
    condition     = length(aws_launch_template.this.network_interfaces) == 1 && aws_launch_template.this.network_interfaces[0].interface_type == "interface" && length(aws_placement_group.this) == 0
    error_message = "one plain interface was asked for"
  }
  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required" && aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "IMDSv2 with one hop"
  }
  assert {
    condition     = alltrue([for n in aws_launch_template.this.network_interfaces : n.associate_public_ip_address == "false"])
    error_message = "nodes have no public address"
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0 && aws_autoscaling_group.this.capacity_rebalance
    error_message = "spot was asked for"
  }
}

run "with_efa" {
  command = plan
  variables {
    instance_type = "p4d.24xlarge"
    efa           = true
    spot          = false
  }
  assert {
    condition     = [for n in aws_launch_template.this.network_interfaces : "${n.network_card_index} ${n.device_index} ${n.interface_type}"] == ["0 0 efa", "1 1 efa-only", "2 1 efa-only", "3 1 efa-only"]
    error_message = "card 0 has the IP (efa, device 0), the others none (efa-only, device 1)"
  }
  assert {
    condition     = aws_placement_group.this[0].strategy == "cluster" && aws_autoscaling_group.this.placement_group == "kv-gpu"
    error_message = "no cluster placement group"
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 100
    error_message = "on demand was asked for"
  }
}

run "scaling" {
  command = plan
  variables { scaling = { target = 60 } }
  assert {
    condition     = aws_autoscaling_policy.gpu[0].target_tracking_configuration[0].target_value == 60
    error_message = "the target is not taken"
  }
}

run "refuses_min_above_max" {
  command = plan
  variables { capacity = { min = 3, max = 2, desired = 3 } }
  expect_failures = [var.capacity]
}

run "refuses_efa_over_zones" {
  command = plan
  variables {
    efa           = true
    instance_type = "p5.48xlarge"
    subnet_ids    = { use1-az4 = "subnet-1", use1-az6 = "subnet-2" }
  }
  expect_failures = [var.subnet_ids]
}

run "refuses_other_types_with_efa" {
  command = plan
  variables {
    efa               = true
    instance_type     = "p5.48xlarge"
    alternative_types = ["p4d.24xlarge"]
  }
  expect_failures = [var.alternative_types]
}

run "refuses_image_without_tag" {
  command = plan
  variables { package = "123456789012.dkr.ecr.us-east-1.amazonaws.com/kvstore" }
  expect_failures = [var.package]
}

run "refuses_folder_without_slash" {
  command = plan
  variables { package = "s3://acme/wheels" }
  expect_failures = [var.package]
}

run "refuses_shell_in_the_package" {
  command = plan
  variables { engine = { package = "vllm$(reboot)" } }
  expect_failures = [var.engine]
}

run "refuses_other_engines" {
  command = plan
  variables { engine = { name = "tgi" } }
  expect_failures = [var.engine]
}

run "refuses_ami_names" {
  command = plan
  variables { ami = "amazon-linux-2023" }
  expect_failures = [var.ami]
}

run "refuses_types_that_are_none" {
  command = plan
  variables { instance_type = "big" }
  expect_failures = [var.instance_type]
}

run "refuses_scaling_beyond_all" {
  command = plan
  variables { scaling = { target = 100 } }
  expect_failures = [var.scaling]
}

run "refuses_small_volumes" {
  command = plan
  variables { root_volume_gib = 20 }
  expect_failures = [var.root_volume_gib]
}

run "refuses_log_days" {
  command = plan
  variables { log_days = 31 }
  expect_failures = [var.log_days]
}
