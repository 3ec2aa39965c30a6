"""One point: maximum a posteriori."""
