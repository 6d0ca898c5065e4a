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

variable "bucket_arns" {
  description = "ARNs of the S3 buckets with records."
  type        = list(string)
  nullable    = false
  validation {
    condition     = length(var.bucket_arns) + length(var.express_bucket_arns) > 0
    error_message = "bucket_arns: roles without a bucket would have an empty policy, which IAM refuses; write at least one ARN here or in express_bucket_arns."
  }
  validation {
    condition     = alltrue([for a in var.bucket_arns : can(regex("^arn:aws[a-z-]*:s3:::[a-z0-9.-]{3,63}$", a))])
    error_message = "bucket_arns: write ARNs of buckets such as arn:aws:s3:::acme-kv, without a slash and without wildcards."
  }
}

variable "express_bucket_arns" {
  description = "ARNs of the S3 Express directory buckets with records."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.express_bucket_arns : can(regex("^arn:aws[a-z-]*:s3express:[a-z0-9-]+:[0-9]{12}:bucket/[a-z0-9-]+--x-s3$", a))])
    error_message = "express_bucket_arns: write ARNs such as arn:aws:s3express:us-east-1:123456789012:bucket/acme-kv--use1-az4--x-s3, without wildcards."
  }
}

variable "prefix" {
  description = "Prefix of the records in the buckets, as in the URL; \"\" is the whole bucket."
  type        = string
  default     = "kv/"
  nullable    = false
  validation {
    condition     = var.prefix == "" || can(regex("^[A-Za-z0-9][A-Za-z0-9!_.()/-]*/$", var.prefix))
    error_message = "prefix: write a prefix that ends in a slash and does not begin with one, such as kv/, without wildcards."
  }
}

variable "kms_key_arns" {
  description = "ARNs of the KMS keys of buckets and secrets."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.kms_key_arns : can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", a))])
    error_message = "kms_key_arns: write ARNs of keys (not aliases) such as arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab."
  }
}

variable "secret_arns" {
  description = "ARNs of the secrets that nodes read: the configuration, the cache's password."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.secret_arns : can(regex("^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@-]+$", a))])
    error_message = "secret_arns: write ARNs of secrets such as arn:aws:secretsmanager:us-east-1:123456789012:secret:kv/config-AbCdEf, without wildcards."
  }
}

variable "trust" {
  description = "Who takes the roles: ec2 (instances, by an instance profile of the writer role) or pods (EKS Pod Identity)."
  type        = string
  nullable    = false
  validation {
    condition     = contains(["ec2", "pods"], var.trust)
    error_message = "trust: write ec2 or pods."
  }
}

variable "cluster_arn" {
  description = "With trust = pods: only Pod Identity sessions of this EKS cluster may take the roles. Default: any cluster of the account."
  type        = string
  default     = null
  validation {
    condition     = var.cluster_arn == null || can(regex("^arn:aws[a-z-]*:eks:[a-z0-9-]+:[0-9]{12}:cluster/[A-Za-z0-9_-]+$", var.cluster_arn))
    error_message = "cluster_arn: write the ARN of an EKS cluster such as arn:aws:eks:us-east-1:123456789012:cluster/kv."
  }
}

variable "download_arns" {
  description = "ARNs of S3 objects that nodes install from (the wheel, a model), such as arn:aws:s3:::acme-artifacts/kvstore/*."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.download_arns : can(regex("^arn:aws[a-z-]*:s3:::[a-z0-9.-]{3,63}/.+$", a))])
    error_message = "download_arns: write ARNs of objects such as arn:aws:s3:::acme-artifacts/kvstore/*."
  }
}

variable "model_urls" {
  description = "Folders of models on S3 that engines load (s3://bucket/prefix): nodes may list and read what lies below."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for u in var.model_urls : can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^*?]+$", u))])
    error_message = "model_urls: write folders such as s3://acme-models/Qwen2.5-7B-Instruct, without wildcards."
  }
}

variable "trusted_arns" {
  description = "Roles and users of this account that may take the three roles, too: people (kvstore doctor), and whatever runs the sweep. Empty: nobody but instances or pods."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.trusted_arns : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:(role|user)/[A-Za-z0-9+=,.@_/-]+$", a))])
    error_message = "trusted_arns: write ARNs of roles or users, such as arn:aws:iam::123456789012:role/ml-platform, without wildcards."
  }
}

variable "ecr_repository_arns" {
  description = "ARNs of the ECR repositories that nodes pull images from."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.ecr_repository_arns : can(regex("^arn:aws[a-z-]*:ecr:[a-z0-9-]+:[0-9]{12}:repository/[a-z0-9._/-]+$", a))])
    error_message = "ecr_repository_arns: write ARNs of repositories such as arn:aws:ecr:us-east-1:123456789012:repository/kvstore."
  }
}

variable "metric_namespaces" {
  description = "CloudWatch namespaces that nodes may publish to."
  type        = list(string)
  default     = ["CachedAttention/Tiers", "CacheBlend/RAG", "CacheGen", "LMCache", "CWAgent"]
  nullable    = false
  validation {
    condition     = alltrue([for n in var.metric_namespaces : can(regex("^[A-Za-z0-9][A-Za-z0-9./_#-]*$", n)) && !startswith(n, "AWS/")])
    error_message = "metric_namespaces: write names such as CacheGen, without wildcards and not beginning with AWS/."
  }
}

variable "log_group_arns" {
  description = "ARNs of the log groups that nodes write to."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.log_group_arns : can(regex("^arn:aws[a-z-]*:logs:[a-z0-9-]+:[0-9]{12}:log-group:[A-Za-z0-9_/.#-]+$", a))])
    error_message = "log_group_arns: write ARNs of log groups without the trailing :*, such as arn:aws:logs:us-east-1:123456789012:log-group:/kv/nodes."
  }
}

variable "xray" {
  description = "Whether nodes may send traces to X-Ray."
  type        = bool
  default     = true
  nullable    = false
}

variable "ssm" {
  description = "With trust = ec2: whether the nodes' shell can be opened through Session Manager (AmazonSSMManagedInstanceCore); there is no SSH."
  type        = bool
  default     = true
  nullable    = false
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
