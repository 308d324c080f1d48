"""The KV cache of one model: blocks, who holds them, and where a token's keys and values lie."""
