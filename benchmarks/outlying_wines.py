"""Why deep ensembles lose split 10 of wine: the rows of the worst log-likelihood, and what the members say of the first."""

from __future__ import annotations

import torch

from plausible import compare, datasets
from plausible.apps.compare import protocol


def main(split: int = 10) -> None:
    candidate = (
        compare.read("experiments/studies/uci-tuned.toml").candidate("deep ensemble").with_({"epochs": 400, "prior_scale": 0.3})
    )
    table = datasets.uci("wine")
    raw = table.split(split)
    standard = raw.standardised()
    posterior = protocol.train(candidate, standard.train, (50,), 1000 * split)
    predictive = standard.restore(posterior.predict(standard.test[0]))
    density = predictive.log_prob(raw.test[1])
    values, order = density.sort()
    print(f"wine, split {split}: mean log-likelihood {density.mean():.2f}, without the two worst rows {values[2:].mean():.2f}")
    print("the worst rows:", ", ".join(f"{v:.1f}" for v in values[:4]))
    worst = int(order[0])
    x, largest = standard.test[0][worst], standard.train[0].abs().amax(0)
    column = int((x.abs() / largest).argmax())
    print(
        f"{table.features[column]}: {x[column]:.1f} standard deviations from the mean, in training at most {largest[column]:.1f}"
    )
    f = posterior.functions(standard.test[0])[:, worst]
    means, scales = (posterior.model.likelihood(f).mean, posterior.model.likelihood(f).stddev)
    print("members' means:", ", ".join(f"{float(m * standard.y_scale + standard.y_loc):.2f}" for m in means))
    print(
        "members' scales:",
        ", ".join(f"{float(s * standard.y_scale):.4f}" for s in scales),
        f"and the truth {float(raw.test[1][worst]):.0f}",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
