output "vpc_id" {
  description = "Id of the VPC."
  value       = aws_vpc.this.id
}

output "private_subnet_ids" {
  description = "Zone id to private subnet id."
  value       = { for z, s in aws_subnet.private : z => s.id }
}

output "public_subnet_ids" {
  description = "Zone id to public subnet id; empty where there are none."
  value       = { for z, s in aws_subnet.public : z => s.id }
}

output "node_security_group_id" {
  description = "Security group of the nodes: everything among themselves (EFA needs that), allowed_ports from allowed_cidrs."
  value       = aws_security_group.node.id
}

output "zone_names" {
  description = "Zone id to this account's name of the zone."
  value       = { for z, s in aws_subnet.private : z => s.availability_zone }
}

output "s3_endpoint_id" {
  description = "Gateway endpoint of S3."
  value       = aws_vpc_endpoint.s3.id
}

output "s3express_endpoint_id" {
  description = "Gateway endpoint of S3 Express, or null."
  value       = one(aws_vpc_endpoint.s3express[*].id)
}
