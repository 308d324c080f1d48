"""The store of KV prefixes that tenants, replicas and restarts share: host memory and Redis."""
