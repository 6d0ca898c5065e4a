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
  name     = "kv"
  zone_ids = ["use1-az4", "use1-az5"]
}

run "refuses_long_name" {
  command = plan
  variables {
    name = "kv-xxxxxxxxxxxxxxxxxxxx"
  }
  expect_failures = [var.name]
}

run "refuses_upper_case_name" {
  command = plan
  variables {
    name = "KV"
  }
  expect_failures = [var.name]
}

run "refuses_double_hyphen" {
  command = plan
  variables {
    name = "k--v"
  }
  expect_failures = [var.name]
}

run "refuses_host_address" {
  command = plan
  variables {
    cidr = "10.60.1.0/16"
  }
  expect_failures = [var.cidr]
}

run "refuses_tiny_vpc" {
  command = plan
  variables {
    cidr = "10.60.0.0/24"
  }
  expect_failures = [var.cidr]
}

run "refuses_zone_names" {
  command = plan
  variables {
    zone_ids = ["us-east-1a"]
  }
  expect_failures = [var.zone_ids]
}

run "refuses_no_zone" {
  command = plan
  variables {
    zone_ids = []
  }
  expect_failures = [var.zone_ids]
}

run "refuses_a_zone_twice" {
  command = plan
  variables {
    zone_ids = ["use1-az4", "use1-az4"]
  }
  expect_failures = [var.zone_ids]
}

run "refuses_zone_of_another_region" {
  command = plan
  variables {
    zone_ids = ["apne1-az4"]
  }
  expect_failures = [aws_vpc.this]
}

run "refuses_overlapping_subnets" {
  command = plan
  variables {
    subnet_cidrs = { "use1-az4" = { private = "10.60.0.0/18", public = "10.60.255.0/24" }, "use1-az5" = { private = "10.60.16.0/20", public = "10.60.254.0/24" } }
  }
  expect_failures = [var.subnet_cidrs]
}

run "refuses_equal_subnets" {
  command = plan
  variables {
    subnet_cidrs = { "use1-az4" = { private = "10.60.0.0/20", public = "10.60.255.0/24" }, "use1-az5" = { private = "10.60.0.0/20", public = "10.60.254.0/24" } }
  }
  expect_failures = [var.subnet_cidrs]
}

run "refuses_subnet_outside" {
  command = plan
  variables {
    subnet_cidrs = { "use1-az4" = { private = "10.61.0.0/20", public = "10.60.255.0/24" }, "use1-az5" = { private = "10.60.16.0/20", public = "10.60.254.0/24" } }
  }
  expect_failures = [var.subnet_cidrs]
}

run "refuses_subnets_of_other_zones" {
  command = plan
  variables {
    subnet_cidrs = { "use1-az6" = { private = "10.60.0.0/20", public = "10.60.255.0/24" } }
  }
  expect_failures = [var.subnet_cidrs]
}

run "refuses_malformed_subnet" {
  command = plan
  variables {
    subnet_cidrs = { "use1-az4" = { private = "10.60.0.0", public = "10.60.255.0/24" }, "use1-az5" = { private = "10.60.16.0/20", public = "10.60.254.0/24" } }
  }
  expect_failures = [var.subnet_cidrs]
}

run "refuses_overlapping_peer" {
  command = plan
  variables {
    peer_cidrs = ["10.0.0.0/16", "10.60.128.0/20"]
  }
  expect_failures = [var.peer_cidrs]
}

run "refuses_enclosing_peer" {
  command = plan
  variables {
    peer_cidrs = ["10.0.0.0/8"]
  }
  expect_failures = [var.peer_cidrs]
}

run "refuses_malformed_peer" {
  command = plan
  variables {
    peer_cidrs = ["10.0.0.0"]
  }
  expect_failures = [var.peer_cidrs]
}

run "refuses_unknown_nat" {
  command = plan
  variables {
    nat = "two"
  }
  expect_failures = [var.nat]
}

run "refuses_gateway_as_interface" {
  command = plan
  variables {
    interface_endpoints = ["s3express"]
  }
  expect_failures = [var.interface_endpoints]
}

run "refuses_the_whole_internet" {
  command = plan
  variables {
    allowed_cidrs = ["0.0.0.0/0"]
  }
  expect_failures = [var.allowed_cidrs]
}

run "refuses_an_address" {
  command = plan
  variables {
    allowed_cidrs = ["10.1.2.3"]
  }
  expect_failures = [var.allowed_cidrs]
}

run "refuses_port_0" {
  command = plan
  variables {
    allowed_ports = [0]
  }
  expect_failures = [var.allowed_ports]
}

run "refuses_odd_retention" {
  command = plan
  variables {
    flow_log_days = 10
  }
  expect_failures = [var.flow_log_days]
}
