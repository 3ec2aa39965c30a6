"""Weights that are distributions: one tensor type, every estimator, any module.

A weight w ~ N(μ, σ²), elementwise, is handed to a network in place of a parameter. With noise ε, ζ ~ N(0, 1) and random signs s:

    weights   w = μ + σ ε                                        one draw of the weights for the whole batch
    local     op(x, w) = op(x, μ) + √op(x², σ²) ζ                one ζ for each output element
    flipout   op(x, w) = op(x, μ) + s_out ∘ op(x ∘ s_in, σ ε)    one ε for all, signs for each example

"Local" is Kingma, Salimans & Welling (2015, "Variational dropout and the local reparameterization trick"), flipout is Wen et al.
(2018, "Flipout: efficient pseudo-independent weight perturbations on mini-batches"). Each gives each output the same mean and
variance; the last two make examples uncorrelated, which lowers the variance of gradients. Both need an `op` that is linear in the
weight: `F.linear`, convolutions and transposed convolutions of 1 to 3 dimensions. `op` has the bias in it, random or not.

`gaussian` gives a tensor that carries μ and σ and answers `__torch_function__`, so that any module runs unchanged, in eager mode,
under `torch.func` and in `torch.compile(fullgraph=True)`. Anywhere but in those operations (embeddings, norms, recurrent nets,
attention, arithmetic) the weight is sampled, once for all its uses. Its own storage holds NaN: code that reads it past
`__torch_function__` does not get a silent mean. Independent noise for each use would be wrong for a weight that is used twice,
and at the first use nobody knows of the second. `survey` finds out beforehand:

    ways = survey(lambda weights: call(network, weights, x), means, "local")  # once
    noise = Noise(key, counter)  # for each forward pass
    outputs = call(network, gaussians(means, scales, noise, ways), x)

Cost of a layer: one `op` for weights, two for local and flipout, and their noise: see `plausible.random`.
"""

from __future__ import annotations

from .noise import Noise
from .tensors import ESTIMATORS, FALLBACK, Gaussian, gaussian, gaussians, log_density, survey

__all__ = ["ESTIMATORS", "FALLBACK", "Gaussian", "Noise", "gaussian", "gaussians", "log_density", "survey"]
