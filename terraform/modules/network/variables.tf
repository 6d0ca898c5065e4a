variable "name" {
  description = "Prefix of all names in this module."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", var.name)) && !strcontains(var.name, "--")
    error_message = "name: write 1 to 20 lower case letters, digits and single hyphens, beginning with a letter and not ending in a hyphen, such as kv-prod."
  }
}

variable "tags" {
  description = "Tags of every resource, besides the provider's default_tags."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "cidr" {
  description = "IPv4 range of the VPC. Every zone gets a sixteenth of it as private and a 256th as public subnet, unless subnet_cidrs says otherwise."
  type        = string
  default     = "10.60.0.0/16"
  nullable    = false
  validation {
    condition     = can(cidrhost(var.cidr, 0)) && can(regex("^[0-9.]+/(1[6-9]|20)$", var.cidr)) && try(cidrhost(var.cidr, 0) == split("/", var.cidr)[0], false)
    error_message = "cidr: write an IPv4 network from /16 to /20 by its first address, such as 10.60.0.0/16."
  }
}

variable "zone_ids" {
  description = "Availability zone ids (not names: us-east-1a is another zone in every account) that get subnets."
  type        = list(string)
  nullable    = false
  validation {
    condition     = length(var.zone_ids) >= 1 && length(var.zone_ids) <= 6 && length(distinct(var.zone_ids)) == length(var.zone_ids)
    error_message = "zone_ids: write one to six different zone ids, such as [\"use1-az4\", \"use1-az6\"]."
  }
  validation {
    condition     = alltrue([for z in var.zone_ids : can(regex("^[a-z]{3,5}[0-9]-([a-z]{3}[0-9]-)?az[0-9]$", z))])
    error_message = "zone_ids: write zone ids such as use1-az4, not names such as us-east-1a; aws ec2 describe-availability-zones --query 'AvailabilityZones[].[ZoneName,ZoneId]' lists both."
  }
}

variable "subnet_cidrs" {
  description = "Ranges of the subnets by zone id, where the even cut of cidr does not suit. All zones or none."
  type        = map(object({ private = string, public = string }))
  default     = {}
  nullable    = false
  validation {
    condition     = length(var.subnet_cidrs) == 0 || length(setsubtract(var.zone_ids, keys(var.subnet_cidrs))) + length(setsubtract(keys(var.subnet_cidrs), var.zone_ids)) == 0
    error_message = "subnet_cidrs: name exactly the zones of zone_ids, or leave it empty."
  }
  validation {
    condition     = alltrue(flatten([for s in values(var.subnet_cidrs) : [for c in [s.private, s.public] : can(cidrhost(c, 0)) && can(regex("^[0-9.]+/(1[6-9]|2[0-8])$", c))]]))
    error_message = "subnet_cidrs: write IPv4 networks from /16 to /28, such as 10.60.16.0/20."
  }
  # Two networks overlap if the first addresses are equal once both are cut to the shorter of the two prefixes.
  validation {
    condition = try(length([
      for pair in setproduct(flatten([for s in values(var.subnet_cidrs) : [s.private, s.public]]), flatten([for s in values(var.subnet_cidrs) : [s.private, s.public]])) : pair
      if pair[0] != pair[1] && cidrhost("${split("/", pair[0])[0]}/${min(split("/", pair[0])[1], split("/", pair[1])[1])}", 0) == cidrhost("${split("/", pair[1])[0]}/${min(split("/", pair[0])[1], split("/", pair[1])[1])}", 0)
    ]) == 0 && length(distinct(flatten([for s in values(var.subnet_cidrs) : [s.private, s.public]]))) == 2 * length(var.subnet_cidrs), true)
    error_message = "subnet_cidrs: these ranges overlap; write ranges that share no address, such as 10.60.0.0/20 and 10.60.16.0/20."
  }
  validation {
    condition = try(alltrue(flatten([
      for s in values(var.subnet_cidrs) : [for c in [s.private, s.public] : tonumber(split("/", c)[1]) >= tonumber(split("/", var.cidr)[1]) && cidrhost("${split("/", c)[0]}/${split("/", var.cidr)[1]}", 0) == cidrhost(var.cidr, 0)]
    ])), true)
    error_message = "subnet_cidrs: every range must lie inside cidr (${var.cidr})."
  }
}

variable "peer_cidrs" {
  description = "Ranges of networks that this VPC is or will be connected to (peering, VPN, transit gateway). None may overlap cidr."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for c in var.peer_cidrs : can(cidrhost(c, 0)) && can(regex("^[0-9.]+/[0-9]+$", c))])
    error_message = "peer_cidrs: write IPv4 networks such as 10.0.0.0/16."
  }
  validation {
    condition = try(alltrue([
      for c in var.peer_cidrs : cidrhost("${split("/", c)[0]}/${min(split("/", c)[1], split("/", var.cidr)[1])}", 0) != cidrhost("${split("/", var.cidr)[0]}/${min(split("/", c)[1], split("/", var.cidr)[1])}", 0)
    ]), true)
    error_message = "peer_cidrs: a network here overlaps cidr (${var.cidr}), so no route between the two can work; write another cidr, such as 10.61.0.0/16 or 172.20.0.0/16."
  }
}

variable "s3express" {
  description = "Whether to add the gateway endpoint of S3 Express One Zone beside that of S3. Both are free."
  type        = bool
  default     = false
  nullable    = false
}

variable "nat" {
  description = "NAT gateways: none (the endpoints do), single (one for all zones) or per_zone. NAT is charged by the hour and by the GB; KV caches never pass through it."
  type        = string
  default     = "none"
  nullable    = false
  validation {
    condition     = contains(["none", "single", "per_zone"], var.nat)
    error_message = "nat: write none, single or per_zone."
  }
}

variable "public_subnets" {
  description = "Whether to make public subnets where there is no NAT gateway, say for a load balancer."
  type        = bool
  default     = false
  nullable    = false
}

variable "interface_endpoints" {
  description = "AWS services that nodes reach without NAT, by the last part of the endpoint's name, such as secretsmanager, ssm, ssmmessages, logs, monitoring, sts, ecr.api, ecr.dkr. Each is charged by the hour and zone."
  type        = set(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for s in var.interface_endpoints : can(regex("^[a-z0-9.-]+$", s)) && !contains(["s3", "s3express"], s)])
    error_message = "interface_endpoints: write names such as secretsmanager or ecr.api; s3 and s3express are gateway endpoints and there already."
  }
}

variable "allowed_cidrs" {
  description = "IPv4 ranges from which allowed_ports of the nodes may be reached. Empty: from nowhere but the nodes themselves."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for c in var.allowed_cidrs : can(cidrhost(c, 0)) && can(regex("^[0-9.]+/[0-9]+$", c))])
    error_message = "allowed_cidrs: write IPv4 networks such as 10.0.0.0/8 or 203.0.113.7/32."
  }
  validation {
    condition     = length([for c in var.allowed_cidrs : c if endswith(c, "/0")]) == 0
    error_message = "allowed_cidrs: /0 lets the whole internet in; write the networks of your clients, such as 10.0.0.0/8."
  }
}

variable "allowed_ports" {
  description = "TCP ports of the nodes that allowed_cidrs may reach. 8000 is vLLM's."
  type        = set(number)
  default     = [8000]
  nullable    = false
  validation {
    condition     = alltrue([for p in var.allowed_ports : p >= 1 && p <= 65535 && floor(p) == p])
    error_message = "allowed_ports: write whole numbers from 1 to 65535."
  }
}

variable "flow_log_days" {
  description = "Days that VPC flow logs are kept in CloudWatch; 0: no flow logs."
  type        = number
  default     = 365
  nullable    = false
  validation {
    condition     = contains([0, 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.flow_log_days)
    error_message = "flow_log_days: write 0 or a number of days that CloudWatch Logs knows, such as 7, 30, 90 or 365."
  }
}
