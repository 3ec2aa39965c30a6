"""The part of the catalogue with toy problems, which are made and not read."""

from __future__ import annotations

from plausible.apps.datasets.entries import Entry

TOYS = tuple(
    Entry(name, task, examples, description, "", citation)
    for name, task, examples, description, citation in (
        (
            "blundell",
            "regression",
            "1,000",
            "a wavy curve whose noise also shifts the waves; nothing beyond x = 0.5",
            "Blundell, Cornebise, Kavukcuoglu, Wierstra 2015, Weight uncertainty in neural networks",
        ),
        ("two_moons", "classes", "200", "two interleaved half circles", ""),
        ("gap", "regression", "100", "a sine seen on two sides of a gap", ""),
        (
            "heteroscedastic",
            "regression",
            "750",
            "a sine whose noise depends on the input",
            "Depeweg, Hernández-Lobato, Doshi-Velez, Udluft 2018, Decomposition of uncertainty",
        ),
        (
            "tied_means",
            "density",
            "100",
            "a posterior over two parameters with two modes",
            "Welling and Teh 2011, Bayesian learning via stochastic gradient Langevin dynamics",
        ),
        (
            "gaussians25",
            "density",
            "",
            "25 Gaussians on a grid: a density with far modes, and exact draws",
            "Zhang, Li, Zhang, Chen, Wilson 2020, Cyclical stochastic gradient MCMC",
        ),
    )
)
