"""Dropout as Bayes: noise on the inputs of layers, or on each weight, whose law is given or learned."""
