"""The same pool in one process and in actors."""
