"""Reports of an experiment: figures with their uncertainty, as one HTML file, as markdown and as JSON."""
