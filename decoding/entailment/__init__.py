"""Entailment judges: whether one answer to a question implies another (`semantic_entropy`). One file each."""
