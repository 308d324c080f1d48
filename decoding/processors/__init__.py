"""Logits processors: one file each; requests choose them by file name, in `processors`. See `base`."""
