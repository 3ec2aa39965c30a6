"""What is said about predictions and posteriors: scores, calibration, decisions, evidence, fidelity, pruning."""
