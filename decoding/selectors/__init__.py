"""Selectors: which drafter of a request drafts a round. One file each."""
