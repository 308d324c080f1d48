"""Measurements of remote models for `bench_hop`."""
