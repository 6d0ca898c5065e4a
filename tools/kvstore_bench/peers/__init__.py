"""Other people's code, for `kvstore-bench compare`. `child` runs in their interpreter, `process` in ours."""
