"""Quality against cost over prompts of many kinds, beside random choices and an oracle."""
