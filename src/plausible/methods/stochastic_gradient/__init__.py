"""Chains driven by minibatch gradients."""
