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

variable "autoscaling_group_names" {
  description = "Auto Scaling groups that are emptied and filled again."
  type        = list(string)
  nullable    = false
  validation {
    condition     = alltrue([for n in var.autoscaling_group_names : length(n) > 0 && !strcontains(n, "*")])
    error_message = "autoscaling_group_names: write names of groups, without wildcards."
  }
}

variable "working_size" {
  description = "Smallest and desired number of instances of each group while people work."
  type        = object({ min = number, desired = number })
  default     = { min = 1, desired = 1 }
  nullable    = false
  validation {
    condition     = var.working_size.min >= 0 && var.working_size.desired >= var.working_size.min && floor(var.working_size.min) == var.working_size.min && floor(var.working_size.desired) == var.working_size.desired
    error_message = "working_size: write whole numbers with 0 <= min <= desired, such as { min = 1, desired = 2 }."
  }
}

variable "nights" {
  description = "Whether the groups are empty at night and at the weekend (development). false: they run on."
  type        = bool
  default     = false
  nullable    = false
}

variable "start" {
  description = "When work begins on workdays, HH:MM."
  type        = string
  default     = "07:00"
  nullable    = false
  validation {
    condition     = can(regex("^([01][0-9]|2[0-3]):[0-5][0-9]$", var.start))
    error_message = "start: write a time of day such as 07:00."
  }
}

variable "stop" {
  description = "When work ends, HH:MM. Friday's stop lasts until Monday's start."
  type        = string
  default     = "20:00"
  nullable    = false
  validation {
    condition     = can(regex("^([01][0-9]|2[0-3]):[0-5][0-9]$", var.stop))
    error_message = "stop: write a time of day such as 20:00."
  }
  validation {
    condition     = var.stop != var.start
    error_message = "stop: start and stop are the same time; write another."
  }
}

variable "workdays" {
  description = "Days with a start, in EventBridge's words."
  type        = string
  default     = "MON-FRI"
  nullable    = false
  validation {
    condition     = can(regex("^(MON|TUE|WED|THU|FRI|SAT|SUN)([,-](MON|TUE|WED|THU|FRI|SAT|SUN))*$", var.workdays))
    error_message = "workdays: write days such as MON-FRI or MON,WED,FRI."
  }
}

variable "timezone" {
  description = "Time zone of start and stop, as in the IANA database."
  type        = string
  default     = "UTC"
  nullable    = false
  validation {
    condition     = can(regex("^(UTC|[A-Z][A-Za-z_]+/[A-Za-z_/+-]+[0-9]*)$", var.timezone))
    error_message = "timezone: write UTC or a name such as Asia/Tokyo or America/New_York."
  }
}

variable "idle_stop" {
  description = "Whether a group whose GPUs are idle is emptied. It is filled again by the next start, or by hand."
  type        = bool
  default     = false
  nullable    = false
}

variable "idle" {
  description = "What idle means: the group's largest GPU utilisation stays under percent for minutes (a multiple of 5). The metric comes from the nodes; without data nothing is stopped."
  type = object({
    percent   = optional(number, 5)
    minutes   = optional(number, 60)
    namespace = optional(string, "CacheGen")
    metric    = optional(string, "GPUUtilization")
    dimension = optional(string, "AutoScalingGroupName")
  })
  default  = {}
  nullable = false
  validation {
    condition     = var.idle.percent > 0 && var.idle.percent <= 100
    error_message = "idle.percent: write more than 0 and at most 100, such as 5."
  }
  validation {
    condition     = var.idle.minutes >= 5 && var.idle.minutes <= 1440 && var.idle.minutes % 5 == 0
    error_message = "idle.minutes: write a multiple of 5 from 5 to 1440, such as 60."
  }
}

variable "snapshots" {
  description = "Daily EBS snapshots (Data Lifecycle Manager) of the volumes with these tags: at is HH:MM in UTC, keep the number that stays. null: none, since caches are computed again."
  type = object({
    tags = map(string)
    at   = optional(string, "03:00")
    keep = optional(number, 7)
  })
  default = null
  validation {
    condition     = var.snapshots == null || try(length(var.snapshots.tags) >= 1 && can(regex("^([01][0-9]|2[0-3]):[0-5][0-9]$", var.snapshots.at)) && var.snapshots.keep >= 1 && var.snapshots.keep <= 1000, false)
    error_message = "snapshots: write at least one tag, at as HH:MM, and keep from 1 to 1000, such as { tags = { Snapshot = \"daily\" }, at = \"03:00\", keep = 7 }."
  }
}

variable "permissions_boundary" {
  description = "ARN of a permissions boundary for the roles."
  type        = string
  default     = null
  validation {
    condition     = var.permissions_boundary == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/.+$", var.permissions_boundary))
    error_message = "permissions_boundary: write the ARN of an IAM policy."
  }
}
