"""Speed, measured apart from the tests: each prints p50, p90, p99 and n, and the command that gave them."""
