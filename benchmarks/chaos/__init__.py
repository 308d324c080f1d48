"""A cluster under load whose parts are killed at random: what its clients see, and what is left afterwards."""
