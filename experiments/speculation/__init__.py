"""Speculative methods compared (paper #17, Spec-Bench): every drafter, on six kinds of text, over plain decoding."""
