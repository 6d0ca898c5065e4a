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

variable "region" {
  description = "Region of the cluster."
  type        = string
  nullable    = false
}

variable "kubernetes_version" {
  description = "Kubernetes version."
  type        = string
  default     = "1.34"
  nullable    = false
  validation {
    condition     = can(regex("^1\\.[0-9]{2}$", var.kubernetes_version))
    error_message = "kubernetes_version: write a version such as 1.34."
  }
}

variable "subnet_ids" {
  description = "Zone id to private subnet id: of the control plane, the system nodes, and the GPU nodes in gpu.zone_ids. EKS wants two zones."
  type        = map(string)
  nullable    = false
  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "subnet_ids: EKS wants subnets in two zones or more."
  }
}

variable "node_security_group_id" {
  description = "Security group of the nodes: everything among themselves (network's node_security_group_id)."
  type        = string
  nullable    = false
}

variable "vpc_cidr" {
  description = "Range of the VPC, to compare service_cidr with."
  type        = string
  nullable    = false
}

variable "service_cidr" {
  description = "Range of Kubernetes services. Must not overlap the VPC, nor what it is connected to."
  type        = string
  default     = "172.20.0.0/16"
  nullable    = false
  validation {
    condition     = can(cidrhost(var.service_cidr, 0)) && can(regex("^(10|172|192)\\.[0-9.]+/(1[2-9]|2[0-4])$", var.service_cidr))
    error_message = "service_cidr: write a private IPv4 network from /12 to /24, such as 172.20.0.0/16."
  }
  # Two networks overlap if their first addresses are equal once both are cut to the shorter prefix.
  validation {
    condition = try(
      cidrhost("${split("/", var.service_cidr)[0]}/${min(split("/", var.service_cidr)[1], split("/", var.vpc_cidr)[1])}", 0)
      != cidrhost("${split("/", var.vpc_cidr)[0]}/${min(split("/", var.service_cidr)[1], split("/", var.vpc_cidr)[1])}", 0), true
    )
    error_message = "service_cidr: ${var.service_cidr} overlaps the VPC (${var.vpc_cidr}); write another range, such as ${startswith(var.vpc_cidr, "172.") ? "10.100.0.0/16" : "172.20.0.0/16"}."
  }
}

variable "admin_arns" {
  description = "IAM roles and users that administer the cluster, besides the one that makes it."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for a in var.admin_arns : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:(role|user)/.+$", a))])
    error_message = "admin_arns: write ARNs such as arn:aws:iam::123456789012:role/admin."
  }
}

variable "public_access_cidrs" {
  description = "Ranges from which the API of the cluster may be reached over the internet. Empty: from the VPC only."
  type        = list(string)
  default     = []
  nullable    = false
  validation {
    condition     = alltrue([for c in var.public_access_cidrs : can(cidrhost(c, 0)) && !endswith(c, "/0")])
    error_message = "public_access_cidrs: write the networks of your people, such as 203.0.113.0/24; not the whole internet (/0)."
  }
}

variable "deletion_protection" {
  description = "Whether EKS refuses to delete the cluster."
  type        = bool
  default     = false
  nullable    = false
}

variable "log_days" {
  description = "Days that the control plane's logs are kept."
  type        = number
  default     = 365
  nullable    = false
}

variable "system" {
  description = "Nodes for Karpenter, DNS and the like."
  type = object({
    instance_type = optional(string, "m7i.large")
    count         = optional(number, 2)
  })
  default  = {}
  nullable = false
  validation {
    condition     = var.system.count >= 2 && floor(var.system.count) == var.system.count
    error_message = "system: write count = 2 or more; with one node Karpenter cannot replace it."
  }
}

variable "addons" {
  description = "EKS add-ons, and their versions; null: the one that EKS has for this Kubernetes version."
  type        = map(string)
  default = {
    vpc-cni                               = null
    kube-proxy                            = null
    coredns                               = null
    eks-pod-identity-agent                = null
    aws-secrets-store-csi-driver-provider = null
  }
  nullable = false
  validation {
    condition     = alltrue([for a in ["vpc-cni", "kube-proxy", "coredns", "eks-pod-identity-agent", "aws-secrets-store-csi-driver-provider"] : contains(keys(var.addons), a)])
    error_message = "addons: vpc-cni, kube-proxy, coredns, eks-pod-identity-agent and aws-secrets-store-csi-driver-provider are needed."
  }
}

variable "gpu" {
  description = "GPU nodes that Karpenter makes: types by preference, zones, the most GPUs in each zone, how long an empty node stays (its caches with it), GiB of the root volume, and the pinned image."
  type = object({
    instance_types    = list(string)
    zone_ids          = list(string)
    spot              = optional(bool, true)
    efa               = optional(bool, true)
    max_gpus          = optional(number, 16)
    consolidate_after = optional(string, "30m")
    expire_after      = optional(string, "Never")
    root_volume_gib   = optional(number, 200)
    ami_alias         = string
  })
  nullable = false
  validation {
    condition     = length(var.gpu.instance_types) >= 1 && length(var.gpu.zone_ids) >= 1 && length(setsubtract(var.gpu.zone_ids, keys(var.subnet_ids))) == 0
    error_message = "gpu: write one instance type or more, and zones of subnet_ids (${join(", ", keys(var.subnet_ids))})."
  }
  validation {
    condition     = can(regex("^al2023@v[0-9]{8}$", var.gpu.ami_alias))
    error_message = "gpu.ami_alias: pin a version such as al2023@v20251029, since nodes are replaced, and their caches lost, when it changes. aws ssm get-parameter --query Parameter.Value --output text --name /aws/service/eks/optimized-ami/${var.kubernetes_version}/amazon-linux-2023/x86_64/nvidia/recommended/release_version shows the newest: the digits after the hyphen."
  }
  validation {
    condition     = can(regex("^[0-9]+(s|m|h)$", var.gpu.consolidate_after)) && can(regex("^([0-9]+h|Never)$", var.gpu.expire_after))
    error_message = "gpu: write consolidate_after as 30m and expire_after as 720h or Never."
  }
  validation {
    condition     = var.gpu.max_gpus >= 1 && floor(var.gpu.max_gpus) == var.gpu.max_gpus
    error_message = "gpu.max_gpus: write a whole number, 1 or more."
  }
}

variable "efa_more" {
  description = "Types with EFA beyond those that module efa knows."
  type        = map(object({ cards = number, regions = list(string) }))
  default     = {}
  nullable    = false
}

variable "roles" {
  description = "Roles of pods in namespace kvstore, by service account: nodes and engines write, the evictor sweeps (module iam, trust = pods)."
  type        = object({ writer = string, evictor = string })
  nullable    = false
}

variable "node_token_secret_arn" {
  description = "Secret with the token of the nodes."
  type        = string
  nullable    = false
}

variable "store" {
  description = "kvstore on the GPU nodes: image, memory, GiB of the NVMe (0: none), lifetime, EFA devices of each node, the configuration of engines by zone id, and by zone id the URLs that are swept every hour."
  type = object({
    image       = string
    memory_gib  = number
    nvme_gib    = number
    ttl         = string
    efa_devices = optional(number, 1)
    config_yaml = map(string)
    sweep       = optional(map(string), {})
  })
  nullable = false
  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})$", var.store.image))
    error_message = "store.image: write an image with a tag or digest, such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/kvstore:0.1.0."
  }
  validation {
    condition     = var.store.memory_gib >= 1 && var.store.nvme_gib >= 0
    error_message = "store: write memory_gib of 1 or more and nvme_gib of 0 or more."
  }
}

variable "engine" {
  description = "vLLM in the cluster: image (null: none), model, GPUs of each pod, pods in each zone, further arguments."
  type = object({
    image    = optional(string)
    model    = optional(string, "")
    gpus     = optional(number, 1)
    replicas = optional(number, 1)
    args     = optional(list(string), [])
  })
  default  = {}
  nullable = false
  validation {
    condition     = var.engine.image == null || length(var.engine.model) > 0
    error_message = "engine: write a model for the image to serve."
  }
}

variable "plugins" {
  description = "Images of the device plugins: EFA's (null: that of EKS in this region) and NVIDIA's."
  type = object({
    efa    = optional(string)
    nvidia = optional(string, "nvcr.io/nvidia/k8s-device-plugin:v0.17.4")
  })
  default  = {}
  nullable = false
}

variable "container_insights" {
  description = "Whether the add-on of CloudWatch sends logs and metrics of pods."
  type        = bool
  default     = true
  nullable    = false
}

variable "logs_kms_key_arn" {
  description = "KMS key of the control plane's and the pods' logs; null: encryption by CloudWatch Logs alone."
  type        = string
  default     = null
}
