"""Gain and cost of the shared prefix store, measured on one machine."""
