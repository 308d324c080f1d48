"""Measurements of the real model that `make real` fetches, in resumable pieces."""
