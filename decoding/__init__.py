"""Decoding methods and the numerics they share: algorithms over tensors and `Model`, no I/O."""
