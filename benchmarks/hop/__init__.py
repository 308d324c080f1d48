"""What `bench_hop` measures of remote models."""
