"""A method that chooses a method."""
