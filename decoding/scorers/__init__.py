"""Scorers: how good a drafted step is, and how likely it stays (`step_speculation`). One file each."""
