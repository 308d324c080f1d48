"""Learned difficulty: what a small network reads off the small model after the prompt, and what it predicts."""
