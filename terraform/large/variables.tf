variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "kv-large"
  nullable    = false
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", var.name))
    error_message = "name: write 1 to 20 lower case letters, digits and hyphens, beginning with a letter and not ending in a hyphen, such as kv-prod."
  }
}

variable "project" {
  description = "Tag Project of everything; the budget counts what carries it."
  type        = string
  default     = "kvstore"
  nullable    = false
  validation {
    condition     = can(regex("^[A-Za-z0-9 _.:/=+@-]{1,256}$", var.project))
    error_message = "project: write 1 to 256 letters, digits, spaces and _ . : / = + - @."
  }
}

variable "environment" {
  description = "Tag Environment of everything, such as dev or prod."
  type        = string
  default     = "dev"
  nullable    = false
  validation {
    condition     = can(regex("^[A-Za-z0-9 _.:/=+@-]{1,256}$", var.environment))
    error_message = "environment: write 1 to 256 letters, digits, spaces and _ . : / = + - @."
  }
}

variable "owner" {
  description = "Tag Owner of everything: who is asked."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^[A-Za-z0-9 _.:/=+@-]{1,256}$", var.owner))
    error_message = "owner: write a person or team, such as ml-platform@example.com."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
  nullable    = false
  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region: write a region such as us-east-1."
  }
}

variable "zone_ids" {
  description = "Availability zone ids of the VPC, two or more: the control plane stands in all of them."
  type        = list(string)
  default     = ["use1-az4", "use1-az5", "use1-az6"]
  nullable    = false
  validation {
    condition     = length(var.zone_ids) >= 2
    error_message = "zone_ids: write two zones or more, such as [\"use1-az4\", \"use1-az6\"]."
  }
}

variable "gpu_zone_ids" {
  description = "Zones of zone_ids in which GPU nodes run. Each gets an S3 Express bucket of its own and a pool of nodes of its own."
  type        = list(string)
  default     = ["use1-az4", "use1-az6"]
  nullable    = false
  validation {
    condition     = length(var.gpu_zone_ids) >= 1 && length(setsubtract(var.gpu_zone_ids, var.zone_ids)) == 0
    error_message = "gpu_zone_ids: write zones of zone_ids (${join(", ", var.zone_ids)})."
  }
}

variable "cidr" {
  description = "IPv4 range of the VPC."
  type        = string
  default     = "10.60.0.0/16"
  nullable    = false
}

variable "peer_cidrs" {
  description = "Ranges of networks that the VPC is or will be connected to; none may overlap cidr."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "nat" {
  description = "NAT gateways for images and weights: single or per_zone. KV caches do not pass through them."
  type        = string
  default     = "single"
  nullable    = false
  validation {
    condition     = contains(["single", "per_zone"], var.nat)
    error_message = "nat: write single or per_zone; the cluster takes charts and images from outside."
  }
}

variable "gpu" {
  description = "GPU nodes (modules/cluster): types by preference, spot with on-demand fallback, EFA, the most GPUs in each zone, how long an empty node stays, and the pinned image of EKS."
  type = object({
    instance_types    = optional(list(string), ["g6.48xlarge", "g5.48xlarge"])
    spot              = optional(bool, true)
    efa               = optional(bool, true)
    max_gpus          = optional(number, 16)
    consolidate_after = optional(string, "30m")
    expire_after      = optional(string, "Never")
    root_volume_gib   = optional(number, 200)
    ami_alias         = string
  })
  nullable = false
}

variable "efa_more" {
  description = "Types with EFA beyond those that modules/efa knows: type to network cards and regions."
  type        = map(object({ cards = number, regions = list(string) }))
  default     = {}
  nullable    = false
}

variable "image" {
  description = "Image with kvstore for the nodes, with tag or digest."
  type        = string
  nullable    = false
}

variable "engine" {
  description = "vLLM in the cluster (modules/cluster): image with vLLM and kvstore (null: you bring your own), model, GPUs of a pod, pods in each zone, arguments."
  type = object({
    image    = optional(string)
    model    = optional(string, "")
    gpus     = optional(number, 1)
    replicas = optional(number, 1)
    args     = optional(list(string), [])
  })
  default  = {}
  nullable = false
}

variable "node" {
  description = "Each node's share for records: GiB of host memory and of NVMe, days after the last use, EFA devices."
  type = object({
    memory_gib  = optional(number, 256)
    nvme_gib    = optional(number, 5000)
    ttl_days    = optional(number, 1)
    efa_devices = optional(number, 1)
  })
  default  = {}
  nullable = false
}

variable "node_token_version" {
  description = "Raise by one to make a new token of the nodes; nodes and engines take it when they start again."
  type        = number
  default     = 1
  nullable    = false
}

variable "kubernetes_version" {
  description = "Kubernetes version."
  type        = string
  default     = "1.34"
  nullable    = false
}

variable "service_cidr" {
  description = "Range of Kubernetes services; must not overlap cidr."
  type        = string
  default     = "172.20.0.0/16"
  nullable    = false
}

variable "admin_arns" {
  description = "IAM roles and users that administer the cluster, besides the one that makes it."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "public_access_cidrs" {
  description = "Ranges from which the cluster's API may be reached over the internet. Empty: from the VPC only."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "deletion_protection" {
  description = "Whether EKS refuses to delete the cluster."
  type        = bool
  default     = true
  nullable    = false
}

variable "s3express_zones" {
  description = "Where S3 Express exists, region to zone ids, if AWS has added zones since; null: what was known when this was written."
  type        = map(list(string))
  default     = null
}

variable "express_ttl" {
  description = "Time after which a record that is not used expires from S3 Express, whose storage costs five times S3's: days (1d) or hours (6h). Lifecycle rules know whole days; what is older than a few hours is a miss at once, and gone with the next sweep (README)."
  type        = string
  default     = "1d"
  nullable    = false
  validation {
    condition     = can(regex("^[1-9][0-9]*[hd]$", var.express_ttl))
    error_message = "express_ttl: write hours or days, such as 6h or 1d."
  }
}

variable "keep_in_s3" {
  description = "Whether records go to S3, too, below S3 Express: shared between zones, and kept for ttl_days."
  type        = bool
  default     = true
  nullable    = false
}

variable "ttl_days" {
  description = "Days after which a record that is not used expires from S3."
  type        = number
  default     = 7
  nullable    = false
  validation {
    condition     = var.ttl_days >= 1 && floor(var.ttl_days) == var.ttl_days
    error_message = "ttl_days: write whole days, 1 or more."
  }
}

variable "bucket_base" {
  description = "Name of the bucket; null: NAME-ACCOUNT."
  type        = string
  default     = null
}

variable "force_destroy" {
  description = "Whether destroy may delete the bucket while records are in it."
  type        = bool
  default     = false
  nullable    = false
}

variable "intelligent_tiering" {
  description = "Whether records go to S3 Intelligent-Tiering; pays from a month of life on."
  type        = bool
  default     = false
  nullable    = false
}

variable "trusted_arns" {
  description = "Roles and users of this account that may take the roles reader, writer and evictor (output role_arns): people who look with kvstore doctor, and whatever runs the sweep."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "emails" {
  description = "Addresses for alarms and the budget."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "thresholds" {
  description = "Thresholds of the alarms that are to differ from the defaults (modules/observability)."
  type        = map(number)
  default     = {}
  nullable    = false
}

variable "budget" {
  description = "Budget in $ a month."
  type        = number
  default     = 15000
  nullable    = false
}

variable "audit" {
  description = "CloudTrail and AWS Config, where the account has none."
  type        = object({ cloudtrail = optional(bool, false), config = optional(bool, false) })
  default     = {}
  nullable    = false
}
