# EKS: control plane, a few system nodes, add-ons, who may do what. GPU nodes are Karpenter's (karpenter.tf, manifests.tf).

data "aws_partition" "this" {}
data "aws_caller_identity" "this" {}

locals {
  # On GPU nodes, too, in spite of their taint; with Pod Identity; and engines take the nodes' token from a Kubernetes secret
  # that the driver keeps in step. (aws eks describe-addon-configuration shows what the add-on takes.)
  secrets_driver = jsonencode({
    tolerations = [{ operator = "Exists" }]
    secrets-store-csi-driver = {
      linux         = { tolerations = [{ operator = "Exists" }] }
      syncSecret    = { enabled = true }
      tokenRequests = [{ audience = "sts.amazonaws.com" }, { audience = "pods.eks.amazonaws.com" }]
    }
  })
  arn     = "arn:${data.aws_partition.this.partition}"
  account = data.aws_caller_identity.this.account_id
}

module "efa" {
  count          = var.gpu.efa ? 1 : 0
  source         = "../efa"
  region         = var.region
  instance_types = var.gpu.instance_types
  more           = var.efa_more
}

module "key" {
  source      = "../kms_key"
  alias       = "${var.name}/cluster"
  description = "kvstore: Kubernetes secrets"
  tags        = var.tags
}

data "aws_iam_policy_document" "trust" {
  for_each = { cluster = "eks.amazonaws.com", node = "ec2.amazonaws.com", pods = "pods.eks.amazonaws.com" }
  statement {
    actions = each.key == "node" ? ["sts:AssumeRole"] : ["sts:AssumeRole", "sts:TagSession"]
    principals {
      type        = "Service"
      identifiers = [each.value]
    }
  }
}

resource "aws_iam_role" "cluster" {
  name_prefix        = "${var.name}-cluster-"
  description        = "kvstore: control plane"
  assume_role_policy = data.aws_iam_policy_document.trust["cluster"].json
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "${local.arn}:iam::aws:policy/AmazonEKSClusterPolicy"
}

# For kubelet, network and images; what pods may do comes by Pod Identity. Two roles, since EKS makes the access entry of a
# managed group's role by itself, and that of Karpenter's nodes is ours to make.
resource "aws_iam_role" "node" {
  for_each           = toset(["system", "gpu"])
  name_prefix        = "${var.name}-${each.key}-"
  description        = "kvstore: kubelet, network and images of ${each.key} nodes"
  assume_role_policy = data.aws_iam_policy_document.trust["node"].json
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = {
    for pair in setproduct(keys(aws_iam_role.node), ["AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore"]) :
    "${pair[0]}-${pair[1]}" => { role = pair[0], policy = pair[1] }
  }
  role       = aws_iam_role.node[each.value.role].name
  policy_arn = "${local.arn}:iam::aws:policy/${each.value.policy}"
}

resource "aws_eks_cluster" "this" {
  name                          = var.name
  version                       = var.kubernetes_version
  role_arn                      = aws_iam_role.cluster.arn
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]
  bootstrap_self_managed_addons = false
  deletion_protection           = var.deletion_protection
  tags                          = var.tags

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }
  vpc_config {
    subnet_ids              = values(var.subnet_ids)
    security_group_ids      = [var.node_security_group_id]
    endpoint_private_access = true
    endpoint_public_access  = length(var.public_access_cidrs) > 0
    public_access_cidrs     = length(var.public_access_cidrs) > 0 ? var.public_access_cidrs : null
  }
  kubernetes_network_config {
    service_ipv4_cidr = var.service_cidr
  }
  encryption_config {
    resources = ["secrets"]
    provider {
      key_arn = module.key.arn
    }
  }
  upgrade_policy {
    support_type = "STANDARD"
  }

  depends_on = [aws_iam_role_policy_attachment.cluster, aws_cloudwatch_log_group.cluster]
}

resource "aws_cloudwatch_log_group" "cluster" {
  name              = "/aws/eks/${var.name}/cluster"
  retention_in_days = var.log_days
  kms_key_id        = var.logs_kms_key_arn
  tags              = var.tags
}

resource "aws_eks_access_entry" "admin" {
  for_each      = toset(var.admin_arns)
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value
  tags          = var.tags
}

resource "aws_eks_access_policy_association" "admin" {
  for_each      = toset(var.admin_arns)
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = aws_eks_access_entry.admin[each.key].principal_arn
  policy_arn    = "${local.arn}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  access_scope {
    type = "cluster"
  }
}

resource "aws_eks_access_entry" "node" {
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = aws_iam_role.node["gpu"].arn
  type          = "EC2_LINUX"
  tags          = var.tags
}

# Nodes need network and Pod Identity before they are ready; DNS and the others need nodes.
resource "aws_eks_addon" "before" {
  for_each                    = { for name, version in var.addons : name => version if contains(["vpc-cni", "kube-proxy", "eks-pod-identity-agent"], name) }
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = each.value
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"
  tags                        = var.tags
}

resource "aws_eks_addon" "after" {
  for_each                    = { for name, version in var.addons : name => version if !contains(["vpc-cni", "kube-proxy", "eks-pod-identity-agent"], name) }
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = each.value
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"
  configuration_values        = each.key == "aws-secrets-store-csi-driver-provider" ? local.secrets_driver : null
  tags                        = var.tags
  depends_on                  = [aws_eks_node_group.system]
}

resource "aws_launch_template" "system" {
  name_prefix            = "${var.name}-system-"
  update_default_version = true
  vpc_security_group_ids = [aws_eks_cluster.this.vpc_config[0].cluster_security_group_id, var.node_security_group_id]
  tags                   = var.tags
  # One hop: pods have their own identity and must not take the node's.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = 50
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
}

resource "aws_eks_node_group" "system" {
  cluster_name           = aws_eks_cluster.this.name
  node_group_name_prefix = "system-"
  node_role_arn          = aws_iam_role.node["system"].arn
  subnet_ids             = values(var.subnet_ids)
  ami_type               = "AL2023_x86_64_STANDARD"
  instance_types         = [var.system.instance_type]
  labels                 = { "kvstore/system" = "true" }
  tags                   = var.tags
  launch_template {
    id      = aws_launch_template.system.id
    version = aws_launch_template.system.latest_version
  }
  scaling_config {
    min_size     = 2
    max_size     = var.system.count + 1
    desired_size = var.system.count
  }
  update_config {
    max_unavailable = 1
  }
  depends_on = [aws_iam_role_policy_attachment.node, aws_eks_addon.before]
  lifecycle {
    create_before_destroy = true
    ignore_changes        = [scaling_config[0].desired_size]
  }
}

resource "aws_eks_pod_identity_association" "kvstore" {
  for_each        = { kvstore = var.roles.writer, evictor = var.roles.evictor }
  cluster_name    = aws_eks_cluster.this.name
  namespace       = "kvstore"
  service_account = each.key
  role_arn        = each.value
  tags            = var.tags
}

# ---- logs and metrics of pods

resource "aws_cloudwatch_log_group" "pods" {
  count             = var.container_insights ? 1 : 0
  name              = "/aws/containerinsights/${var.name}/application"
  retention_in_days = var.log_days
  kms_key_id        = var.logs_kms_key_arn
  tags              = var.tags
}

resource "aws_iam_role" "insights" {
  count              = var.container_insights ? 1 : 0
  name_prefix        = "${var.name}-insights-"
  description        = "kvstore: CloudWatch agent"
  assume_role_policy = data.aws_iam_policy_document.trust["pods"].json
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "insights" {
  count      = var.container_insights ? 1 : 0
  role       = aws_iam_role.insights[0].name
  policy_arn = "${local.arn}:iam::aws:policy/CloudWatchAgentServerPolicy"
}

resource "aws_eks_addon" "insights" {
  count                       = var.container_insights ? 1 : 0
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = "amazon-cloudwatch-observability"
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"
  tags                        = var.tags
  pod_identity_association {
    role_arn        = aws_iam_role.insights[0].arn
    service_account = "cloudwatch-agent"
  }
  depends_on = [aws_eks_node_group.system, aws_cloudwatch_log_group.pods]
}
