"""Independent Gaussians by natural gradients."""
