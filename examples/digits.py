"""An ensemble on the handwritten digits that come with scikit-learn, and the images that it is least certain about.

Run: python examples/digits.py [--quick]. Needs the extra `sklearn`. Writes digits.png where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import plausible as pl


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(digits)  # integers: the likelihood is Categorical
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1000], order[1000:]
    return x[train], y[train], x[test], y[test]


def picture(pixels: Tensor) -> list[str]:
    """An 8 × 8 image as text."""
    shades = " .:-=+*#%@"
    return ["".join(2 * shades[int(9 * value)] for value in row) for row in pixels.reshape(8, 8)]


def plot(images: Tensor, captions: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(images), figsize=(2 * len(images), 2.4), layout="constrained")
    for axis, image, caption in zip(axes, images, captions):
        axis.imshow(image.reshape(8, 8).numpy(), cmap="gray_r")
        axis.set_title(caption, fontsize=8)
        axis.axis("off")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(quick: bool = False) -> None:
    x, y, x_test, y_test = data()
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    method = pl.Ensemble(pl.MAP(epochs=2 if quick else 30, batch_size=100, lr=0.01), members=5)
    posterior = pl.fit(net, (x, y), method, seed=0)

    pred = posterior.predict(x_test)
    guess = pred.probs.argmax(-1)
    certain = pred.entropy < pred.entropy.median()
    print(f"{len(x_test)} test images, 5 members")
    print(f"log-likelihood {pred.log_prob(y_test).mean():.3f} nats per image")
    print(f"accuracy {(guess == y_test).float().mean():.3f}")
    print(f"accuracy of the half with the lower entropy {(guess == y_test)[certain].float().mean():.3f}")

    worst = pred.entropy.argsort(descending=True)[:5]
    captions = []
    for i in worst.tolist():
        best = pred.probs[i].topk(2)
        captions.append(
            f"is {y_test[i]}; " + ", ".join(f"{c}: {p:.0%}" for c, p in zip(best.indices.tolist(), best.values.tolist()))
        )
    print("\nleast certain: the true digit; the two most probable ones")
    for i, caption in list(zip(worst.tolist(), captions))[:2]:
        print(caption, *picture(x_test[i]), sep="\n")
    if importlib.util.find_spec("matplotlib"):
        plot(x_test[worst], captions, Path("digits.png"))


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
