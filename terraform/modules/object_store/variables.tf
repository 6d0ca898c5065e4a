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

variable "bucket_base" {
  description = "Name of the S3 bucket, unique in the world, and base of the directory buckets' names (BASE--ZONEID--x-s3). Default: NAME-ACCOUNT."
  type        = string
  default     = null
  validation {
    condition     = var.bucket_base == null || can(regex("^[a-z0-9][a-z0-9-]*[a-z0-9]$", var.bucket_base)) && !can(regex("--|^xn-|^sthree-|-s3alias$", var.bucket_base))
    error_message = "bucket_base: write lower case letters, digits and single hyphens, beginning and ending with a letter or digit, such as acme-kv; not xn-…, sthree-… or …-s3alias."
  }
  validation {
    condition     = try(length(var.bucket_base) >= 3 && length(var.bucket_base) <= (length(var.express_zone_ids) == 0 ? 63 : 63 - max([for z in var.express_zone_ids : length("--${z}--x-s3")]...)), var.bucket_base == null)
    error_message = "bucket_base: write 3 to ${length(var.express_zone_ids) == 0 ? 63 : 63 - max([for z in var.express_zone_ids : length("--${z}--x-s3")]...)} characters; a bucket's name has at most 63, and for directory buckets --ZONEID--x-s3 is a part of it."
  }
}

variable "express_zone_ids" {
  description = "Availability zone ids (not names) that get an S3 Express directory bucket. Empty: none."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for z in var.express_zone_ids : can(regex("^[a-z]{3,5}[0-9]-([a-z]{3}[0-9]-)?az[0-9]$", z))])
    error_message = "express_zone_ids: write zone ids such as use1-az4, not names such as us-east-1a; aws ec2 describe-availability-zones --query 'AvailabilityZones[].[ZoneName,ZoneId]' lists both."
  }
  validation {
    condition     = length(distinct(var.express_zone_ids)) == length(var.express_zone_ids)
    error_message = "express_zone_ids: write each zone once."
  }
  validation {
    condition     = length(setsubtract(var.express_zone_ids, flatten(values(var.s3express_zones)))) == 0
    error_message = "express_zone_ids: S3 Express does not exist in ${join(", ", setsubtract(var.express_zone_ids, flatten(values(var.s3express_zones))))}; write one of ${join(", ", coalescelist([for z in flatten(values(var.s3express_zones)) : z if contains([for w in var.express_zone_ids : split("-", w)[0]], split("-", z)[0])], flatten(values(var.s3express_zones)), ["(none is known)"]))}. If AWS has added a zone since (\"S3 Express One Zone Availability Zones and Regions\" in the S3 user guide), add it to s3express_zones."
  }
}

variable "s3express_zones" {
  description = "Where S3 Express exists: region to zone ids. AWS adds zones; this is the list that was known when this was written."
  type        = map(list(string))
  default = {
    us-east-1      = ["use1-az4", "use1-az5", "use1-az6"]
    us-east-2      = ["use2-az1", "use2-az2"]
    us-west-2      = ["usw2-az1", "usw2-az3", "usw2-az4"]
    ap-northeast-1 = ["apne1-az1", "apne1-az4"]
    ap-south-1     = ["aps1-az1", "aps1-az3"]
    eu-north-1     = ["eun1-az1", "eun1-az2", "eun1-az3"]
    eu-west-1      = ["euw1-az1", "euw1-az3"]
  }
  nullable = false
  validation {
    condition     = alltrue([for z in flatten(values(var.s3express_zones)) : can(regex("^[a-z]{3,5}[0-9]-([a-z]{3}[0-9]-)?az[0-9]$", z))])
    error_message = "s3express_zones: write zone ids by region, such as { us-east-1 = [\"use1-az4\"] }."
  }
}

variable "expiration_days" {
  description = "Days after which objects expire, by prefix; the prefix \"\" is the whole bucket. Days are the finest grain of S3; shorter lifetimes are the option ttl of the URL."
  type        = map(number)
  default     = { "kv/" = 7 }
  nullable    = false
  validation {
    condition     = alltrue([for d in values(var.expiration_days) : d >= 1 && floor(d) == d])
    error_message = "expiration_days: write whole days, 1 or more, such as { \"kv/\" = 7 }; for less than a day give the URL the option ttl."
  }
  validation {
    condition     = alltrue([for p in keys(var.expiration_days) : p == "" || can(regex("^[^/].*/$", p))])
    error_message = "expiration_days: write prefixes that end in a slash and do not begin with one, such as kv/ (or \"\" for the whole bucket)."
  }
}

variable "express_expiration_days" {
  description = "The same for the directory buckets, whose storage costs five times as much; null: as expiration_days."
  type        = map(number)
  default     = null
  validation {
    condition     = alltrue([for d in values(coalesce(var.express_expiration_days, {})) : d >= 1 && floor(d) == d])
    error_message = "express_expiration_days: write whole days, 1 or more, such as { \"kv/\" = 1 }; for less than a day give the URL the option ttl."
  }
  validation {
    condition     = alltrue([for p in keys(coalesce(var.express_expiration_days, {})) : p == "" || can(regex("^[^/].*/$", p))])
    error_message = "express_expiration_days: write prefixes that end in a slash and do not begin with one, such as kv/ (or \"\" for the whole bucket)."
  }
}

variable "quarantine_days" {
  description = "Days that corrupt records are kept aside under PREFIX/quarantine/."
  type        = number
  default     = 7
  nullable    = false
  validation {
    condition     = var.quarantine_days >= 1 && floor(var.quarantine_days) == var.quarantine_days
    error_message = "quarantine_days: write whole days, 1 or more."
  }
}

variable "intelligent_tiering" {
  description = "Whether records move to S3 Intelligent-Tiering at once (general purpose bucket only; pays from about a month of life on, so set longer expiration_days with it)."
  type        = bool
  default     = false
  nullable    = false
}

variable "force_destroy" {
  description = "Whether destroy may delete buckets that still hold records. false: destroy fails until they are empty."
  type        = bool
  default     = false
  nullable    = false
}

variable "kms_deletion_days" {
  description = "Days that the KMS key can still be saved after destroy."
  type        = number
  default     = 30
  nullable    = false
  validation {
    condition     = var.kms_deletion_days >= 7 && var.kms_deletion_days <= 30 && floor(var.kms_deletion_days) == var.kms_deletion_days
    error_message = "kms_deletion_days: write 7 to 30."
  }
}

variable "express_kms" {
  description = "Whether directory buckets are encrypted with the KMS key too. false: with S3's own key (SSE-S3). Cannot be changed to another KMS key later."
  type        = bool
  default     = true
  nullable    = false
}
