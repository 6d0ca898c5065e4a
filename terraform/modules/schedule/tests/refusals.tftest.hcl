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
  name                    = "kv"
  autoscaling_group_names = ["kv-gpu"]
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

run "refuses_wildcard" {
  command = plan
  variables {
    autoscaling_group_names = ["*"]
  }
  expect_failures = [var.autoscaling_group_names]
}

run "refuses_min_above_desired" {
  command = plan
  variables {
    working_size = { min = 2, desired = 1 }
  }
  expect_failures = [var.working_size]
}

run "refuses_malformed_start" {
  command = plan
  variables {
    start = "7"
  }
  expect_failures = [var.start]
}

run "refuses_hour_24" {
  command = plan
  variables {
    stop = "24:00"
  }
  expect_failures = [var.stop]
}

run "refuses_equal_times" {
  command = plan
  variables {
    start = "07:00"
    stop  = "07:00"
  }
  expect_failures = [var.stop]
}

run "refuses_unknown_day" {
  command = plan
  variables {
    workdays = "MO-FR"
  }
  expect_failures = [var.workdays]
}

run "refuses_malformed_timezone" {
  command = plan
  variables {
    timezone = "JST+9 now"
  }
  expect_failures = [var.timezone]
}

run "refuses_zero_percent" {
  command = plan
  variables {
    idle = { percent = 0 }
  }
  expect_failures = [var.idle]
}

run "refuses_odd_minutes" {
  command = plan
  variables {
    idle = { minutes = 7 }
  }
  expect_failures = [var.idle]
}

run "refuses_boundary_name" {
  command = plan
  variables {
    permissions_boundary = "limits"
  }
  expect_failures = [var.permissions_boundary]
}

run "refuses_snapshots_without_tags" {
  command = plan
  variables {
    snapshots = { tags = {} }
  }
  expect_failures = [var.snapshots]
}
