variable "region" {
  description = "Region of the instances."
  type        = string
  nullable    = false
}

variable "more" {
  description = "Types that AWS has added since, or others in further regions: type to network cards and regions."
  type        = map(object({ cards = number, regions = list(string) }))
  default     = {}
  nullable    = false
  validation {
    condition     = alltrue([for t in values(var.more) : t.cards >= 1 && floor(t.cards) == t.cards])
    error_message = "more: write whole cards, 1 or more, such as { \"p6-b200.48xlarge\" = { cards = 8, regions = [\"us-west-2\"] } }."
  }
}

variable "instance_types" {
  description = "Types that are to have EFA."
  type        = list(string)
  nullable    = false
  validation {
    condition     = length(setsubtract(var.instance_types, keys(local.types))) == 0
    error_message = "EFA: ${join(", ", setsubtract(var.instance_types, keys(local.types)))} is not known to have EFA and a GPU; write one of ${join(", ", length(local.here) > 0 ? local.here : keys(local.types))}, or efa = false. Others that AWS has added: aws ec2 describe-instance-types --filters Name=network-info.efa-supported,Values=true shows them; add them to efa_more."
  }
  validation {
    condition     = alltrue([for t in var.instance_types : contains(try(local.types[t].regions, [var.region]), var.region)])
    error_message = "EFA: ${join(", ", [for t in var.instance_types : t if !contains(try(local.types[t].regions, [var.region]), var.region)])} is not known to exist in ${var.region}; write ${length(local.here) > 0 ? "one of ${join(", ", local.here)}, " : ""}another region (${join(", ", sort(distinct(flatten([for t in var.instance_types : try(local.types[t].regions, [])]))))}), or efa = false. If AWS has added it: aws ec2 describe-instance-type-offerings --region ${var.region} shows it; add it to efa_more."
  }
}
