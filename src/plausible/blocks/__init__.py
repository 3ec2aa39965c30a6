"""What methods are assembled from: stochastic tensors, curvature, moments, families, the parts of chains, generated kernels."""
