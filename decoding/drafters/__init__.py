"""Drafters: which tokens `speculative` proposes, as a tree. One file each."""
