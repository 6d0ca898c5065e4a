variable "name" {
  description = "Prefix of all names in this module."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", var.name))
    error_message = "name: write 1 to 20 lower case letters, digits and hyphens, beginning with a letter and not ending in a hyphen, such as kv-prod."
  }
}

variable "tags" {
  description = "Tags of every resource, besides the provider's default_tags."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "instance_type" {
  description = "EC2 instance type with a GPU."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", var.instance_type))
    error_message = "instance_type: write a type such as g5.xlarge."
  }
}

variable "alternative_types" {
  description = "Further types to take where the first one is not to be had, best first. Not with efa, whose network cards belong to one type."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for t in var.alternative_types : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", t))])
    error_message = "alternative_types: write types such as g6.xlarge."
  }
  validation {
    condition     = !var.efa || length(var.alternative_types) == 0
    error_message = "alternative_types: leave it empty with efa = true; the network cards of the launch template fit instance_type only."
  }
}

variable "spot" {
  description = "Whether instances are spot, apart from on_demand_base."
  type        = bool
  default     = true
  nullable    = false
}

variable "on_demand_base" {
  description = "With spot: so many instances are on demand all the same."
  type        = number
  default     = 0
  nullable    = false
  validation {
    condition     = var.on_demand_base >= 0 && floor(var.on_demand_base) == var.on_demand_base
    error_message = "on_demand_base: write a whole number, 0 or more."
  }
}

variable "capacity" {
  description = "Instances: at least, at most, and to begin with."
  type        = object({ min = number, max = number, desired = number })
  nullable    = false
  validation {
    condition     = var.capacity.min >= 0 && var.capacity.min <= var.capacity.desired && var.capacity.desired <= var.capacity.max && alltrue([for n in [var.capacity.min, var.capacity.max, var.capacity.desired] : floor(n) == n])
    error_message = "capacity: write whole numbers with 0 <= min <= desired <= max, such as { min = 0, max = 4, desired = 1 }."
  }
}

variable "subnet_ids" {
  description = "Zone id to subnet id. With efa one zone: a cluster placement group and RDMA do not cross zones."
  type        = map(string)
  nullable    = false
  validation {
    condition     = length(var.subnet_ids) >= 1 && (!var.efa || length(var.subnet_ids) == 1)
    error_message = "subnet_ids: write at least one; with efa = true exactly one, since EFA traffic does not cross zones."
  }
}

variable "security_group_ids" {
  description = "Security groups; with efa one of them must let everything through to itself (network's node_security_group_id does)."
  type        = list(string)
  nullable    = false
  validation {
    condition     = length(var.security_group_ids) >= 1
    error_message = "security_group_ids: write at least one."
  }
}

variable "instance_profile_name" {
  description = "Instance profile of the nodes (module iam)."
  type        = string
  nullable    = false
}

variable "role_name" {
  description = "Role of the instance profile; it is given what the start of a node needs: the package, and the tags of instances (for the CloudWatch agent)."
  type        = string
  nullable    = false
}

variable "efa" {
  description = "Whether every network card gets an EFA interface, and the nodes a cluster placement group."
  type        = bool
  default     = false
  nullable    = false
}

variable "efa_more" {
  description = "Types with EFA beyond those that module efa knows."
  type        = map(object({ cards = number, regions = list(string) }))
  default     = {}
  nullable    = false
}

variable "region" {
  description = "Region of the nodes."
  type        = string
  nullable    = false
}

variable "ami" {
  description = "Image: ami-…, or resolve:ssm:PARAMETER, which EC2 looks up at each start. Amazon Linux 2023 with NVIDIA driver, CLI and EFA software."
  type        = string
  default     = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
  nullable    = false
  validation {
    condition     = can(regex("^(ami-[0-9a-f]{8,17}|resolve:ssm:/.+)$", var.ami))
    error_message = "ami: write ami-0123456789abcdef0 or resolve:ssm:/path/of/a/parameter."
  }
}

variable "root_volume_gib" {
  description = "Size of the root volume; the engine's packages and the model's weights lie there, unless the model comes from a shared file system."
  type        = number
  default     = 150
  nullable    = false
  validation {
    condition     = var.root_volume_gib >= 75 && var.root_volume_gib <= 16384
    error_message = "root_volume_gib: write 75 (the image's own size) to 16384."
  }
}

variable "ebs_kms_key_arn" {
  description = "KMS key of the root volume; null: the account's default key for EBS. A key of your own must let the Auto Scaling service role use it."
  type        = string
  default     = null
}

variable "kms_key_arn" {
  description = "KMS key of the log groups; null: encryption by CloudWatch Logs alone. The key's policy must let CloudWatch Logs use it."
  type        = string
  default     = null
}

variable "config_secret_arn" {
  description = "Secret with the configuration (module settings)."
  type        = string
  nullable    = false
}

variable "config_version" {
  description = "Digest of the configuration; a change replaces the nodes, one after the other."
  type        = string
  nullable    = false
}

variable "node_token_secret_arn" {
  description = "Secret with the token of the nodes, or null."
  type        = string
  default     = null
}

variable "valkey_secret_arn" {
  description = "Secret with the password of Valkey, or null."
  type        = string
  default     = null
}

variable "package" {
  description = "kvstore: a wheel (s3://bucket/name.whl; its dependencies come from the package index, so the nodes need NAT), a folder of wheels of everything (s3://bucket/wheels/; nothing else is needed), or a container image (account.dkr.ecr.REGION.amazonaws.com/kvstore:TAG)."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/([A-Za-z0-9._+/-]+\\.whl|([A-Za-z0-9._+-]+/)+)$", var.package)) || can(regex("^[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})$", var.package))
    error_message = "package: write s3://bucket/kvstore-0.1.0-py3-none-any.whl, s3://bucket/wheels/ (with the slash), or an image with a tag, such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/kvstore:0.1.0."
  }
}

variable "engine" {
  description = "Engine beside the node: name vllm or none; package is what pip installs (or, with an image, the image); port of its API."
  type = object({
    name    = optional(string, "vllm")
    package = optional(string, "vllm")
    port    = optional(number, 8000)
  })
  default  = {}
  nullable = false
  validation {
    condition     = contains(["vllm", "none"], var.engine.name)
    error_message = "engine: write name = \"vllm\" or \"none\"."
  }
  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._/:@=\\[\\],-]*$", var.engine.package))
    error_message = "engine: write a package such as vllm==0.32.0, or an image."
  }
  validation {
    condition     = var.engine.port >= 1024 && var.engine.port <= 65535 && floor(var.engine.port) == var.engine.port
    error_message = "engine: write a port from 1024 to 65535."
  }
}

variable "mount" {
  description = "Shared file system at /mnt/shared (module shared_files), or null."
  type        = object({ type = string, source = string, options = string })
  default     = null
}

variable "scaling" {
  description = "Scaling by the mean of GPUUtilization in percent; null: the number of nodes stays as it is."
  type        = object({ target = optional(number, 70), warmup = optional(number, 600) })
  default     = null
  validation {
    condition     = try(var.scaling.target >= 10 && var.scaling.target <= 95 && var.scaling.warmup >= 0, var.scaling == null)
    error_message = "scaling: write target 10 to 95 (percent) and warmup in seconds."
  }
}

variable "log_days" {
  description = "Days that logs are kept."
  type        = number
  default     = 30
  nullable    = false
  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_days)
    error_message = "log_days: write a number of days that CloudWatch Logs knows, such as 7, 30, 90 or 365."
  }
}
