"""Contrasts, one file each: a row is combined from the logits of several streams of one request."""
