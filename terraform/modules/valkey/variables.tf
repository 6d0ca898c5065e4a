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

variable "mode" {
  description = "serverless (grows by itself, pay per GB-hour and ECPU) or cluster (nodes of node_type)."
  type        = string
  default     = "serverless"
  nullable    = false
  validation {
    condition     = contains(["serverless", "cluster"], var.mode)
    error_message = "mode: write serverless or cluster."
  }
}

variable "vpc_id" {
  description = "VPC of the cache."
  type        = string
  nullable    = false
}

variable "subnet_ids" {
  description = "Zone id to private subnet id."
  type        = map(string)
  nullable    = false
  validation {
    condition     = length(var.subnet_ids) >= 1
    error_message = "subnet_ids: write at least one, such as { use1-az4 = \"subnet-0123456789abcdef0\" }."
  }
  validation {
    condition     = var.mode != "serverless" || length(var.subnet_ids) >= 2 && length(var.subnet_ids) <= 3
    error_message = "subnet_ids: a serverless cache wants subnets in two or three zones; write that many or mode = \"cluster\"."
  }
}

variable "client_security_group_id" {
  description = "Security group of the nodes. Only they reach the cache, and get the rule that lets them."
  type        = string
  nullable    = false
}

variable "engine_version" {
  description = "Major and minor version of Valkey."
  type        = string
  default     = "8.0"
  nullable    = false
  validation {
    condition     = can(regex("^(7\\.2|[89]\\.[0-9])$", var.engine_version))
    error_message = "engine_version: write a Valkey version such as 7.2 or 8.0."
  }
}

variable "node_type" {
  description = "Type of the nodes of a cluster. The first size with enough network for KV caches is r7g.large (12.5 Gbit/s at best)."
  type        = string
  default     = "cache.r7g.large"
  nullable    = false
  validation {
    condition     = can(regex("^cache\\.[a-z0-9]+\\.[a-z0-9]+$", var.node_type))
    error_message = "node_type: write a cache node type such as cache.r7g.large."
  }
}

variable "shards" {
  description = "Shards of a cluster. Memory and bandwidth grow with them."
  type        = number
  default     = 1
  nullable    = false
  validation {
    condition     = var.shards >= 1 && var.shards <= 90 && floor(var.shards) == var.shards
    error_message = "shards: write a whole number from 1 to 90."
  }
}

variable "replicas" {
  description = "Replicas of each shard. With 1 or more a lost node fails over; with 0 its records are computed again."
  type        = number
  default     = 1
  nullable    = false
  validation {
    condition     = var.replicas >= 0 && var.replicas <= 5 && floor(var.replicas) == var.replicas
    error_message = "replicas: write a whole number from 0 to 5."
  }
  validation {
    condition     = var.mode != "cluster" || var.replicas == 0 || length(var.subnet_ids) >= 2
    error_message = "replicas: a replica stands in another zone; give subnet_ids of two zones or more, or write replicas = 0."
  }
}

variable "eviction" {
  description = "What a full cluster does (maxmemory-policy). With noeviction it would refuse writers. A serverless cache always does as volatile-lru; all our records have an expiry."
  type        = string
  default     = "allkeys-lru"
  nullable    = false
  validation {
    condition     = contains(["allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-lfu", "volatile-ttl"], var.eviction)
    error_message = "eviction: write allkeys-lru, allkeys-lfu, volatile-lru, volatile-lfu or volatile-ttl; noeviction refuses writes once the cache is full."
  }
}

variable "serverless_max_gb" {
  description = "Most data of a serverless cache in GB: the limit of its cost."
  type        = number
  default     = 100
  nullable    = false
  validation {
    condition     = var.serverless_max_gb >= 1 && var.serverless_max_gb <= 5000 && floor(var.serverless_max_gb) == var.serverless_max_gb
    error_message = "serverless_max_gb: write a whole number from 1 to 5000."
  }
}

variable "serverless_max_ecpu" {
  description = "Most ECPUs a second of a serverless cache; a read or write of 1 KB takes one."
  type        = number
  default     = 500000
  nullable    = false
  validation {
    condition     = var.serverless_max_ecpu >= 1000 && var.serverless_max_ecpu <= 15000000 && floor(var.serverless_max_ecpu) == var.serverless_max_ecpu
    error_message = "serverless_max_ecpu: write a whole number from 1000 to 15000000."
  }
}

variable "snapshot_days" {
  description = "Days that daily snapshots are kept; 0: none, since a lost cache is computed again."
  type        = number
  default     = 0
  nullable    = false
  validation {
    condition     = var.snapshot_days >= 0 && var.snapshot_days <= 35 && floor(var.snapshot_days) == var.snapshot_days
    error_message = "snapshot_days: write a whole number from 0 to 35."
  }
}

variable "key_prefix" {
  description = "Prefix of the records' names (the path of the URL); a serverless cache's user may touch only these."
  type        = string
  default     = "kv"
  nullable    = false
  validation {
    condition     = can(regex("^[a-zA-Z0-9_.-]+$", var.key_prefix))
    error_message = "key_prefix: write letters, digits, dots, hyphens and underscores, such as kv, without a slash."
  }
}

variable "password_version" {
  description = "Raise it to make a new password. It is generated, written to the cache and to Secrets Manager, and never in the state."
  type        = number
  default     = 1
  nullable    = false
  validation {
    condition     = var.password_version >= 1 && floor(var.password_version) == var.password_version
    error_message = "password_version: write a whole number, 1 or more."
  }
}
