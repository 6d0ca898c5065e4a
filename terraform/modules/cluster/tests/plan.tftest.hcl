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
  name                   = "kv"
  region                 = "us-east-1"
  subnet_ids             = { use1-az4 = "subnet-1", use1-az6 = "subnet-2" }
  node_security_group_id = "sg-1"
  vpc_cidr               = "10.60.0.0/16"
  gpu                    = { instance_types = ["g6.48xlarge"], zone_ids = ["use1-az4"], ami_alias = "al2023@v20251029" }
  roles                  = { writer = "arn:aws:iam::123456789012:role/w", evictor = "arn:aws:iam::123456789012:role/e" }
  node_token_secret_arn  = "arn:aws:secretsmanager:us-east-1:123456789012:secret:kv/token-AbCdEf"
  store                  = { image = "acme/kvstore:0.1.0", memory_gib = 64, nvme_gib = 1000, ttl = "1d", config_yaml = { use1-az4 = "remote_url: s3://acme-kv\n" } }
}

run "cluster" {
  command = plan
  assert {
    condition     = aws_eks_cluster.this.access_config[0].authentication_mode == "API" && aws_eks_cluster.this.vpc_config[0].endpoint_private_access && !aws_eks_cluster.this.vpc_config[0].endpoint_public_access
    error_message = "the API is to be reached from the VPC only, by access entries"
  }
  assert {
    condition     = aws_launch_template.system.metadata_options[0].http_put_response_hop_limit == 1 && aws_launch_template.system.metadata_options[0].http_tokens == "required"
    error_message = "IMDSv2 with one hop: pods must not take the node's role"
  }
  assert {
    condition     = { for k, a in aws_eks_pod_identity_association.kvstore : a.service_account => a.role_arn } == { kvstore = var.roles.writer, evictor = var.roles.evictor }
    error_message = "pods do not get their roles"
  }
  assert {
    condition     = setunion(keys(aws_eks_addon.before), keys(aws_eks_addon.after)) == toset(keys(var.addons))
    error_message = "add-ons are missing"
  }
  assert {
    condition     = jsondecode(aws_eks_addon.after["aws-secrets-store-csi-driver-provider"].configuration_values).secrets-store-csi-driver.linux.tolerations[0].operator == "Exists"
    error_message = "the secrets driver must run on GPU nodes, which have a taint"
  }
}

run "public_api" {
  command = plan
  variables { public_access_cidrs = ["203.0.113.0/24"] }
  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].public_access_cidrs == toset(["203.0.113.0/24"])
    error_message = "the API is open to others"
  }
}

run "refuses_services_in_the_vpc" {
  command = plan
  variables { service_cidr = "10.60.128.0/20" }
  expect_failures = [var.service_cidr]
}

run "refuses_services_around_the_vpc" {
  command = plan
  variables { service_cidr = "10.48.0.0/12" }
  expect_failures = [var.service_cidr]
}

run "refuses_public_services" {
  command = plan
  variables { service_cidr = "8.8.0.0/16" }
  expect_failures = [var.service_cidr]
}

run "refuses_the_whole_internet" {
  command = plan
  variables { public_access_cidrs = ["0.0.0.0/0"] }
  expect_failures = [var.public_access_cidrs]
}

run "refuses_one_zone" {
  command = plan
  variables { subnet_ids = { use1-az4 = "subnet-1" } }
  expect_failures = [var.subnet_ids]
}

run "refuses_images_that_move" {
  command = plan
  variables { gpu = { instance_types = ["g6.48xlarge"], zone_ids = ["use1-az4"], ami_alias = "al2023@latest" } }
  expect_failures = [var.gpu]
}

run "refuses_zones_without_subnet" {
  command = plan
  variables { gpu = { instance_types = ["g6.48xlarge"], zone_ids = ["use1-az5"], ami_alias = "al2023@v20251029" } }
  expect_failures = [var.gpu]
}

run "refuses_images_without_tag" {
  command = plan
  variables { store = { image = "acme/kvstore", memory_gib = 64, nvme_gib = 0, ttl = "1d", config_yaml = { use1-az4 = "" } } }
  expect_failures = [var.store]
}

run "refuses_one_system_node" {
  command = plan
  variables { system = { count = 1 } }
  expect_failures = [var.system]
}

run "refuses_missing_addons" {
  command = plan
  variables { addons = { vpc-cni = null } }
  expect_failures = [var.addons]
}

run "refuses_engine_without_model" {
  command = plan
  variables { engine = { image = "acme/vllm:1" } }
  expect_failures = [var.engine]
}
