"""Comparisons of decoding methods: what runs, what is measured, how sure one may be."""
