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
  bucket_base = "acme-kv"
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

run "refuses_upper_case" {
  command = plan
  variables {
    bucket_base = "Acme"
  }
  expect_failures = [var.bucket_base]
}

run "refuses_double_hyphen" {
  command = plan
  variables {
    bucket_base = "acme--kv"
  }
  expect_failures = [var.bucket_base]
}

run "refuses_reserved_prefix" {
  command = plan
  variables {
    bucket_base = "xn-acme"
  }
  expect_failures = [var.bucket_base]
}

run "refuses_long_express_base" {
  command = plan
  variables {
    bucket_base      = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    express_zone_ids = ["use1-az4"]
  }
  expect_failures = [var.bucket_base]
}

run "refuses_long_base" {
  command = plan
  variables {
    bucket_base = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
  }
  expect_failures = [var.bucket_base]
}

run "refuses_short_base" {
  command = plan
  variables {
    bucket_base = "ab"
  }
  expect_failures = [var.bucket_base]
}

run "refuses_zone_without_express" {
  command = plan
  variables {
    express_zone_ids = ["use1-az1"]
  }
  expect_failures = [var.express_zone_ids]
}

run "refuses_zone_name" {
  command = plan
  variables {
    express_zone_ids = ["us-east-1a"]
  }
  expect_failures = [var.express_zone_ids]
}

run "refuses_a_zone_twice" {
  command = plan
  variables {
    express_zone_ids = ["use1-az4", "use1-az4"]
  }
  expect_failures = [var.express_zone_ids]
}

run "refuses_express_zone_of_another_region" {
  command = plan
  variables {
    express_zone_ids = ["usw2-az1"]
  }
  expect_failures = [aws_s3_directory_bucket.this]
}

run "refuses_zone_names_in_the_table" {
  command = plan
  variables {
    s3express_zones = { "us-east-1" = ["us-east-1a"] }
  }
  expect_failures = [var.s3express_zones]
}

run "refuses_half_days" {
  command = plan
  variables {
    expiration_days = { "kv/" = 0.5 }
  }
  expect_failures = [var.expiration_days]
}

run "refuses_zero_days" {
  command = plan
  variables {
    expiration_days = { "kv/" = 0 }
  }
  expect_failures = [var.expiration_days]
}

run "refuses_leading_slash" {
  command = plan
  variables {
    expiration_days = { "/kv/" = 7 }
  }
  expect_failures = [var.expiration_days]
}

run "refuses_open_prefix" {
  command = plan
  variables {
    expiration_days = { kv = 7 }
  }
  expect_failures = [var.expiration_days]
}

run "refuses_no_quarantine_days" {
  command = plan
  variables {
    quarantine_days = 0
  }
  expect_failures = [var.quarantine_days]
}

run "refuses_short_kms_deletion" {
  command = plan
  variables {
    kms_deletion_days = 1
  }
  expect_failures = [var.kms_deletion_days]
}

run "refuses_half_days_of_express" {
  command = plan
  variables {
    express_expiration_days = { "kv/" = 0.5 }
  }
  expect_failures = [var.express_expiration_days]
}

run "refuses_open_prefix_of_express" {
  command = plan
  variables {
    express_expiration_days = { kv = 1 }
  }
  expect_failures = [var.express_expiration_days]
}
