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
  name        = "kv"
  bucket_arns = ["arn:aws:s3:::acme-kv"]
  trust       = "ec2"
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

run "refuses_no_bucket" {
  command = plan
  variables {
    bucket_arns = []
  }
  expect_failures = [var.bucket_arns]
}

run "refuses_bucket_name" {
  command = plan
  variables {
    bucket_arns = ["acme-kv"]
  }
  expect_failures = [var.bucket_arns]
}

run "refuses_all_buckets" {
  command = plan
  variables {
    bucket_arns = ["arn:aws:s3:::*"]
  }
  expect_failures = [var.bucket_arns]
}

run "refuses_all_express_buckets" {
  command = plan
  variables {
    express_bucket_arns = ["arn:aws:s3express:us-east-1:123456789012:bucket/*"]
  }
  expect_failures = [var.express_bucket_arns]
}

run "refuses_prefix_with_wildcard" {
  command = plan
  variables {
    prefix = "*/"
  }
  expect_failures = [var.prefix]
}

run "refuses_open_prefix" {
  command = plan
  variables {
    prefix = "kv"
  }
  expect_failures = [var.prefix]
}

run "refuses_key_alias" {
  command = plan
  variables {
    kms_key_arns = ["arn:aws:kms:us-east-1:123456789012:alias/kv"]
  }
  expect_failures = [var.kms_key_arns]
}

run "refuses_all_secrets" {
  command = plan
  variables {
    secret_arns = ["arn:aws:secretsmanager:us-east-1:123456789012:secret:*"]
  }
  expect_failures = [var.secret_arns]
}

run "refuses_unknown_trust" {
  command = plan
  variables {
    trust = "lambda"
  }
  expect_failures = [var.trust]
}

run "refuses_cluster_name" {
  command = plan
  variables {
    trust       = "pods"
    cluster_arn = "kv"
  }
  expect_failures = [var.cluster_arn]
}

run "refuses_whole_bucket_download" {
  command = plan
  variables {
    download_arns = ["arn:aws:s3:::acme-artifacts"]
  }
  expect_failures = [var.download_arns]
}

run "refuses_repository_name" {
  command = plan
  variables {
    ecr_repository_arns = ["kvstore"]
  }
  expect_failures = [var.ecr_repository_arns]
}

run "refuses_namespace_of_aws" {
  command = plan
  variables {
    metric_namespaces = ["AWS/EC2"]
  }
  expect_failures = [var.metric_namespaces]
}

run "refuses_log_group_name" {
  command = plan
  variables {
    log_group_arns = ["/kv"]
  }
  expect_failures = [var.log_group_arns]
}

run "refuses_boundary_name" {
  command = plan
  variables {
    permissions_boundary = "limits"
  }
  expect_failures = [var.permissions_boundary]
}

run "refuses_trust_in_everybody" {
  command = plan
  variables {
    trusted_arns = ["*"]
  }
  expect_failures = [var.trusted_arns]
}

run "refuses_all_models" {
  command = plan
  variables {
    model_urls = ["s3://acme-models/*"]
  }
  expect_failures = [var.model_urls]
}
