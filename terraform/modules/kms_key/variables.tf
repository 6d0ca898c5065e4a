variable "alias" {
  description = "Alias of the key, without alias/."
  type        = string
  nullable    = false
  validation {
    condition     = can(regex("^[A-Za-z0-9/_-]{1,240}$", var.alias)) && !startswith(var.alias, "aws/")
    error_message = "alias: write letters, digits, slashes, hyphens and underscores, such as kv-prod/records, not beginning with aws/."
  }
}

variable "description" {
  description = "What the key encrypts."
  type        = string
  nullable    = false
}

variable "services" {
  description = "AWS services that use the key by themselves (logs.REGION.amazonaws.com, cloudwatch.amazonaws.com), for this account only. Services that act for a caller (S3, EFS, Secrets Manager) need no entry."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for s in var.services : can(regex("^[a-z0-9.-]+\\.amazonaws\\.com$", s))])
    error_message = "services: write service principals such as logs.us-east-1.amazonaws.com."
  }
}

variable "deletion_days" {
  description = "Days that the key can still be saved after destroy."
  type        = number
  default     = 30
  nullable    = false
  validation {
    condition     = var.deletion_days >= 7 && var.deletion_days <= 30 && floor(var.deletion_days) == var.deletion_days
    error_message = "deletion_days: write a whole number from 7 to 30."
  }
}

variable "tags" {
  description = "Tags of the key, besides the provider's default_tags."
  type        = map(string)
  default     = {}
  nullable    = false
}
