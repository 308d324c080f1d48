"""Verifiers: which proposed tokens stay, and so which law the answer follows. One file each."""
