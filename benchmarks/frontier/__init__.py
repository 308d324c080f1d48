"""Quality against cost over prompts of many kinds, compared with random choices and an oracle."""
