"""Foreign evaluation and load tools, unmodified, against a served demo pair."""
