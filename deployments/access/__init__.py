"""Tenants: who calls, what they may do, and what they used."""
