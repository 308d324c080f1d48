"""Turnout: adaptive decoding over a small and a large language model. The kernel package."""

__version__ = "0.1.0"
