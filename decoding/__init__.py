"""Decoding methods and the numerics they share: algorithms over tensors and the `Model` protocol, no I/O."""
