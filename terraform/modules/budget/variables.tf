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

variable "amount" {
  description = "Budget in $ a month."
  type        = number
  default     = 5000
  nullable    = false
  validation {
    condition     = var.amount > 0
    error_message = "amount: write what a month may cost in $, more than 0, such as 5000."
  }
}

variable "emails" {
  description = "Addresses that are told."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for e in var.emails : can(regex("^[^@ ]+@[^@ ]+\\.[^@ ]+$", e))])
    error_message = "emails: write addresses such as ops@example.com."
  }
  validation {
    condition     = length(var.emails) <= 10
    error_message = "emails: AWS Budgets takes at most 10 addresses; write a mailing list."
  }
}

variable "sns_topic_arn" {
  description = "SNS topic that is told; its policy must let budgets.amazonaws.com and costalerts.amazonaws.com publish."
  type        = string
  default     = null
  validation {
    condition     = var.sns_topic_arn == null || can(regex("^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]+$", var.sns_topic_arn))
    error_message = "sns_topic_arn: write the ARN of a topic such as arn:aws:sns:us-east-1:123456789012:kv-alarms."
  }
}

variable "actual_percent" {
  description = "Tell when this share of amount has been spent."
  type        = number
  default     = 80
  nullable    = false
  validation {
    condition     = var.actual_percent > 0 && var.actual_percent <= 1000
    error_message = "actual_percent: write percent of amount, such as 80."
  }
}

variable "forecast_percent" {
  description = "Tell when the forecast for the month reaches this share of amount."
  type        = number
  default     = 100
  nullable    = false
  validation {
    condition     = var.forecast_percent > 0 && var.forecast_percent <= 1000
    error_message = "forecast_percent: write percent of amount, such as 100."
  }
}

variable "project" {
  description = "Value of the tag Project: only what carries it counts. The tag must be activated as a cost allocation tag in the billing console. null: the whole account."
  type        = string
  default     = null
  validation {
    condition     = var.project == null || can(regex("^[A-Za-z0-9 _.:/=+@-]{1,256}$", var.project))
    error_message = "project: write the value of the tag Project, such as kvstore."
  }
}

variable "anomalies" {
  description = "Whether Cost Anomaly Detection watches too."
  type        = bool
  default     = true
  nullable    = false
}

variable "anomaly_usd" {
  description = "Tell of anomalies from this impact on, in $."
  type        = number
  default     = 100
  nullable    = false
  validation {
    condition     = var.anomaly_usd > 0
    error_message = "anomaly_usd: write $, more than 0, such as 100."
  }
}
