"""Measurements of speed, endurance and of other engines; nothing that ships imports them."""
