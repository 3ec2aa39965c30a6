"""Averages along the path of stochastic gradient descent."""
