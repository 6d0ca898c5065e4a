mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { region = "us-east-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  name                = "kv"
  trust               = "ec2"
  bucket_arns         = ["arn:aws:s3:::acme-kv"]
  express_bucket_arns = ["arn:aws:s3express:us-east-1:123456789012:bucket/acme-kv--use1-az4--x-s3"]
  kms_key_arns        = ["arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"]
}

# What the documents allow is simulated by tests/terraform/test_policies.py.

run "instances" {
  command = plan
  assert {
    condition     = one(one(data.aws_iam_policy_document.trust.statement).principals).identifiers == toset(["ec2.amazonaws.com"]) && length(aws_iam_instance_profile.node) == 1 && length(aws_iam_role_policy_attachment.ssm) == 3
    error_message = "instances cannot take the roles"
  }
}

run "pods" {
  command = plan
  variables {
    trust       = "pods"
    cluster_arn = "arn:aws:eks:us-east-1:123456789012:cluster/kv"
  }
  assert {
    condition     = one(one(data.aws_iam_policy_document.trust.statement).principals).identifiers == toset(["pods.eks.amazonaws.com"]) && one(data.aws_iam_policy_document.trust.statement).actions == toset(["sts:AssumeRole", "sts:TagSession"])
    error_message = "pods cannot take the roles"
  }
  assert {
    condition     = length(one(data.aws_iam_policy_document.trust.statement).condition) == 2 && output.node_instance_profile_name == null
    error_message = "pods of other clusters can take the roles, or there is an instance profile"
  }
}

run "only_sessions_on_our_buckets" {
  command = plan
  assert {
    condition     = alltrue([for role, d in data.aws_iam_policy_document.data : one([for s in d.statement : s.resources if s.actions == toset(["s3express:CreateSession"])]) == toset(var.express_bucket_arns)])
    error_message = "sessions on other buckets"
  }
  assert {
    condition     = { for role, d in data.aws_iam_policy_document.data : role => flatten([for s in d.statement : [for c in s.condition : c.values] if s.sid == "Express"]) } == { evictor = [], reader = ["ReadOnly"], writer = [] }
    error_message = "a reader could open a ReadWrite session"
  }
}

run "only_express" {
  command = plan
  variables { bucket_arns = [] }
  assert {
    condition     = toset([for s in data.aws_iam_policy_document.data["writer"].statement : s.sid]) == toset(["Express", "Keys"])
    error_message = "a statement without resources"
  }
}

run "people" {
  command = plan
  variables { trusted_arns = ["arn:aws:iam::123456789012:role/ml-platform"] }
  assert {
    condition     = one([for s in data.aws_iam_policy_document.trust.statement : one(s.principals).identifiers if s.sid == "People"]) == toset(var.trusted_arns) && length(data.aws_iam_policy_document.trust.statement) == 2
    error_message = "people cannot take the roles, or instances no longer can"
  }
}

run "models_on_s3" {
  command = plan
  variables { model_urls = ["s3://acme-models/qwen/7b/"] }
  assert {
    condition     = one([for s in data.aws_iam_policy_document.node.statement : s.resources if s.sid == "Models"]) == toset(["arn:aws:s3:::acme-models/qwen/7b/*"])
    error_message = "the model cannot be read, or more than it can"
  }
  assert {
    condition     = one([for s in data.aws_iam_policy_document.node.statement : [s.resources, one(s.condition).values] if s.sid == "ListModels0"]) == [toset(["arn:aws:s3:::acme-models"]), tolist(["qwen/7b*"])]
    error_message = "the model cannot be listed, or more than it can"
  }
}
