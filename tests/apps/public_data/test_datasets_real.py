import gzip
import lzma
import re
import shutil
import tarfile

import numpy as np
import pytest
import torch

import plausible as pl
from plausible import datasets
from plausible.apps.datasets import images, places
from plausible.apps.datasets.catalogue import CATALOGUE, UCI
from plausible.apps.datasets.results import Table

SIZES = {  # rows, inputs, random splits (train, test)
    "boston": (506, 13, 20, 455, 51),
    "concrete": (1030, 8, 20, 927, 103),
    "energy": (768, 8, 20, 691, 77),
    "kin8nm": (8192, 8, 20, 7373, 819),
    "naval": (11934, 16, 20, 10741, 1193),
    "power": (9568, 4, 20, 8611, 957),
    "protein": (45730, 9, 5, 41157, 4573),
    "wine": (1599, 11, 20, 1439, 160),
    "yacht": (308, 6, 20, 277, 31),
}


@pytest.mark.parametrize(
    ("name", "mean", "std", "train", "test"),
    [
        (
            "mnist",
            0.1307,
            0.3081,
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        ("fashion_mnist", 0.2860, 0.3530, [6000] * 10, [1000] * 10),
    ],
)
def test_grey_images_have_the_published_counts_and_moments(data_folder, name, mean, std, train, test):
    data = datasets.load(name, raw=True)
    x, y = data.train
    assert (x.shape, x.dtype, y.dtype) == ((60000, 1, 28, 28), torch.uint8, torch.int64)
    assert data.test[0].shape == (10000, 1, 28, 28)
    assert torch.bincount(y).tolist() == train
    assert torch.bincount(data.test[1]).tolist() == test
    counts = torch.bincount(x.flatten().int(), minlength=256).double() / x.numel()
    levels = torch.arange(256).double() / 255
    found = float(counts @ levels)
    assert found == pytest.approx(mean, abs=6e-5)
    assert float(counts @ (levels - found) ** 2) ** 0.5 == pytest.approx(std, abs=6e-5)
    assert len(data.classes) == 10


def test_pixels_are_scaled_to_one_by_default(data_folder):
    raw, scaled = datasets.fashion_mnist(raw=True).test[0], datasets.fashion_mnist().test[0]
    assert scaled.dtype == torch.float32
    assert (scaled.min(), scaled.max()) == (0, 1)
    assert torch.equal((scaled * 255).round().byte(), raw)


@pytest.mark.slow
def test_cifar10_parts_and_the_reference_of_hmc(data_folder):
    data = datasets.cifar10(raw=True, parts=(1,))
    x, y = data.test
    assert (data.train[0].shape, x.shape, x.dtype) == ((10000, 3, 32, 32), (10000, 3, 32, 32), torch.uint8)
    assert torch.bincount(y).tolist() == [1000] * 10
    means = data.train[0].float().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.005)
    assert data.classes == tuple((data_folder / "cifar10/batches.meta.txt").read_text().split())
    probs = datasets.cifar10_hmc().double()  # the order of rows is that of the labels
    accuracy = (probs.argmax(1) == y).double().mean().item()
    assert accuracy == pytest.approx(0.9144, abs=5e-5)
    assert -probs[torch.arange(10000), y].log().mean().item() == pytest.approx(0.2773, abs=5e-5)


def test_cifar10_names_the_batches_that_are_missing(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAUSIBLE_OFFLINE", "1")
    (cache / "cifar10").mkdir(parents=True)
    for name in ("data_batch_1", "data_batch_4", "test_batch"):
        (cache / "cifar10" / f"{name}.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError) as caught:
        datasets.cifar10()
    message = str(caught.value)
    missing = re.findall(r"cifar10/(\w+)\.bin\.xz", message)
    assert missing == ["data_batch_2", "data_batch_3", "data_batch_5"]
    assert "parts=(1, 4) reads the training batches that are here" in message
    for parts in ((), (0,), (6,), (1, 1)):
        with pytest.raises(ValueError, match="parts must be different numbers"):
            datasets.cifar10(parts=parts)
    with pytest.raises(ValueError, match=r"is damaged .*0 bytes unpacked"):
        datasets.cifar10(parts=(4,))


def member(data_folder, archive, name):
    with tarfile.open(data_folder / archive) as packed:
        return np.loadtxt(packed.extractfile(name))


@pytest.mark.parametrize("name", list(SIZES))
def test_uci_tables_and_splits_are_the_stored_ones(data_folder, name):
    rows, inputs, splits, train, test = SIZES[name]
    table = datasets.uci(name)
    file = CATALOGUE[name].files[0]
    folder = file.name.removesuffix(".tar.gz")
    assert (table.x.shape, table.y.shape, table.x.dtype) == ((rows, inputs), (rows, 1), torch.float32)
    assert (len(table.splits), len(table.gap_splits), len(table.features)) == (splits, inputs, inputs)
    assert CATALOGUE[name].count == rows
    assert table.hidden == member(data_folder, file.path, f"{folder}/data/n_hidden.txt")
    values = member(data_folder, file.path, f"{folder}/data/data.txt")
    np.testing.assert_array_equal(table.x.numpy(), values[:, :inputs].astype(np.float32))
    np.testing.assert_array_equal(table.y[:, 0].numpy(), values[:, inputs].astype(np.float32))
    with tarfile.open(data_folder / file.path) as packed:
        for kind, found in (("data", table.splits), ("gap", table.gap_splits)):
            for number, pair in enumerate(found):
                for part, index in zip(("train", "test"), pair):
                    stored = packed.extractfile(f"{folder}/{kind}/index_{part}_{number}.txt").read().split()
                    assert index.tolist() == [int(float(value)) for value in stored]
    for pair in table.splits:
        assert tuple(map(len, pair)) == (train, test)
        assert torch.cat(pair).sort().values.equal(torch.arange(rows))
    for column, (low_high, middle) in enumerate(table.gap_splits):
        inside = table.x[middle, column]
        outside = table.x[low_high, column]
        assert not bool(((outside > inside.min()) & (outside < inside.max())).any())
        assert len(middle) == pytest.approx(rows / 3, abs=1)
    split = table.split(1)
    assert torch.equal(split.train[0], table.x[table.splits[1][0]])
    assert torch.equal(split.test[1], table.y[table.splits[1][1]])


def test_standardising_uses_the_training_rows_only_and_maps_back(data_folder):
    table = datasets.uci("naval", dtype=torch.float64)
    plain = table.split(3)
    split = plain.standardised()
    x, y = plain.train
    expected = (plain.test[0] - x.mean(0)) / x.std(0, correction=0)
    varying = [column for column in range(16) if column not in (8, 11)]  # two inputs are constant
    torch.testing.assert_close(split.test[0][:, varying], expected[:, varying])
    assert split.x_scale[[8, 11]].tolist() == [1, 1]
    assert torch.equal(split.test[0][:, [8, 11]], torch.zeros(1193, 2, dtype=torch.float64))
    torch.testing.assert_close(split.train[1].mean(), torch.tensor(0.0, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(split.train[1].std(correction=0), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(split.restore(split.test[1]), plain.test[1])
    assert split.standardised() is split
    assert torch.equal(split.restore(split.train[1]).round(decimals=3), y.round(decimals=3))
    assert bool(torch.isfinite(table.gap(8).standardised().train[0]).all())


def test_a_fit_to_a_standardised_split_predicts_in_the_units_of_the_table(data_folder):
    table = datasets.uci("yacht")
    split = table.split(0).standardised()
    posterior = pl.fit(torch.nn.Linear(6, 1), split.train, pl.MAP(epochs=3), progress=False)
    standard, restored = posterior.predict(split.test[0]), split.restore(posterior.predict(split.test[0]))
    torch.testing.assert_close(
        restored.mean.double(), standard.mean.double() * split.y_scale + split.y_loc, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(restored.std.double(), standard.std.double() * split.y_scale, rtol=1e-4, atol=1e-4)
    raw = table.split(0).test[1]
    jacobian = split.y_scale.log().item()
    torch.testing.assert_close(
        restored.log_prob(raw).double(), standard.log_prob(split.test[1]).double() - jacobian, rtol=1e-3, atol=1e-3
    )


def toy_table(x, y, **options):
    return Table("toy", x, y, ("a", "b"), ("c",), **options)


def test_splits_of_ones_own_and_bad_numbers():
    x = torch.arange(20.0).reshape(10, 2)
    table = toy_table(x, x[:, :1], splits=((torch.arange(7), torch.arange(7, 10)),))
    split = table.random_split(0.3, seed=1)
    assert torch.cat([split.train_rows, split.test_rows]).sort().values.equal(torch.arange(10))
    assert len(split.test_rows) == 3
    assert table.random_split(0.3, seed=1).test_rows.equal(split.test_rows)
    assert not table.random_split(0.3, seed=2).test_rows.equal(split.test_rows)
    for bad in (1, -1, 0.0, True, "0"):
        with pytest.raises(ValueError, match="toy has splits 0 to 0, got"):
            table.split(bad)
    with pytest.raises(ValueError, match="toy has no gap splits; use random_split"):
        table.gap(0)
    with pytest.raises(ValueError, match="test_fraction must be between 0 and 1"):
        table.random_split(1.0)


def test_labels_are_not_standardised_and_an_offset_does_not_hide_a_constant():
    x = torch.tensor([[1e8, 0.1], [1e8, 0.3], [1e8, 0.2], [0.0, 9.0]])
    table = toy_table(x, torch.tensor([0, 1, 1, 0]), splits=((torch.arange(3), torch.tensor([3])),))
    split = table.split(0).standardised()
    assert split.train[1].tolist() == [0, 1, 1]
    assert split.train[0][:, 0].tolist() == [0, 0, 0]
    assert split.x_scale[0] == 1
    assert split.train[0][:, 1].double().std(correction=0).item() == pytest.approx(1, rel=1e-6)
    constant = toy_table(torch.full((3, 2), 0.1), torch.ones(3, 1)).random_split(0.3).standardised()
    assert (constant.y_scale, constant.train[1].abs().max()) == (1, 0)


# Text


def test_text_sets_have_the_published_counts(data_folder):
    sst2, trec, sst5 = datasets.sst2(), datasets.trec(), datasets.sst5()
    assert torch.bincount(sst2.train[1]).tolist() == [3310, 3610]
    assert torch.bincount(sst2.validation[1]).tolist() == [428, 444]
    assert torch.bincount(sst2.test[1]).tolist() == [912, 909]
    assert [len(part[0]) for part in (sst5.train, sst5.validation, sst5.test)] == [8544, 1101, 2210]
    assert torch.bincount(trec.train[1]).tolist() == [1162, 1250, 86, 1223, 835, 896]
    assert torch.bincount(trec.test[1]).tolist() == [138, 94, 9, 65, 81, 113]
    assert sst2.validation[0][0] == "one long string of cliches ."
    assert "crème brûlée" in sst2.test[0][1]
    assert trec.test[0][0] == "How far is it from Denver to Aspen ?"
    assert trec.classes[trec.test[1][0]] == "number"
    subj = datasets.subj(test_fraction=0.2, seed=1)
    labels = torch.cat([subj.train[1], subj.test[1]])
    assert torch.bincount(labels).tolist() == [5000, 5000]
    assert len(subj.test[0]) == 2000
    assert subj.test[0] == datasets.subj(0.2, seed=1).test[0] != datasets.subj(0.2, seed=2).test[0]
    assert len(set(subj.test[0] + subj.train[0])) > 9900


@pytest.mark.slow
def test_imdb_has_every_review(data_folder):
    data = datasets.imdb()
    for documents, labels in (data.train, data.test):
        assert torch.bincount(labels).tolist() == [12500, 12500]
        assert len(documents) == 25000
    words = sum(len(document.split()) for document in data.train[0]) / 25000
    assert words == pytest.approx(234, abs=0.6)


def test_words_become_numbers():
    documents = ["It's late.<br />Go now, now!", "go NOW", "a crème brûlée"]
    assert datasets.tokenise(documents[0]) == ["it's", "late", ".", "go", "now", ",", "now", "!"]
    x, vocabulary = datasets.encode(documents, vocabulary_size=5, length=6)
    assert vocabulary.words == ("<padding>", "<unknown>", "now", "go", "!")  # by count, then by the alphabet
    assert x.tolist() == [[1, 1, 1, 3, 2, 1], [3, 2, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert vocabulary.decode(x[1]) == "go now"
    again, same = datasets.encode(["now brûlée"], length=3, vocabulary=vocabulary)
    assert same is vocabulary
    assert again.tolist() == [[2, 1, 0]]
    assert vocabulary.encode([], 4).shape == (0, 4)
    assert len(datasets.Vocabulary.of(documents, 100)) == 2 + 10
    for call, error, words in (
        (lambda: datasets.encode("one text"), TypeError, "documents must be a sequence"),
        (lambda: datasets.encode(documents, vocabulary_size=2), ValueError, "size must be at least 3"),
        (lambda: datasets.encode(documents, length=0), ValueError, "length must be at least 1"),
    ):
        with pytest.raises(error, match=words):
            call()


# Small sets


@pytest.mark.parametrize(
    ("name", "rows", "inputs", "targets"),
    [
        ("lynx", 114, 1, 1),
        ("airquality", 111, 5, 1),
        ("ozone", 330, 9, 1),
        ("auto_fuel", 392, 7, 1),
        ("nlschools", 2287, 5, 1),
        ("mcycle", 133, 1, 1),
        ("galaxies", 82, 0, 1),
        ("co2_monthly", 468, 1, 1),
        ("co2_weekly", 2225, 1, 1),
        ("robot_arm", 600, 2, 2),
        ("neal_regression", 1100, 1, 1),
        ("neal_binary", 1300, 2, None),
        ("neal_classes", 1400, 4, None),
        ("inbetween_axis", 100, 2, 1),
        ("inbetween_origin", 100, 2, 1),
    ],
)
def test_small_sets_have_their_sizes(data_folder, name, rows, inputs, targets):
    table = datasets.small(name)
    assert table.x.shape == (rows, inputs)
    assert table.y.shape == ((rows,) if targets is None else (rows, targets))
    assert (len(table.features), len(table.targets)) == (inputs, targets or 1)
    assert bool(torch.isfinite(table.x).all() and torch.isfinite(table.y).all())
    assert CATALOGUE[name].count == len(datasets.small(name, missing="keep").x)


def test_small_sets_hold_what_their_columns_say(data_folder):
    lynx = datasets.small("lynx")
    assert (lynx.x[0].item(), lynx.y[0].item(), lynx.x[-1].item()) == (1821, 269, 1934)
    air = datasets.small("airquality", missing="keep")
    assert int(torch.isnan(torch.cat([air.x, air.y], 1)).sum()) == 44
    assert air.y[0].item() == 41
    assert air.x[0].tolist() == pytest.approx([190, 7.4, 67, 5, 1])
    weekly = datasets.small("co2_weekly", dtype=torch.float64)
    assert weekly.x[0].item() == pytest.approx(1958 + 87 / 365)  # 29 March is day 88
    assert weekly.y[0].item() == 316.1
    assert weekly.x[-1].item() == pytest.approx(2001 + 362 / 365)
    assert datasets.small("mauna_loa_co2_weekly").name == "co2_weekly"
    assert datasets.small("galaxies").y[77].item() == 26690
    arm = datasets.small("robot_arm", dtype=torch.float64)
    first, both = arm.x[:, 0], arm.x.sum(1)
    place = torch.stack([2 * first.cos() + 1.3 * both.cos(), 2 * first.sin() + 1.3 * both.sin()], 1)
    assert (arm.y - place).std(0).tolist() == pytest.approx([0.05, 0.05], abs=0.006)
    split = arm.split(0)
    assert (len(split.train_rows), len(split.test_rows)) == (200, 400)
    neal = datasets.small("neal_regression", dtype=torch.float64)
    x = neal.x
    noise = neal.y - (0.3 + 0.4 * x + 0.5 * (2.7 * x).sin() + 1.1 / (1 + x**2))
    assert noise.std().item() == pytest.approx(0.1, abs=0.01)
    assert len(neal.split(0).train_rows) == 100
    assert datasets.small("neal_classes").y.unique().tolist() == [0, 1, 2]
    assert datasets.small("neal_binary").y.dtype == torch.int64
    assert torch.equal(datasets.load("mcycle").x[:2, 0], torch.tensor([2.4, 2.6]))
    with pytest.raises(ValueError, match="missing must be"):
        datasets.small("lynx", missing="fill")


# Loading by name


def test_load_is_the_function_of_that_name(data_folder):
    assert torch.equal(datasets.load("bostonHousing").x, datasets.uci("boston").x)
    assert torch.equal(datasets.load("gap", n=5, seed=2)[1], datasets.toys.gap(5, seed=2)[1])
    with pytest.raises(TypeError, match="'boston' has no option 'raw': it takes dtype"):
        datasets.load("boston", raw=True)
    with pytest.raises(TypeError, match="'trec' has no option 'seed': it takes none"):
        datasets.load("trec", seed=1)
    with pytest.raises(ValueError, match="'lynx' is not one of the UCI sets"):
        datasets.uci("lynx")
    with pytest.raises(ValueError, match="'boston' is not one of the small sets"):
        datasets.small("boston")
    assert datasets.available("boston")
    assert datasets.available("gap")
    assert {known.name for known in UCI} == set(SIZES)
    assert isinstance(datasets.uci("yacht").split(0).numpy()[0][0], np.ndarray)
    assert isinstance(datasets.sst2().numpy().train[1], np.ndarray)


def test_every_set_of_the_catalogue_has_a_loader():
    from plausible.apps.datasets.loading import LOADERS

    assert set(LOADERS) == set(CATALOGUE)
    assert "datasets" in dir(pl)
    assert all(hasattr(datasets, name) for name in datasets.__all__)
    with pytest.raises(AttributeError, match="no attribute 'cifar100'"):
        datasets.cifar100  # noqa: B018


# Damaged files


@pytest.mark.parametrize("name", ["mnist", "yacht", "trec", "mcycle", "cifar10_hmc", "imdb", "robot_arm"])
@pytest.mark.parametrize("harm", ["truncated", "garbage", "empty"])
def test_a_damaged_file_is_named(data_folder, cache, monkeypatch, tmp_path, name, harm):
    monkeypatch.setenv("PLAUSIBLE_DATA", str(tmp_path / "data"))
    for file in CATALOGUE[name].files:
        target = tmp_path / "data" / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(data_folder / file.path)
    path = tmp_path / "data" / CATALOGUE[name].files[0].path
    raw = path.read_bytes()
    path.unlink()
    harmed = {"truncated": raw[: len(raw) // 2 + 1], "garbage": b"\x00\xff garbage" * 50, "empty": b""}[harm]
    path.write_bytes(harmed)
    with pytest.raises(ValueError, match=f"is damaged or not the file it should be .*data where {name} --check") as caught:
        datasets.load(name)
    assert str(path) in str(caught.value)


def test_a_file_of_the_wrong_kind_is_refused(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 5)) + bytes(5)))
    assert images.read_idx(path, "mnist", (5,)).tolist() == [0] * 5
    for wrong in ((4,), (6,), (1, 5)):
        with pytest.raises(ValueError, match="not an idx file"):
            images.read_idx(path, "mnist", wrong)


def test_unpacked_files_are_read_too(data_folder, cache):
    raw = lzma.decompress((data_folder / "cifar10/test_batch.bin.xz").read_bytes())
    (cache / "cifar10").mkdir(parents=True)
    (cache / "cifar10/test_batch.bin").write_bytes(raw)
    shutil.copy(cache / "cifar10/test_batch.bin", cache / "cifar10/data_batch_2.bin")
    data = datasets.cifar10(raw=True, parts=(2,))
    assert torch.equal(*(part[0] for part in (data.train, data.test)))
    record = np.frombuffer(raw, np.uint8).reshape(-1, 3073)[7]  # a label, then the planes of red, green and blue
    assert int(data.test[1][7]) == record[0]
    assert data.test[0][7, 1, 2, 3].item() == record[1 + 1024 + 2 * 32 + 3]
    assert places.find(CATALOGUE["cifar10"].files[5]).place == "cache"
