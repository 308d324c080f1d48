"""Routing policies: one module per policy; it assigns its class to `PART`, and its name is the policy's."""
