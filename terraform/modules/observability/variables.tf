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

variable "emails" {
  description = "Addresses that get alarms; each must confirm by the mail that SNS sends."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for e in var.emails : can(regex("^[^@\\s]+@[^@\\s]+\\.[^@\\s]+$", e))])
    error_message = "emails: write addresses such as oncall@example.com."
  }
}

variable "sns_topic_arn" {
  description = "Topic for alarms that is there already; null: one is made here."
  type        = string
  default     = null
  validation {
    condition     = var.sns_topic_arn == null || can(regex("^arn:[a-z-]+:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]+$", var.sns_topic_arn))
    error_message = "sns_topic_arn: write an ARN such as arn:aws:sns:us-east-1:123456789012:oncall."
  }
}

variable "thresholds" {
  description = "When alarms go off, as far as it is not at the defaults (alarms.tf). Percentages are of 100, TTFT is the 95th percentile in milliseconds."
  type        = map(number)
  default     = {}
  nullable    = false
  validation {
    condition     = length(setsubtract(keys(var.thresholds), keys(local.defaults))) == 0
    error_message = "thresholds: ${join(", ", setsubtract(keys(var.thresholds), keys(local.defaults)))} is not one of ${join(", ", keys(local.defaults))}."
  }
  validation {
    condition     = alltrue([for name, v in var.thresholds : v >= 0 && v <= 100 if endswith(name, "_percent") || can(regex("_percent_", name))])
    error_message = "thresholds: percentages are 0 to 100."
  }
  validation {
    condition     = merge(local.defaults, var.thresholds).ttft_p95_ms_warning < merge(local.defaults, var.thresholds).ttft_p95_ms_critical
    error_message = "thresholds: ttft_p95_ms_warning must be lower than ttft_p95_ms_critical."
  }
  validation {
    condition     = merge(local.defaults, var.thresholds).hit_rate_percent_warning > merge(local.defaults, var.thresholds).hit_rate_percent_critical
    error_message = "thresholds: hit_rate_percent_warning must be higher than hit_rate_percent_critical, since a low rate is the bad one."
  }
  validation {
    condition     = merge(local.defaults, var.thresholds).gpu_use_minutes >= 5 && merge(local.defaults, var.thresholds).gpu_use_minutes % 5 == 0
    error_message = "thresholds: gpu_use_minutes is a multiple of 5."
  }
}

variable "namespaces" {
  description = "CloudWatch namespaces that kvstore cloudwatch publishes to, and the one of vLLM's own metrics."
  type = object({
    tiers    = optional(string, "CachedAttention/Tiers")
    rag      = optional(string, "CacheBlend/RAG")
    cachegen = optional(string, "CacheGen")
    lmcache  = optional(string, "LMCache")
    vllm     = optional(string, "vLLM")
  })
  default  = {}
  nullable = false
  validation {
    condition     = alltrue([for n in values(var.namespaces) : can(regex("^[A-Za-z0-9/_.#:-]{1,255}$", n)) && !startswith(n, "AWS/")])
    error_message = "namespaces: write letters, digits and / _ . # : - only, and nothing that begins with AWS/."
  }
}

variable "log_group_names" {
  description = "Log groups that the saved queries read: those with kvstore's structured lines."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "log_field_prefix" {
  description = "What stands before the names of kvstore's fields in these log groups: \"\" for lines as kvstore wrote them (CloudWatch agent), \"log_processed.\" for those of pods (Fluent Bit of the CloudWatch add-on)."
  type        = string
  default     = ""
  nullable    = false
  validation {
    condition     = can(regex("^([A-Za-z_][A-Za-z0-9_]*\\.)*$", var.log_field_prefix))
    error_message = "log_field_prefix: write names that each end in a dot, such as log_processed., or \"\"."
  }
}

variable "valkey" {
  description = "Valkey cache to watch (output alarm of module valkey), or null."
  type = object({
    mode       = string
    id         = string
    member_ids = optional(list(string), [])
    max_bytes  = optional(number)
  })
  default = null
}

variable "efs_id" {
  description = "EFS file system to watch, or null."
  type        = string
  default     = null
}

variable "watch_efs" {
  description = "Whether efs_id is given; its value is not known before it is made."
  type        = bool
  default     = false
  nullable    = false
}

variable "bucket" {
  description = "S3 bucket whose 5xx answers are shown, with the id of its metrics filter; or null."
  type        = object({ name = string, filter_id = string })
  default     = null
}

variable "sampling" {
  description = "X-Ray: traces per second that are always kept, and the part of the others."
  type        = object({ reservoir = optional(number, 1), rate = optional(number, 0.05) })
  default     = {}
  nullable    = false
  validation {
    condition     = var.sampling.reservoir >= 0 && floor(var.sampling.reservoir) == var.sampling.reservoir && var.sampling.rate >= 0 && var.sampling.rate <= 1
    error_message = "sampling: write a whole reservoir, 0 or more, and a rate from 0 to 1."
  }
}

variable "cloudtrail" {
  description = "Whether to record who called the management API of this account (CloudTrail, all regions)."
  type        = bool
  default     = false
  nullable    = false
}

variable "config_recorder" {
  description = "Whether to record changes of resources (AWS Config). An account has one recorder per region: leave it off where there is one."
  type        = bool
  default     = false
  nullable    = false
}

variable "audit_days" {
  description = "Days that CloudTrail's and Config's files are kept."
  type        = number
  default     = 365
  nullable    = false
  validation {
    condition     = var.audit_days >= 1 && floor(var.audit_days) == var.audit_days
    error_message = "audit_days: write whole days, 1 or more."
  }
}
