output "bucket" {
  description = "Name of the S3 bucket."
  value       = aws_s3_bucket.this.bucket
}

output "bucket_arn" {
  description = "ARN of the S3 bucket."
  value       = aws_s3_bucket.this.arn
}

output "express_buckets" {
  description = "Zone id to name of the directory bucket there."
  value       = { for z, b in aws_s3_directory_bucket.this : z => b.bucket }
}

output "express_bucket_arns" {
  description = "Zone id to ARN of the directory bucket there."
  value       = { for z, b in aws_s3_directory_bucket.this : z => b.arn }
}

output "kms_key_arn" {
  description = "KMS key of all buckets."
  value       = module.key.arn
}

output "metrics_filter_id" {
  description = "FilterId of the bucket's request metrics in CloudWatch (AWS/S3: 5xxErrors, FirstByteLatency)."
  value       = aws_s3_bucket_metric.all.name
}
