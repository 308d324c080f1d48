"""Uncertainty: how much a model doubts its answer (`abstain`, `cascade`). One file each."""
