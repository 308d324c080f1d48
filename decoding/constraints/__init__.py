"""Constraints on an answer's text, as a pure function of the tokens so far."""
