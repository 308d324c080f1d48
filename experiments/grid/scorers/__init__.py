"""Ways to score an answer: a module each, named as its kind, that assigns its class to `SCORER`."""
