"""Pools of which some models are OpenAI-compatible servers elsewhere."""
