"""What a forward pass costs: time measured and predicted, memory and bandwidth derived from the model's shape."""
