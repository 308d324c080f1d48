"""Searches: which continuations of a prompt are followed, and which are its answers (`search`). One file each."""
