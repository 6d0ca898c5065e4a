# Model and cache configuration, in Secrets Manager: nodes read it when they start, so a change needs no new image.

resource "aws_secretsmanager_secret" "config" {
  name_prefix             = "${var.name}/config-"
  description             = "kvstore: configuration of engines and node, and the model (no secrets in it)"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.recovery_days
  tags                    = var.tags
}

resource "aws_secretsmanager_secret_version" "config" {
  secret_id = aws_secretsmanager_secret.config.id
  secret_string = jsonencode({
    config_yaml = var.config_yaml
    node_yaml   = var.node_yaml
    model       = var.model
  })
}

# The token is made anew in every run and stored only when its version changes; it is in no state and no plan.
ephemeral "random_password" "node" {
  length  = 48
  special = false
}

resource "aws_secretsmanager_secret" "node_token" {
  count                   = var.node_token ? 1 : 0
  name_prefix             = "${var.name}/node-token-"
  description             = "kvstore: token of the nodes"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.recovery_days
  tags                    = var.tags
}

resource "aws_secretsmanager_secret_version" "node_token" {
  count                    = var.node_token ? 1 : 0
  secret_id                = aws_secretsmanager_secret.node_token[0].id
  secret_string_wo         = ephemeral.random_password.node.result
  secret_string_wo_version = var.node_token_version
}
