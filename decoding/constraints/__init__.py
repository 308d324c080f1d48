"""Constraint kinds: one file each; requests choose them by file name, in their structure. See `base`."""
