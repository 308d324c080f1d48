"""One model at a time: continuous batching, a paged KV cache, and readouts where the logits live. No Ray here."""
