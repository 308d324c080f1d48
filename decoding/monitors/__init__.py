"""Monitors: when to put words into an answer that any method writes (`monitored`). One file each."""
