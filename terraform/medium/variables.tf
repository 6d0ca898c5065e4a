variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "kv-medium"
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
  description = "Availability zone ids of the VPC, two or more: Valkey and EFS stand in all of them."
  type        = list(string)
  default     = ["use1-az4", "use1-az5", "use1-az6"]
  nullable    = false
  validation {
    condition     = length(var.zone_ids) >= 2
    error_message = "zone_ids: write two zones or more, such as [\"use1-az4\", \"use1-az6\"]."
  }
}

variable "gpu_zone_ids" {
  description = "Zones of zone_ids in which GPU nodes run. Each gets an S3 Express bucket of its own; one zone is best until it has no capacity left."
  type        = list(string)
  default     = ["use1-az4"]
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

variable "allowed_cidrs" {
  description = "Private ranges from which the engine's port may be reached. Empty: through Session Manager only."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "nat" {
  description = "single: the nodes reach package index and model hub. none: package is a folder of wheels or an image, the model comes from S3, and interface endpoints do the rest (cheaper, and nothing leaves AWS)."
  type        = string
  default     = "single"
  nullable    = false
  validation {
    condition     = contains(["none", "single"], var.nat)
    error_message = "nat: write none or single."
  }
  validation {
    condition     = var.nat != "none" || !endswith(var.package, ".whl")
    error_message = "nat: a single wheel takes its dependencies from the package index; write nat = \"single\", or a folder of wheels as package (s3://bucket/wheels/)."
  }
}

variable "instance_type" {
  description = "EC2 instance type with a GPU."
  type        = string
  default     = "g5.2xlarge"
  nullable    = false
}

variable "alternative_types" {
  description = "Further types to take where the first one is not to be had, best first."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "spot" {
  description = "Whether instances are spot: a third of the price, and gone with two minutes' notice."
  type        = bool
  default     = true
  nullable    = false
}

variable "capacity" {
  description = "Instances: at least, at most, and to begin with."
  type        = object({ min = number, max = number, desired = number })
  default     = { min = 1, max = 4, desired = 1 }
  nullable    = false
}

variable "on_demand_base" {
  description = "With spot: so many instances are on demand all the same, so that there is always one."
  type        = number
  default     = 1
  nullable    = false
}

variable "gpu_target" {
  description = "Nodes are added and taken away so that GPUs are used by so many percent in the mean; null: capacity.desired stays."
  type        = number
  default     = 70
}

variable "efa" {
  description = "Whether nodes get EFA interfaces and a cluster placement group (for tensor parallelism over nodes); needs one zone and a type with EFA."
  type        = bool
  default     = false
  nullable    = false
}

variable "efa_more" {
  description = "Types with EFA beyond those that modules/efa knows: type to network cards and regions."
  type        = map(object({ cards = number, regions = list(string) }))
  default     = {}
  nullable    = false
}

variable "package" {
  description = "kvstore: a wheel s3://bucket/name.whl, a folder of wheels s3://bucket/wheels/, or a container image with a tag."
  type        = string
  nullable    = false
}

variable "engine" {
  description = "Engine: name vllm or none; package as pip takes it (or, with an image, the image); port."
  type = object({
    name    = optional(string, "vllm")
    package = optional(string, "vllm")
    port    = optional(number, 8000)
  })
  default  = {}
  nullable = false
}

variable "model" {
  description = "What the engine serves, and further arguments of it."
  type = object({
    id   = string
    args = optional(list(string), [])
  })
  default  = { id = "Qwen/Qwen2.5-7B-Instruct", args = ["--max-model-len", "16384"] }
  nullable = false
}

variable "host_memory" {
  description = "Host memory that the node keeps records in. Leave 12 GiB of the instance's for engine and system."
  type        = string
  default     = "16GiB"
  nullable    = false
  validation {
    condition     = can(regex("^[0-9]+(MiB|GiB|TiB)$", var.host_memory))
    error_message = "host_memory: write a size such as 16GiB."
  }
}

variable "nvme_gib" {
  description = "GiB of the local NVMe for records; 0: no disk tier. A g5.2xlarge has 450 GB, which is 419 GiB."
  type        = number
  default     = 380
  nullable    = false
  validation {
    condition     = var.nvme_gib >= 0 && floor(var.nvme_gib) == var.nvme_gib
    error_message = "nvme_gib: write whole GiB, or 0."
  }
}

variable "valkey" {
  description = "Valkey between nodes and S3 Express: mode cluster, serverless or none; see modules/valkey."
  type = object({
    mode             = optional(string, "cluster")
    node_type        = optional(string, "cache.r7g.large")
    shards           = optional(number, 1)
    replicas         = optional(number, 1)
    max_gb           = optional(number, 100)
    password_version = optional(number, 1)
  })
  default  = {}
  nullable = false
  validation {
    condition     = contains(["cluster", "serverless", "none"], var.valkey.mode)
    error_message = "valkey: write mode = \"cluster\", \"serverless\" or \"none\"."
  }
}

variable "shared_fs" {
  description = "Shared file system for weights and compiled code, so that a new node starts in minutes: efs, lustre, openzfs or none. KV caches do not go there (README)."
  type        = string
  default     = "efs"
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
  default     = false
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
  default     = 8000
  nullable    = false
}

variable "nights" {
  description = "Whether all instances are away at night and at the weekend."
  type        = bool
  default     = false
  nullable    = false
}

variable "idle_stop" {
  description = "Whether all instances are given back when no GPU has been used for an hour."
  type        = bool
  default     = false
  nullable    = false
}

variable "snapshots" {
  description = "Daily EBS snapshots of the volumes with these tags (modules/schedule), such as one of yours that holds models; null: none, since caches are computed again."
  type = object({
    tags = map(string)
    at   = optional(string, "03:00")
    keep = optional(number, 7)
  })
  default = null
}

variable "audit" {
  description = "CloudTrail and AWS Config, where the account has none."
  type        = object({ cloudtrail = optional(bool, false), config = optional(bool, false) })
  default     = {}
  nullable    = false
}
