"""The way to Redis: connections with total deadlines, nodes and their breakers, one byte store over all of them."""
