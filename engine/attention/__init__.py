"""Attention over the block pool: what a ragged batch looks like, and how it is computed."""
