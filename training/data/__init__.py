"""Generated problems and Python sources that the demo models are trained on."""
