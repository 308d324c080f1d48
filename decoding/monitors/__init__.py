"""Monitors that watch an answer being written and step in, one file each."""
