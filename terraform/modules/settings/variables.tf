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

variable "config_yaml" {
  description = "Configuration of kvstore for engines (docs/options.md), by zone id. Holds no secret: it is in state."
  type        = map(string)
  nullable    = false
  validation {
    condition     = length(var.config_yaml) >= 1 && alltrue([for c in values(var.config_yaml) : can(yamldecode(c))])
    error_message = "config_yaml: write YAML for one zone id or more."
  }
  validation {
    condition     = !can(regex("(?i)(secret_access_key|session_token|password|token) *['\"]?[:=]", join("\n", values(var.config_yaml))))
    error_message = "config_yaml: a secret would lie in state here; nodes get secrets from Secrets Manager as environment variables."
  }
}

variable "node_yaml" {
  description = "Configuration of kvstore serve (docs/nodes.md), without a token."
  type        = string
  nullable    = false
  validation {
    condition     = can(yamldecode(var.node_yaml)) && !can(regex("(?m)^ *['\"]?token['\"]? *:", var.node_yaml))
    error_message = "node_yaml: write YAML without a token; nodes get theirs from Secrets Manager."
  }
}

variable "model" {
  description = "What the engine serves: id is a Hugging Face name, a folder, or s3://bucket/prefix; args are further arguments of the engine."
  type = object({
    id   = string
    args = optional(list(string), [])
  })
  nullable = false
  validation {
    condition     = length(var.model.id) > 0
    error_message = "model: write an id, such as { id = \"Qwen/Qwen2.5-7B-Instruct\" }."
  }
}

variable "node_token" {
  description = "Whether nodes get a token. They need one where they listen to other hosts."
  type        = bool
  default     = false
  nullable    = false
}

variable "node_token_version" {
  description = "Raise by one to make a new token; nodes take it when they start again."
  type        = number
  default     = 1
  nullable    = false
  validation {
    condition     = var.node_token_version >= 1 && floor(var.node_token_version) == var.node_token_version
    error_message = "node_token_version: write a whole number, 1 or more."
  }
}

variable "kms_key_arn" {
  description = "KMS key of the secrets."
  type        = string
  nullable    = false
}

variable "recovery_days" {
  description = "Days that a deleted secret can still be brought back; 0: none, so that the name is free at once."
  type        = number
  default     = 7
  nullable    = false
  validation {
    condition     = var.recovery_days == 0 || (var.recovery_days >= 7 && var.recovery_days <= 30 && floor(var.recovery_days) == var.recovery_days)
    error_message = "recovery_days: write 0, or 7 to 30."
  }
}
