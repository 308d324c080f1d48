"""Whose entries are whose: namespaces, registered prefixes, quotas and accounts."""
