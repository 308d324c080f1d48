"""Grammars that llguidance follows: what constraint kinds compile to, and JSON schemas as it takes them."""
