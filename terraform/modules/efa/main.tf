# Which instance types have a GPU and EFA, with how many network cards, and where. No resources: a question that is
# answered at plan time. From AWS's documentation as it was known when this was written; not looked up since.

locals {
  known = {
    g4dn = {
      cards   = { "8xlarge" = 1, "12xlarge" = 1, "16xlarge" = 1 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1", "ap-southeast-1", "ap-southeast-2", "ap-south-1", "ca-central-1", "eu-central-1", "eu-west-1", "eu-west-2", "eu-north-1"]
    }
    g5 = {
      cards   = { "8xlarge" = 1, "12xlarge" = 1, "16xlarge" = 1, "24xlarge" = 1, "48xlarge" = 1 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1", "ap-southeast-2", "ap-south-1", "ca-central-1", "eu-central-1", "eu-west-1", "eu-west-2", "eu-north-1"]
    }
    g6 = {
      cards   = { "8xlarge" = 1, "12xlarge" = 1, "16xlarge" = 1, "24xlarge" = 1, "48xlarge" = 1 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1", "ap-south-1", "ca-central-1", "eu-central-1", "eu-west-2"]
    }
    g6e = {
      cards   = { "8xlarge" = 1, "12xlarge" = 1, "16xlarge" = 1, "24xlarge" = 2, "48xlarge" = 4 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1", "eu-central-1"]
    }
    p4d = {
      cards   = { "24xlarge" = 4 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1", "eu-west-1", "eu-central-1"]
    }
    p4de = {
      cards   = { "24xlarge" = 4 }
      regions = ["us-east-1", "us-west-2"]
    }
    p5 = {
      cards   = { "48xlarge" = 32 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1", "ap-south-1", "eu-north-1"]
    }
    p5e = {
      cards   = { "48xlarge" = 32 }
      regions = ["us-east-2", "us-west-2"]
    }
    p5en = {
      cards   = { "48xlarge" = 16 }
      regions = ["us-east-1", "us-east-2", "us-west-2", "ap-northeast-1"]
    }
  }
  types = merge(
    merge([for family, f in local.known : { for size, n in f.cards : "${family}.${size}" => { cards = n, regions = f.regions } }]...),
    var.more,
  )
  here = sort([for t, x in local.types : t if contains(x.regions, var.region)])
}
