"""Tasks of permuted images, pieces of reviews, a transformer that does not see the filling, and what is read off stored results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import plausible as pl
from experiments import adapters, load, permuted_mnist
from experiments.frame import Request

pytestmark = pytest.mark.slow


def test_tasks_are_permutations_of_the_pixels_one_for_all_images() -> None:
    first, again, other = (permuted_mnist.orders(3, seed) for seed in (0, 0, 1))
    assert all(torch.equal(order.sort().values, torch.arange(784)) for order in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, other))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(permuted_mnist.orders(5, 0)[2], first[2])  # more tasks begin with the same ones


ACCURACY = {"accuracy": [[[90.0], [80.0, 92.0]], [[88.0], [70.0, 90.0]]]}


def test_averages_and_losses_are_read_off_by_seed() -> None:
    results = {"kronecker": ACCURACY}
    assert permuted_mnist.average("kronecker")(results) == [86.0, 80.0]
    assert permuted_mnist.lost("kronecker")(results) == [10.0, 18.0]
    assert permuted_mnist.average("diagonal")(results) is None
    after, at_end = permuted_mnist.table(results)
    assert [row[1][:2] for row in (after.rows[0], at_end.rows[0])] == ["89", "75"]


def test_the_prior_is_carried_on_where_it_should_be(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(module, data, method, **options):
        asked.append((options["prior"], options["init"], len(data[1])))
        return pl.fit(module, data, method, **options)

    monkeypatch.setattr(permuted_mnist, "fit", noted)
    request = Request(seeds=1, device="cpu", progress=False)
    for name in ("fine-tuning", "kronecker", "together"):
        settings = load("permuted-mnist").cell(name).settings["tiny"]
        found = permuted_mnist.run(settings, request)
        assert [len(after) for after in found["accuracy"][0]] == [1, 2]
    (tuned, kept), (fresh, carried), (_, all_) = zip(asked[::2], asked[1::2])
    assert kept[0] == tuned[0] == fresh[0] == pl.priors.Gaussian(1.0)
    assert isinstance(carried[0], pl.priors.Earlier)
    assert carried[0].law is carried[1].as_gaussian()
    assert tuned[1] is None
    assert kept[1] is not None
    assert (kept[2], carried[2], all_[2]) == (200, 200, 400)


# Adapters


def transformer() -> adapters.Transformer:
    torch.manual_seed(0)
    return adapters.Transformer(words=30, length=12, width=8, heads=2, blocks=2).eval()


def test_filling_changes_nothing() -> None:
    network = transformer()
    numbers = torch.randint(1, 30, (4, 7), generator=torch.Generator().manual_seed(1))
    filled = torch.nn.functional.pad(numbers, (0, 5))
    torch.testing.assert_close(network(filled), network(numbers))
    swapped = numbers.flip(1)
    assert not torch.allclose(network(swapped), network(numbers), atol=1e-4)  # places count


def test_adapters_are_the_projections_of_all_blocks() -> None:
    adapted = pl.adapters.lora(transformer(), 2, "blocks.*", train="head.*")
    names = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    layers = {name.rpartition(".")[0] for name in names if name.endswith(".down")}
    kinds = ("query", "key", "value", "out", "widen", "narrow")
    assert layers == {f"blocks.{k}.{kind}" for k in range(2) for kind in kinds}
    assert names - {f"{layer}.{side}" for layer in layers for side in ("down", "up")} == {"head.weight", "head.bias"}


def test_pieces_have_the_words_and_the_label_of_their_review(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = (" ".join(f"a{i}" for i in range(20)), " ".join(f"b{i}" for i in range(9)), "short one")
    made = pl.datasets.Dataset("imdb", (texts, torch.tensor([1, 0, 1])), ((), torch.tensor([])))
    monkeypatch.setattr(adapters.datasets, "imdb", lambda: made)
    settings = replace(adapters.SETTINGS["tiny"], length=10, read=30, vocabulary=100)
    vocabulary, (x, y) = adapters.reviews(settings)
    found = sorted((vocabulary.decode(row), int(label)) for row, label in zip(x, y))
    whole = texts[0].split()
    assert found == sorted([(" ".join(whole[:10]), 1), (" ".join(whole[10:]), 1), (texts[1], 0)])


def test_scores_are_those_of_the_predictions(tiny: Callable[[str], Path]) -> None:
    result = json.loads((tiny("laplace-lora") / "laplace-lora/tiny/sst2.json").read_text())
    assert set(result["scores"]) == set(adapters.WORDS)
    for scores in result["scores"].values():
        for ece, bins, accuracy in zip(scores["ece"], scores["bins"], scores["accuracy"]):
            confidence, right, counts = (torch.tensor([v or 0.0 for v in column]) for column in bins)
            assert float((counts * right).sum() / counts.sum()) == pytest.approx(accuracy / 100, abs=1e-4)
            gap = abs(float((counts * (confidence - right)).sum() / counts.sum()))
            assert gap <= ece / 100 + 1e-4  # one bin sees no more than many
    assert result["weights"]["adapters"] == sum(2 * (a + b) for a, b in [(8, 8)] * 4 + [(8, 16)] * 2)
    assert adapters.change("adapters", "ece")({"sst2": result}) == pytest.approx(
        [a - b for a, b in zip(result["scores"]["adapters"]["ece"], result["scores"]["point"]["ece"])]
    )
