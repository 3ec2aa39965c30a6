"""Text sets, and words → numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import entry
from plausible.apps.datasets.digests import members, reading, unpacked
from plausible.apps.datasets.results import Dataset

TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
BREAK = re.compile(r"<br\s*/?>")
PADDING, UNKNOWN = "<padding>", "<unknown>"


def tokenise(document: str) -> list[str]:
    """Lower-case words and single marks; `<br />` is a blank. "It's late." → `["it's", "late", "."]`."""
    return TOKEN.findall(BREAK.sub(" ", document.lower()))


@dataclass(frozen=True)
class Vocabulary:
    """Words and their numbers: 0 fills up, 1 is any other word, then the most frequent ones."""

    words: tuple[str, ...]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, documents: Iterable[str], size: int) -> Vocabulary:
        """The `size` − 2 most frequent words of these documents, equal counts by the alphabet."""
        if size < 3:
            raise ValueError(f"size must be at least 3 (padding, unknown and a word), got {size}")
        counts = Counter(token for document in documents for token in tokenise(document))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls((PADDING, UNKNOWN, *ranked[: size - 2]))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, documents: Sequence[str], length: int) -> Tensor:
        """The first `length` tokens of each document as numbers, filled up with 0 at the end: int64 `[N, length]`."""
        if isinstance(documents, str):
            raise TypeError("documents must be a sequence of texts, got one text: pass [text]")
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        rows = [[self._numbers.get(token, 1) for token in tokenise(document)[:length]] for document in documents]
        return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64).reshape(-1, length)

    def decode(self, row: Tensor | Sequence[int]) -> str:
        """Numbers → words, without the filling."""
        return " ".join(self.words[number] for number in torch.as_tensor(row).tolist() if number)


def encode(
    documents: Sequence[str], vocabulary_size: int = 10_000, length: int = 200, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Vocabulary]:
    """Documents → int64 `[N, length]` and the vocabulary, of these documents unless one is given.

        x, vocabulary = encode(data.train[0], vocabulary_size=5000, length=100)
        x_test, _ = encode(data.test[0], length=100, vocabulary=vocabulary)

    0 fills up, 1 is a word outside the vocabulary. Cost: one pass over the documents for the counts and one for the numbers.
    """
    vocabulary = vocabulary or Vocabulary.of(documents, vocabulary_size)
    return vocabulary.encode(documents, length), vocabulary


def imdb() -> Dataset:
    """Movie reviews, 0 negative or 1 positive: x a tuple of documents, y int64 `[N]`; 25,000 + 25,000.

    The order is that of the files, by label: shuffle before cutting into batches (`plausible.fit` does).
    """
    parts = []
    for path in ensure(entry("imdb")):
        with reading(path, "imdb"):
            rows = [json.loads(line) for line in unpacked(path).decode("utf-8").split("\n") if line]
            if len(rows) != 25_000:
                raise ValueError(f"{len(rows):,} reviews, expected 25,000")
            parts.append((tuple(row["text"] for row in rows), torch.tensor([row["label"] for row in rows])))
    train, test = parts
    return Dataset("imdb", train, test, classes=("negative", "positive"))


def lines(name: str, encoding: str, sizes: dict[str, int]) -> list[tuple[tuple[str, ...], Tensor]]:
    """The members of a set's archive, `label text` on each line, with the number of lines that each must have."""
    (path,) = ensure(entry(name))
    parts = []
    with reading(path, name):
        files = members(path.read_bytes())
        for member, size in sizes.items():
            rows = [row.split(" ", 1) for row in files[f"{name}/{member}"].decode(encoding).split("\n") if row]
            if len(rows) != size:
                raise ValueError(f"{member} has {len(rows):,} lines, expected {size:,}")
            parts.append((tuple(row[1].strip() for row in rows), torch.tensor([int(row[0]) for row in rows])))
    return parts


def sst2() -> Dataset:
    """Sentences of film reviews, 0 negative or 1 positive; 6,920 for training, 872 for validation, 1,821 for testing."""
    sizes = {"stsa.binary.train": 6920, "stsa.binary.dev": 872, "stsa.binary.test": 1821}
    train, validation, test = lines("sst2", "utf-8", sizes)
    return Dataset("sst2", train, test, validation, ("negative", "positive"))


def sst5() -> Dataset:
    """Sentences of film reviews, 0 very negative to 4 very positive; 8,544 + 1,101 for validation + 2,210."""
    sizes = {"stsa.fine.train": 8544, "stsa.fine.dev": 1101, "stsa.fine.test": 2210}
    train, validation, test = lines("sst5", "utf-8", sizes)
    classes = ("very negative", "negative", "neutral", "positive", "very positive")
    return Dataset("sst5", train, test, validation, classes)


def trec() -> Dataset:
    """Questions by what they ask for, six classes; 5,452 + 500."""
    sizes = {"TREC.train.all": 5452, "TREC.test.all": 500}
    train, test = lines("trec", "latin-1", sizes)
    classes = ("description", "entity", "abbreviation", "human", "location", "number")
    return Dataset("trec", train, test, classes=classes)


def subj(test_fraction: float = 0.1, seed: int = 0) -> Dataset:
    """Subjective (0) and objective (1) sentences, 10,000; there is no fixed split, so that one is drawn from the seed."""
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    ((documents, labels),) = lines("subj", "latin-1", {"subj.all": 10_000})
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(1, round(test_fraction * len(documents)))

    def part(rows: list[int]) -> tuple[tuple[str, ...], Tensor]:
        return tuple(documents[row] for row in rows), labels[rows]

    return Dataset("subj", part(order[count:]), part(order[:count]), classes=("subjective", "objective"))
