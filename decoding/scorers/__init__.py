"""Scorers of drafted reasoning steps, one file each."""
