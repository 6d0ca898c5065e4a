variables {
  region         = "us-east-1"
  instance_types = ["p5.48xlarge"]
}

run "cards" {
  command = plan
  assert {
    condition     = output.cards["p5.48xlarge"] == 32 && length(output.cards) == 1
    error_message = "a p5.48xlarge has 32 network cards"
  }
}

run "type_added_since" {
  command = plan
  variables {
    instance_types = ["p6-b200.48xlarge"]
    more           = { "p6-b200.48xlarge" = { cards = 8, regions = ["us-east-1"] } }
  }
  assert {
    condition     = output.cards["p6-b200.48xlarge"] == 8
    error_message = "more is not looked at"
  }
}

run "refuses_type_without_efa" {
  command = plan
  variables { instance_types = ["g5.xlarge"] }
  expect_failures = [var.instance_types]
}

run "refuses_region_without_the_type" {
  command = plan
  variables { region = "eu-west-3" }
  expect_failures = [var.instance_types]
}

run "refuses_half_a_card" {
  command = plan
  variables { more = { "x1.large" = { cards = 0.5, regions = [] } } }
  expect_failures = [var.more]
}
