"""Whole decoding programs, one file each; the registry finds them by file name."""
