# Subnets by zone id, so that nodes, directory buckets and file systems really share a zone. Traffic to S3 and S3 Express
# goes through gateway endpoints, which cost nothing; a NAT gateway would charge for every GB of KV cache.

data "aws_region" "current" {}

locals {
  # us-east-1 -> use1, ap-northeast-1 -> apne1. A mocked provider has no real region; then zones are not compared with it.
  region       = data.aws_region.current.region
  region_known = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", local.region))
  region_parts = split("-", local.region)
  region_code = join("", concat(
    [local.region_parts[0]],
    [for part in slice(local.region_parts, min(1, length(local.region_parts) - 1), length(local.region_parts) - 1) : join("", [for word in regexall("north|south|east|west|central|gov", part) : substr(word, 0, 1)])],
    [local.region_parts[length(local.region_parts) - 1]],
  ))

  private_cidrs = { for i, z in var.zone_ids : z => try(var.subnet_cidrs[z].private, cidrsubnet(var.cidr, 4, i)) }
  public_cidrs  = { for i, z in var.zone_ids : z => try(var.subnet_cidrs[z].public, cidrsubnet(var.cidr, 8, 240 + i)) }
  public_zones  = toset(var.nat != "none" || var.public_subnets ? var.zone_ids : [])
  nat_zones     = toset(var.nat == "per_zone" ? var.zone_ids : var.nat == "single" ? [var.zone_ids[0]] : [])
  nat_of        = { for z in var.zone_ids : z => var.nat == "single" ? var.zone_ids[0] : z }
  # Rules want static keys; the endpoints' prefix lists are known only after they were made.
  gateways = merge({ s3 = aws_vpc_endpoint.s3.prefix_list_id }, var.s3express ? { s3express = aws_vpc_endpoint.s3express[0].prefix_list_id } : {})
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(var.tags, { Name = var.name })
  lifecycle {
    precondition {
      condition     = !local.region_known || alltrue([for z in var.zone_ids : startswith(z, "${local.region_code}-")])
      error_message = "zone_ids: not all of ${join(", ", var.zone_ids)} are zones of the provider's region ${local.region}; its zone ids begin with ${local.region_code}-az."
    }
  }
}

# No rules: what is put into it by mistake reaches nothing.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-default-unused" })
}

# ---- subnets and routes

resource "aws_subnet" "private" {
  for_each             = local.private_cidrs
  vpc_id               = aws_vpc.this.id
  cidr_block           = each.value
  availability_zone_id = each.key
  tags                 = merge(var.tags, { Name = "${var.name}-private-${each.key}", "kubernetes.io/role/internal-elb" = "1" })
}

resource "aws_route_table" "private" {
  for_each = local.private_cidrs
  vpc_id   = aws_vpc.this.id
  tags     = merge(var.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_route_table_association" "private" {
  for_each       = local.private_cidrs
  subnet_id      = aws_subnet.private[each.key].id
  route_table_id = aws_route_table.private[each.key].id
}

resource "aws_subnet" "public" {
  for_each                = local.public_zones
  vpc_id                  = aws_vpc.this.id
  cidr_block              = local.public_cidrs[each.key]
  availability_zone_id    = each.key
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-public-${each.key}", "kubernetes.io/role/elb" = "1" })
}

resource "aws_internet_gateway" "this" {
  count  = length(local.public_zones) > 0 ? 1 : 0
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_route_table" "public" {
  count  = length(local.public_zones) > 0 ? 1 : 0
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-public" })
}

resource "aws_route" "public" {
  count                  = length(local.public_zones) > 0 ? 1 : 0
  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  for_each       = local.public_zones
  subnet_id      = aws_subnet.public[each.key].id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_eip" "nat" {
  for_each = local.nat_zones
  domain   = "vpc"
  tags     = merge(var.tags, { Name = "${var.name}-nat-${each.key}" })
}

resource "aws_nat_gateway" "this" {
  for_each      = local.nat_zones
  allocation_id = aws_eip.nat[each.key].id
  subnet_id     = aws_subnet.public[each.key].id
  tags          = merge(var.tags, { Name = "${var.name}-${each.key}" })
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route" "nat" {
  for_each               = var.nat == "none" ? {} : local.nat_of
  route_table_id         = aws_route_table.private[each.key].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[each.value].id
}

# ---- endpoints

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [for t in aws_route_table.private : t.id]
  tags              = merge(var.tags, { Name = "${var.name}-s3" })
}

resource "aws_vpc_endpoint" "s3express" {
  count             = var.s3express ? 1 : 0
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${local.region}.s3express"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [for t in aws_route_table.private : t.id]
  tags              = merge(var.tags, { Name = "${var.name}-s3express" })
}

resource "aws_security_group" "endpoints" {
  count       = length(var.interface_endpoints) > 0 ? 1 : 0
  name        = "${var.name}-endpoints"
  description = "Interface endpoints of AWS services"
  vpc_id      = aws_vpc.this.id
  tags        = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count             = length(var.interface_endpoints) > 0 ? 1 : 0
  security_group_id = aws_security_group.endpoints[0].id
  description       = "HTTPS from the VPC"
  cidr_ipv4         = var.cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = var.tags
}

resource "aws_vpc_endpoint" "interface" {
  for_each            = var.interface_endpoints
  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${local.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [for s in aws_subnet.private : s.id]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  tags                = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

# ---- who may talk to nodes, and to whom they may talk

resource "aws_security_group" "node" {
  name        = "${var.name}-node"
  description = "Nodes of kvstore and of the engine"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-node" })
  lifecycle { create_before_destroy = true }
}

# EFA wants all traffic allowed in both directions between members of the group, and as rules that name the group.
resource "aws_vpc_security_group_ingress_rule" "node_self" {
  security_group_id            = aws_security_group.node.id
  description                  = "Everything among nodes (EFA, kvstore serve, NCCL)"
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "node_self" {
  security_group_id            = aws_security_group.node.id
  description                  = "Everything among nodes (EFA, kvstore serve, NCCL)"
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "node_clients" {
  for_each          = { for pair in setproduct(distinct(var.allowed_cidrs), var.allowed_ports) : "${pair[0]}:${pair[1]}" => { cidr = pair[0], port = pair[1] } }
  security_group_id = aws_security_group.node.id
  description       = "Clients in ${each.value.cidr}"
  cidr_ipv4         = each.value.cidr
  ip_protocol       = "tcp"
  from_port         = each.value.port
  to_port           = each.value.port
  tags              = var.tags
}

resource "aws_vpc_security_group_egress_rule" "node_gateways" {
  for_each          = local.gateways
  security_group_id = aws_security_group.node.id
  description       = "HTTPS to ${each.key} through its gateway endpoint"
  prefix_list_id    = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = var.tags
}

resource "aws_vpc_security_group_egress_rule" "node_endpoints" {
  count                        = length(var.interface_endpoints) > 0 ? 1 : 0
  security_group_id            = aws_security_group.node.id
  description                  = "HTTPS to interface endpoints"
  referenced_security_group_id = aws_security_group.endpoints[0].id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "node_internet" {
  count             = var.nat == "none" ? 0 : 1
  security_group_id = aws_security_group.node.id
  description       = "HTTPS through the NAT gateway: packages, images, AWS services without an endpoint"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = var.tags
}

# ---- flow logs: addresses, ports and byte counts, never payload

data "aws_iam_policy_document" "flow_logs_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["vpc-flow-logs.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "flow_logs" {
  count = var.flow_log_days > 0 ? 1 : 0
  statement {
    sid       = "WriteFlowLogs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = [aws_cloudwatch_log_group.flow[0].arn, "${aws_cloudwatch_log_group.flow[0].arn}:*"]
  }
}

resource "aws_cloudwatch_log_group" "flow" {
  count             = var.flow_log_days > 0 ? 1 : 0
  name              = "/${var.name}/vpc-flow-logs"
  retention_in_days = var.flow_log_days
  tags              = var.tags
}

resource "aws_iam_role" "flow" {
  count              = var.flow_log_days > 0 ? 1 : 0
  name_prefix        = "${var.name}-flow-"
  assume_role_policy = data.aws_iam_policy_document.flow_logs_trust.json
  tags               = var.tags
}

resource "aws_iam_role_policy" "flow" {
  count  = var.flow_log_days > 0 ? 1 : 0
  name   = "flow-logs"
  role   = aws_iam_role.flow[0].id
  policy = data.aws_iam_policy_document.flow_logs[0].json
}

resource "aws_flow_log" "this" {
  count           = var.flow_log_days > 0 ? 1 : 0
  vpc_id          = aws_vpc.this.id
  traffic_type    = "ALL"
  iam_role_arn    = aws_iam_role.flow[0].arn
  log_destination = aws_cloudwatch_log_group.flow[0].arn
  tags            = merge(var.tags, { Name = var.name })
}
