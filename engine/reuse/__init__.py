"""KV of tokens that stood elsewhere: found by likeness, moved to new positions, recomputed where it matters."""
