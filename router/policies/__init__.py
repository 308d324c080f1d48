"""Routing policies: what answers a request that names no method. One file each."""
