"""What the shared prefix store gains and costs, measured on one machine."""
