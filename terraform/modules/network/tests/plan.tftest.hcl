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
  name      = "kv"
  zone_ids  = ["use1-az4", "use1-az5"]
  s3express = true
}

run "endpoints_instead_of_nat" {
  command = plan
  assert {
    condition     = length(aws_nat_gateway.this) == 0 && length(aws_subnet.public) == 0 && length(aws_internet_gateway.this) == 0
    error_message = "there is a way to the internet that nobody asked for"
  }
  assert {
    condition     = aws_vpc_endpoint.s3.service_name == "com.amazonaws.us-east-1.s3" && aws_vpc_endpoint.s3express[0].service_name == "com.amazonaws.us-east-1.s3express"
    error_message = "wrong services behind the gateway endpoints"
  }
  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && aws_vpc_endpoint.s3express[0].vpc_endpoint_type == "Gateway"
    error_message = "an interface endpoint is charged by the GB; S3's must be gateways"
  }
  assert {
    condition     = keys(aws_vpc_security_group_egress_rule.node_gateways) == ["s3", "s3express"] && length(aws_vpc_security_group_egress_rule.node_internet) == 0
    error_message = "nodes may reach something else than S3"
  }
}

run "subnets_by_zone_id_without_overlap" {
  command = plan
  variables { public_subnets = true }
  assert {
    condition     = alltrue([for z, s in aws_subnet.private : s.availability_zone_id == z])
    error_message = "a subnet is not in the zone of its key"
  }
  assert {
    condition     = aws_subnet.private["use1-az4"].cidr_block == "10.60.0.0/20" && aws_subnet.private["use1-az5"].cidr_block == "10.60.16.0/20" && aws_subnet.public["use1-az4"].cidr_block == "10.60.240.0/24" && aws_subnet.public["use1-az5"].cidr_block == "10.60.241.0/24"
    error_message = "the even cut of the VPC changed: that would replace every subnet of those who applied before"
  }
}

run "nat_per_zone" {
  command = plan
  variables { nat = "per_zone" }
  assert {
    condition     = keys(aws_nat_gateway.this) == ["use1-az4", "use1-az5"] && keys(aws_route.nat) == ["use1-az4", "use1-az5"]
    error_message = "not one NAT gateway and one route for each zone"
  }
}

run "single_nat" {
  command = plan
  variables { nat = "single" }
  assert {
    condition     = keys(aws_nat_gateway.this) == ["use1-az4"] && length(aws_route.nat) == 2
    error_message = "not one NAT gateway with a route from each zone"
  }
}

run "own_subnet_ranges" {
  command = plan
  variables {
    subnet_cidrs = {
      use1-az4 = { private = "10.60.0.0/18", public = "10.60.252.0/24" }
      use1-az5 = { private = "10.60.64.0/18", public = "10.60.253.0/24" }
    }
  }
  assert {
    condition     = aws_subnet.private["use1-az5"].cidr_block == "10.60.64.0/18"
    error_message = "subnet_cidrs is not what the subnets have"
  }
}

run "efa_and_clients" {
  command = plan
  variables {
    allowed_cidrs = ["10.0.0.0/16", "10.1.0.0/16"]
    allowed_ports = [8000, 9090]
    peer_cidrs    = ["10.0.0.0/16", "10.1.0.0/16"]
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.node_self.ip_protocol == "-1" && aws_vpc_security_group_egress_rule.node_self.ip_protocol == "-1"
    error_message = "EFA wants all traffic of the group to itself, both ways"
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.node_clients) == 4 && alltrue([for r in aws_vpc_security_group_ingress_rule.node_clients : r.from_port == r.to_port && r.ip_protocol == "tcp"])
    error_message = "not one rule for each network and port"
  }
}

run "interface_endpoints" {
  command = plan
  variables {
    nat                 = "single"
    interface_endpoints = ["secretsmanager", "ecr.api"]
  }
  assert {
    condition     = aws_vpc_endpoint.interface["ecr.api"].service_name == "com.amazonaws.us-east-1.ecr.api" && alltrue([for e in aws_vpc_endpoint.interface : e.vpc_endpoint_type == "Interface" && e.private_dns_enabled])
    error_message = "nodes would not find the services by their usual names"
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.endpoints[0].cidr_ipv4 == "10.60.0.0/16"
    error_message = "the endpoints are open to others than the VPC"
  }
  assert {
    condition     = alltrue([for r in concat(values(aws_vpc_security_group_egress_rule.node_gateways), aws_vpc_security_group_egress_rule.node_endpoints, aws_vpc_security_group_egress_rule.node_internet, aws_vpc_security_group_ingress_rule.endpoints) : r.from_port == 443 && r.to_port == 443 && r.ip_protocol == "tcp"])
    error_message = "something else than HTTPS may leave the nodes"
  }
}

run "flow_logs_by_default" {
  command = plan
  assert {
    condition     = aws_flow_log.this[0].traffic_type == "ALL" && aws_cloudwatch_log_group.flow[0].retention_in_days == 365
    error_message = "no flow logs for a year"
  }
}

run "no_flow_logs" {
  command = plan
  variables { flow_log_days = 0 }
  assert {
    condition     = length(aws_flow_log.this) == 0 && length(aws_cloudwatch_log_group.flow) == 0
    error_message = "flow_log_days = 0 still makes flow logs"
  }
}
