"""What everything is made of: weights, data, networks, the model (likelihood + prior), randomness, numbers that change by step."""
