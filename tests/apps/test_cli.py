import csv
import io
import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import plausible as pl
from plausible import metrics
from plausible.apps import assembling, files, preparing, responses
from plausible.apps.cli import app, prediction
from plausible.apps.tables import Table

FAST = ("--epochs", "2", "--hidden", "5", "--quiet")
MORE = ("--epochs", "60", "--lr", "0.02")


def plausible(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def error_of(result, code=1):
    """The one line a user's error prints."""
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("plausible: error: ")
    assert "Traceback" not in result.output
    return lines[0]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def houses(rows=60, seed=0, gaps=False):
    rng = np.random.default_rng(seed)
    lines = ["area,rooms,city,price"]
    for row in range(rows):
        area, rooms, city = rng.uniform(30, 200), rng.integers(1, 6), rng.choice(["Bern", "Basel", "Chur"])
        price = 1000 + 3 * area + 20 * rooms + 50 * (city == "Bern") + rng.normal(0, 10)
        shown = "" if gaps and row % 5 == 0 else f"{area:.1f}"
        lines.append(f"{shown},{rooms},{'NA' if gaps and row % 7 == 0 else city},{price:.2f}")
    return "\n".join(lines) + "\n"


def flowers(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["iris", "lily", "rose, wild"], rows)
    centre = {"iris": -2.0, "lily": 0.0, "rose, wild": 2.0}
    lines = [f'{centre[kind] + rng.normal(0, 0.3):.3f},{rng.normal():.3f},"{kind}"' for kind in kinds]
    return "width,noise,kind\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def regression(folder):
    data = write(folder / "houses.csv", houses())
    fitted = plausible("fit", data, "--target", "price", "-m", "ensemble", "--out", folder / "houses", *MORE)
    assert fitted.exit_code == 0, fitted.output
    return folder / "houses", fitted


@pytest.fixture(scope="module")
def classification(folder):
    data = write(folder / "flowers.csv", flowers())
    fitted = plausible("fit", data, "--target", "kind", "-m", "ensemble", "--out", folder / "flowers", *MORE)
    assert fitted.exit_code == 0, fitted.output
    return folder / "flowers", fitted


# scores


def test_scores_of_a_gaussian_mixture_in_closed_form():
    outputs = torch.tensor([[[0.0], [1.0]], [[2.0], [1.0]]])  # two draws, two rows
    predictive = pl.Predictive.from_functions(outputs, pl.likelihoods.Gaussian(2.0))
    y = torch.tensor([[0.5], [3.0]])

    def density(y, mean):
        return math.exp(-0.5 * ((y - mean) / 2) ** 2) / (2 * math.sqrt(2 * math.pi))

    expected = [math.log(0.5 * density(0.5, 0) + 0.5 * density(0.5, 2)), math.log(density(3, 1))]
    assert metrics.log_likelihood(predictive, y) == pytest.approx(sum(expected) / 2, rel=1e-5)
    found = prediction.held_out(responses.Response(("y",), "gaussian"), predictive, y)
    assert found["targets"]["y"]["rmse"] == pytest.approx(math.sqrt((0.25 + 4) / 2))
    assert found["targets"]["y"]["mae"] == pytest.approx(1.25)
    assert found["targets"]["y"]["coverage_90"] == 1.0
    far = prediction.held_out(responses.Response(("y",), "gaussian"), predictive, torch.tensor([[0.5], [1 + 2 * 1.65]]))
    assert far["targets"]["y"]["coverage_90"] == 0.5  # the second is N(1, 2²), and 1.65 > 1.645


def test_scores_of_yes_and_no_targets():
    logits = torch.tensor([[[0.0, math.log(3)], [math.log(4), 0.0]]])  # p = 1/2, 3/4; 4/5, 1/2
    predictive = pl.Predictive.from_functions(logits, pl.likelihoods.Bernoulli())
    target = responses.Response(("a", "b"), "bernoulli", classes=(("no", "yes"), ("0", "1")))
    found = prediction.held_out(target, predictive, torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    assert found["log_likelihood"] == pytest.approx((math.log(1 / 2 * 3 / 4) + math.log(4 / 5 * 1 / 2)) / 2, rel=1e-5)
    assert found["targets"]["a"]["brier"] == pytest.approx((2 * 0.25 + 2 * 0.04) / 2, rel=1e-5)


# reading and writing


def test_csv_quotes_blanks_delimiters_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffname ; "a;b"\r\n "x ""y""";1 \r\n\r\nz;?\r\n;\r\n'.encode())
    table = files.read_table(path)
    assert {name: column.cells for name, column in table.columns.items()} == {"name": ('x "y"', "z"), "a;b": ("1", None)}


def test_decimal_commas_where_the_comma_is_free(tmp_path):
    write(tmp_path / "a.csv", "x;thousands;text\n1,5;1,234;a,5\n-2;5,678;1,5\n;1,000;2\n")
    columns = files.read_table(tmp_path / "a.csv").columns
    assert columns["x"].cells == ("1.5", "-2", None)
    assert columns["thousands"].kind == columns["text"].kind == "text"


def test_marks_between_thousands(tmp_path):
    write(
        tmp_path / "a.csv",
        'price,other,code,date\n"1,234.5",1 234,"1,23",2024-01-05\n-12,-5,"1,234",2024-01-06\n"1,234,567",,7,x\n',
    )
    columns = files.read_table(tmp_path / "a.csv").columns
    assert columns["price"].cells == ("1234.5", "-12", "1234567")
    assert columns["other"].cells == ("1234", "-5", None)
    assert columns["date"].kind == "text"
    assert columns["code"].cells == ("1.23", "1.234", "7")  # 1,23 is no thousand, so these are decimal commas


def test_tsv_and_parquet_read_like_csv(tmp_path):
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": [1, 2, None], "b": [0.5, float("nan"), 2.0], "c": ["x", None, "y"]})
    frame.write_parquet(tmp_path / "t.parquet")
    write(tmp_path / "t.tsv", "a\tb\tc\n1\t0.5\tx\n2\t\t\n\t2.0\ty\n")
    read = [files.read_table(tmp_path / name).columns for name in ("t.parquet", "t.tsv")]
    assert read[0] == read[1]
    assert read[0]["a"].kind == "integer"


def test_write_leaves_no_pieces(tmp_path):
    files.write_table(tmp_path / "new" / "out.csv", {"a": [0.1, None], "b,c": ["x", "y"]})
    assert (tmp_path / "new" / "out.csv").read_text() == 'a,"b,c"\n0.1,x\n,y\n'
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.csv"]


BROKEN = {
    "empty": (b"", "is empty"),
    "blank": (b"\n\n", "is empty"),
    "header": (b"a,price\n", "has a header but no rows"),
    "twice": (b"a,a,price\n1,2,3\n", "same name: a"),
    "ragged": (b"a,price\n1,2\n1,2,3\n", "line 3: 3 cells, but the header has 2 columns"),
    "latin": (
        "städte,price\n1,2\n".encode("latin1"),
        "not UTF-8 text (byte 0xe4 in line 1); if it is Latin-1, add --encoding latin-1",
    ),
    "utf16": ("a,price\n1,2\n".encode("utf-16"), "is UTF-16"),
    "binary": (b"a,price\n\x00,2\n", "zero bytes"),
    "quote": (b'a,price\n"1,2\n', "not a readable CSV file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_line(name, tmp_path):
    content, message = BROKEN[name]
    (tmp_path / "data.csv").write_bytes(content)
    found = error_of(plausible("fit", tmp_path / "data.csv", "-t", "price", "-o", tmp_path / "run", "-m", "map", *FAST))
    assert message in found
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


# what the target is


def decide(cells, task="auto", likelihood="auto"):
    return responses.decide(Table.from_values({"y": cells}), ["y"], task, likelihood)


@pytest.mark.parametrize(
    ("cells", "task", "noted"),
    [
        (["a", "b"] * 3, "classification", False),
        ([True, False] * 3, "classification", False),
        (list(range(20)) * 2, "classification", True),
        (list(range(21)) * 2, "regression", False),
        ([0.5 * i for i in range(30)], "regression", False),
        ([1.0, 2.0] * 3, "regression", True),
    ],
)
def test_the_rule_for_the_task(cells, task, noted):
    target, notes = decide(cells)
    assert target.task == task
    assert bool(notes) == noted
    assert all("--task" in line for line in notes)


def test_task_and_likelihood_overrule():
    assert decide([1, 2, 3] * 2, task="regression")[0].likelihood == "gaussian"
    assert decide([1, 2, 3] * 2, likelihood="poisson")[0].likelihood == "poisson"
    assert decide([1.5, 2.5] * 2, task="classification")[0].classes == (("1.5", "2.5"),)
    assert decide([0, 1] * 2, likelihood="bernoulli")[0].outputs == 1
    assert decide([10, 9, 10, 9])[0].classes == (("9", "10"),)
    assert decide([3, 5, 4, 6, 8, 3])[0].task == "regression"  # five values in six rows tell no classes apart
    assert decide(["2024-01-05", "2024-02-01"] * 2, task="classification")[0].outputs == 2


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        (["a", "a"], {}, "the same value in every row ('a')"),
        (["2024-01-05", "2024-02-01"] * 2, {}, "holds dates, which are neither numbers nor classes; turn them into numbers"),
        ([5.5, 5.5], {}, "is constant"),
        (["1", "2.5", "x3", "4"], {}, "mostly numbers, but row 3 is 'x3'"),
        (["a", "b"], {"task": "regression"}, "must hold numbers for regression, but row 1 is 'a'"),
        ([1, 2, 3] * 2, {"likelihood": "bernoulli"}, "two classes per target"),
        ([1, -2, 3] * 2, {"likelihood": "poisson"}, "needs counts (0, 1, 2, …), but row 2"),
        ([f"n{i}" for i in range(9)], {}, "9 classes in 9 rows"),
        ([1, 2], {"task": "regression", "likelihood": "categorical"}, "leave one of them out"),
    ],
)
def test_targets_that_cannot_be(cells, options, message):
    with pytest.raises(ValueError) as caught:
        decide(cells, **options)
    assert message in str(caught.value)


def test_standardised_targets_come_from_the_training_rows():
    table = Table.from_values({"y": [1.0, 3.0, 100.0]})
    target = responses.standardised(responses.Response(("y",), "gaussian"), table.take(np.array([0, 1])))
    np.testing.assert_allclose(target.encode(table)[:, 0], [-1, 1, 98])
    assert responses.Response.from_dict(json.loads(json.dumps(target.to_dict()))) == target


# methods by words


def test_settings_reach_the_method_inside():
    made = assembling.build("ensemble", {"epochs": 3, "lr": None}, ["members=2", "optimiser=sgd"])
    assert (made.members, made.method.epochs, type(made.method.optimiser).__name__) == (2, 3, "SGD")
    chains = assembling.build("ensemble", {"epochs": 3}, ["method=sgld", "method.temperature=0.5", "init=prior"])
    assert (type(chains.method).__name__, chains.method.temperature, chains.init) == ("SGLD", 0.5, "prior")
    plain = assembling.build("map", {}, ["batch-size=none", 'lr={"type": "schedules.Constant", "value": 0.1}'])
    assert plain.batch_size is None
    assert type(plain.lr).__name__ == "Constant"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "ensembel"), "did you mean 'ensemble'?"),
        (("--epochs", "-3"), "epochs must be at least 1, got -3"),
        (("--lr", "-0.1"), "lr"),
        (("--set", "member=3"), "no setting 'member' (did you mean 'members'?)"),
        (("--set", "members"), "--set takes key=value, got 'members'"),
        (("--set", "epochs=3"), "given twice"),
        (("--batch-size", "1000"), "batch_size=1000 is larger than the data"),
        (("--prior-scale", "0"), "--prior-scale must be positive"),
        (("--hidden", "5,x"), "--hidden takes layer widths"),
        (("--test-fraction", "1"), "--test-fraction"),
        (("--target", "prise"), "did you mean 'price'?"),
        (("--target", "price"), "names a column twice"),
        (("--drop-columns", "zip"), "no column 'zip'"),
        (("--drop-columns", "area,rooms,city"), "no input columns besides the target"),
        (("--drop-columns", "price"), "both --target and in --drop-columns"),
        (("--resume", "--no-checkpoint"), "--resume needs the checkpoint"),
        (
            ("--method", "auto"),
            "--epochs is for a method that is named, such as --method ensemble; auto chooses its own by --time",
        ),
        (("--time", "60s"), "--time is for --method auto, which chooses by it; ensemble runs as long as its settings say"),
        (("--encoding", "latin-99"), "--encoding latin-99 is not known"),
    ],
)
def test_mistakes_in_the_options_are_one_line(arguments, message, tmp_path):
    data = write(tmp_path / "data.csv", houses(20))
    options = ("-m", "ensemble") if "--epochs" in arguments else ("-m", "ensemble", "--epochs", 2)
    result = plausible("fit", data, "-t", "price", "-o", tmp_path / "run", "--hidden", 5, "-q", *options, *arguments)
    assert message in error_of(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv"]


# fit


def test_fit_prints_scores_and_writes_a_run(regression):
    run, fitted = regression
    assert sorted(path.name for path in run.iterdir()) == [
        "evidence.json",
        "evidence.safetensors",
        "heldout.csv",
        "metrics.json",
        "posterior",
        "run.json",
    ]
    assert not run.with_name("houses.checkpoint").exists()
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["rows"] == 6
    for words in ("log-likelihood", "RMSE", "MAE", "90 % interval", "6 held-out rows"):
        assert words in fitted.stdout
    record = json.loads((run / "run.json").read_text())
    assert record["network"] == {
        "inputs": ["area", "rooms", "city=Basel", "city=Bern", "city=Chur"],
        "hidden": [50, 50],
        "outputs": 1,
        "activation": "relu",
    }


def test_scores_are_in_original_units_and_learned(regression):
    run, _ = regression
    metrics = json.loads((run / "metrics.json").read_text())["targets"]["price"]
    rows = read(run / "heldout.csv")
    errors = [float(row["mean"]) - float(row["actual_price"]) for row in rows]
    assert metrics["rmse"] == pytest.approx(math.sqrt(np.mean(np.square(errors))), rel=1e-4)
    spread = np.std([float(row["price"]) for row in read(run.with_suffix(".csv"))])
    assert metrics["rmse"] < 0.5 * spread
    source = read(run.with_suffix(".csv"))
    assert all(source[int(row["row"]) - 1]["price"] == row["actual_price"] for row in rows)


def test_log_likelihood_carries_the_units(tmp_path):
    # y in other units: z is the same, so log p(1000 y) = log p(y) − log 1000 exactly
    data = write(tmp_path / "a.csv", houses(30))
    scaled = [f"{row['area']},{row['rooms']},{row['city']},{float(row['price']) * 1000:.2f}" for row in read(data)]
    write(tmp_path / "b.csv", "area,rooms,city,price\n" + "\n".join(scaled) + "\n")
    found = []
    for name in "ab":
        run = tmp_path / name
        assert plausible("fit", f"{run}.csv", "-t", "price", "-o", run, "-m", "map", *FAST).exit_code == 0
        found.append(json.loads((run / "metrics.json").read_text()))
    assert found[0]["log_likelihood"] - found[1]["log_likelihood"] == pytest.approx(math.log(1000), abs=1e-3)
    assert found[1]["targets"]["price"]["rmse"] == pytest.approx(1000 * found[0]["targets"]["price"]["rmse"], rel=1e-3)


def test_same_seed_same_run_and_another_seed_differs(tmp_path):
    data = write(tmp_path / "data.csv", houses(30))
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        plausible("fit", data, "-t", "price", "-o", tmp_path / name, "-m", "map", "--seed", seed, *FAST)
        texts.append((tmp_path / name / "heldout.csv").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_split_is_a_partition():
    train, test = preparing.split(100, 0.25, seed=3)
    assert sorted([*train, *test]) == list(range(100))
    assert len(test) == 25
    assert len(preparing.split(10, 0.0, seed=0)[1]) == 0
    with pytest.raises(ValueError, match="2 are needed"):
        preparing.split(2, 0.5, seed=0)


def test_missing_values_refused_dropped_imputed(tmp_path):
    data = write(tmp_path / "data.csv", houses(40, gaps=True))
    found = error_of(plausible("fit", data, "-t", "price", "-o", tmp_path / "run", "-m", "map", *FAST))
    assert "area (8), city (6) of 40 rows; add --missing impute" in found
    dropped = plausible("fit", data, "-t", "price", "-o", tmp_path / "dropped", "-m", "map", "--missing", "drop", "--epochs", 1)
    assert "12 of 40 rows left out" in dropped.stderr
    imputed = plausible("fit", data, "-t", "price", "-o", tmp_path / "imputed", "-m", "map", "--missing", "impute", *FAST)
    assert imputed.exit_code == 0
    record = json.loads((tmp_path / "imputed" / "run.json").read_text())
    assert {"area missing", "city missing"} <= set(record["network"]["inputs"])
    assert record["rows"] == {"train": 36, "heldout": 4}
    new = write(tmp_path / "new.csv", "area,rooms,city\n,3,\n50,2,Bern\n")
    assert plausible("predict", tmp_path / "imputed", new, "-o", tmp_path / "imputed.csv").exit_code == 0
    assert all(row["mean"] for row in read(tmp_path / "imputed.csv"))
    assert plausible("predict", tmp_path / "dropped", new, "-o", tmp_path / "dropped.csv").exit_code == 0
    first, second = read(tmp_path / "dropped.csv")
    assert first["mean"] == ""
    assert float(second["mean"]) > 0


def test_rows_without_a_target_are_never_imputed(tmp_path):
    data = write(tmp_path / "data.csv", "a,y\n" + "\n".join(f"{i},{'' if i == 3 else i / 2}" for i in range(30)))
    result = plausible("fit", data, "-t", "y", "-o", tmp_path / "run", "-m", "map", "--missing", "impute", "--epochs", 1)
    assert "1 of 30 rows left out: missing targets" in result.stderr


def test_a_row_number_is_pointed_out(tmp_path):
    data = write(tmp_path / "data.csv", "week,a,y\n" + "\n".join(f"{i},{i * i % 7},{i / 3}" for i in range(20)))
    result = plausible("fit", data, "-t", "y", "-o", tmp_path / "run", "-m", "map", "--hidden", "none", "--epochs", 1)
    assert "'week' counts the rows; if it means nothing, add --drop-columns 'week'" in result.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["network"]["inputs"] == ["week", "a"]


@pytest.mark.parametrize(
    ("value", "text"), [(44860.3, "44,860"), (1.23456, "1.235"), (-12.1616, "-12.16"), (0.001234, "0.001234"), (0.0, "0")]
)
def test_numbers_read_well(value, text):
    from plausible.apps.cli.view import number

    assert number("rmse", value) == text
    assert number("accuracy", 0.875) == "87.5 %"


def test_saved_index_is_left_out(tmp_path):
    data = write(tmp_path / "data.csv", ",a,y\n" + "\n".join(f"{i},{i * i % 7},{i / 3}" for i in range(20)))
    result = plausible("fit", data, "-t", "y", "-o", tmp_path / "run", "-m", "map", "--hidden", "none", "--epochs", 1)
    assert "column 1 has no name and counts the rows: left out" in result.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["network"]["inputs"] == ["a"]


@pytest.mark.parametrize(
    ("likelihood", "outputs"), [("student-t", 1), ("heteroscedastic", 2), ("poisson", 1), ("negative-binomial", 1)]
)
def test_every_regression_likelihood_runs(likelihood, outputs, tmp_path):
    data = write(tmp_path / "data.csv", "a,y\n" + "\n".join(f"{i % 7},{i % 7 + i % 2}" for i in range(40)))
    run = tmp_path / "run"
    result = plausible("fit", data, "-t", "y", "-o", run, "-m", "map", "--likelihood", likelihood, *FAST)
    assert result.exit_code == 0, result.output
    assert json.loads((run / "run.json").read_text())["network"]["outputs"] == outputs
    assert plausible("predict", run, data, "-o", tmp_path / "p.csv").exit_code == 0
    for row in read(tmp_path / "p.csv"):
        assert float(row["lower"]) <= float(row["mean"]) <= float(row["upper"])


def test_several_targets(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{a:.3f},{100 + a:.3f},{1e4 - 10 * a:.3f}" for a in rng.normal(size=40)]
    data = write(tmp_path / "data.csv", "a,low,high\n" + "\n".join(lines))
    run = tmp_path / "run"
    arguments = ("-t", "high", "-t", "low", "-o", run, "-m", "map", "--hidden", 10, "--epochs", 100, "--lr", 0.02)
    result = plausible("fit", data, *arguments)
    assert result.exit_code == 0, result.output
    metrics = json.loads((run / "metrics.json").read_text())["targets"]
    assert list(metrics) == ["high", "low"]
    assert plausible("predict", run, data, "-o", tmp_path / "p.csv").exit_code == 0
    row = read(tmp_path / "p.csv")[0]
    assert abs(float(row["high_mean"]) - 1e4) < 50
    assert abs(float(row["low_mean"]) - 100) < 5


def test_several_yes_no_targets(tmp_path):
    data = write(tmp_path / "data.csv", "a,ill,old\n" + "\n".join(f"{i % 9},{i % 2},{'ny'[i % 3 > 0]}" for i in range(40)))
    run = tmp_path / "run"
    assert plausible("fit", data, "-t", "ill", "-t", "old", "-o", run, "-m", "map", *FAST).exit_code == 0
    assert plausible("predict", run, data, "-o", tmp_path / "p.csv").exit_code == 0
    for row in read(tmp_path / "p.csv"):
        assert float(row["ill_p_0"]) + float(row["ill_p_1"]) == pytest.approx(1, abs=1e-5)
        assert row["old_prediction"] == ("y" if float(row["old_p_y"]) > 0.5 else "n")


# the output folder


def test_existing_folders_and_files(tmp_path):
    data = write(tmp_path / "data.csv", houses(20))
    run = tmp_path / "run"
    arguments = ("fit", data, "-t", "price", "-m", "map", *FAST, "-o")
    run.mkdir()
    assert plausible(*arguments, run).exit_code == 0  # an empty folder is fine
    assert "exists and is not empty" in error_of(plausible(*arguments, run))
    before = (run / "heldout.csv").read_text()
    assert plausible(*arguments, run, "--seed", 5, "--overwrite").exit_code == 0
    assert (run / "heldout.csv").read_text() != before
    assert "is a file" in error_of(plausible(*arguments, data))
    assert "cannot be written" in error_of(plausible(*arguments, data / "run"))
    assert "not a run of plausible" in error_of(plausible(*arguments, tmp_path, "--overwrite"))
    inside = write(run / "data.csv", houses(20))
    swapped = ("fit", inside, *arguments[2:])
    assert "would delete" in error_of(plausible(*swapped, run, "--overwrite"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv", "run"]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path):
    data = write(tmp_path / "data.csv", houses(20))
    (tmp_path / "locked").mkdir(mode=0o500)
    found = error_of(plausible("fit", data, "-t", "price", "-o", tmp_path / "locked" / "run", "-m", "map", *FAST))
    assert "cannot be written: permission denied" in found


def test_interrupt_keeps_the_checkpoint_and_resume_ends_alike(tmp_path, monkeypatch):
    data = write(tmp_path / "data.csv", houses(40))
    arguments = ("fit", data, "-t", "price", "-m", "map", "--epochs", 6, "--hidden", 5, "--batch-size", 10, "-o")
    assert plausible(*arguments, tmp_path / "straight").exit_code == 0
    fit = pl.fit

    def stopped(*positional, **named):
        def stop(step, _info):
            if step == 7:
                os.kill(os.getpid(), 2)

        return fit(*positional, **named, callbacks=[stop])

    monkeypatch.setattr(pl, "fit", stopped)
    result = plausible(*arguments, tmp_path / "run")
    monkeypatch.undo()
    assert result.exit_code == 130
    assert "--resume" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
    assert "unfinished run; add --resume" in error_of(plausible(*arguments, tmp_path / "run"))
    result = plausible(*arguments, tmp_path / "run", "--resume")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "run.checkpoint").exists()
    assert (tmp_path / "run" / "heldout.csv").read_text() == (tmp_path / "straight" / "heldout.csv").read_text()


# predict


def test_predictions_are_those_of_the_library(regression, tmp_path):
    run, _ = regression
    data = run.with_suffix(".csv")
    result = plausible("predict", run, data, "--out", tmp_path / "p.csv", "--level", 0.5)
    assert result.exit_code == 0, result.output
    assert "not used" not in result.stderr
    assert "60 scored rows, ensemble" in result.stdout  # which is there: scores
    assert "may hold rows that the run was fitted to" in result.stderr
    rows = read(tmp_path / "p.csv")
    assert list(rows[0]) == ["mean", "std", "epistemic", "aleatoric", "lower", "upper"]
    from plausible.apps.cli import runs

    record, posterior = runs.load(run)
    inputs = record.preprocessor.transform(files.read_table(data)).inputs
    functions = posterior.functions(torch.from_numpy(inputs))[..., 0].double().numpy()
    (loc,), (scale,) = record.target.loc, record.target.scale
    np.testing.assert_allclose([float(row["mean"]) for row in rows], loc + scale * functions.mean(0), rtol=1e-5)
    np.testing.assert_allclose([float(row["epistemic"]) for row in rows], scale**2 * functions.var(0), rtol=1e-3, atol=1e-3)
    noise = posterior.weights()["likelihood.log_scale"].double().exp()[:, None] * scale
    mixture = torch.distributions.Normal(torch.from_numpy(loc + scale * functions), noise)
    bounds = [torch.tensor([float(row[name]) for row in rows], dtype=torch.float64) for name in ("lower", "upper")]
    for bound, mass in zip(bounds, (0.25, 0.75)):
        np.testing.assert_allclose(mixture.cdf(bound).mean(0), mass, atol=1e-3)
    for row in rows:
        total = float(row["epistemic"]) + float(row["aleatoric"])
        assert float(row["std"]) ** 2 == pytest.approx(total, rel=1e-4)
        assert float(row["lower"]) < float(row["mean"]) < float(row["upper"])


def test_predict_matches_the_held_out_file(regression, tmp_path):
    run, _ = regression
    plausible("predict", run, run.with_suffix(".csv"), "--out", tmp_path / "p.csv")
    every = read(tmp_path / "p.csv")
    for held in read(run / "heldout.csv"):
        assert float(every[int(held["row"]) - 1]["mean"]) == pytest.approx(float(held["mean"]), rel=1e-5)


def test_class_probabilities(classification, tmp_path):
    run, fitted = classification
    for words in ("accuracy", "Brier", "ECE"):
        assert words in fitted.stdout
    new = write(tmp_path / "new.csv", "noise,width,extra\n0,2.0,1\n0,-2.0,1\n0,0,1\n")
    result = plausible("predict", run, new, "--out", "-")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["prediction"] for row in rows] == ["rose, wild", "iris", "lily"]
    for row in rows:
        probs = np.array([float(row[f"p_{kind}"]) for kind in ("iris", "lily", "rose, wild")])
        assert probs.sum() == pytest.approx(1, abs=1e-5)
        assert float(row["entropy"]) == pytest.approx(-(probs * np.log(probs)).sum(), abs=1e-4)
        assert 0 <= float(row["mutual_information"]) <= float(row["entropy"]) + 1e-6


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("area,rooms\n1,2\n", (), "missing input columns: city"),
        ("area,rooms,city\n1,2,\n", (), "missing values in city (1) of 1 rows; fill those cells"),
        ("area,rooms,city\nbig,2,Bern\n", (), "'area' must hold numbers, but row 1 is 'big'"),
        ("area,rooms,city\n1,2,Genf\n", ("--strict",), "'Genf'"),
        ("area,rooms,city\n1,2,Bern\n", ("--level", "1.5"), "--level must be between 0 and 1"),
        ("area,rooms,city\n1,2,Bern\n", ("--draws", "0"), "--draws must be at least 1"),
        ("area,rooms,city\n", (), "no rows"),
    ],
)
def test_predict_mistakes_are_one_line(text, arguments, message, regression, tmp_path):
    new = write(tmp_path / "new.csv", text)
    assert message in error_of(plausible("predict", regression[0], new, "-o", tmp_path / "p.csv", *arguments))
    assert not (tmp_path / "p.csv").exists()


def test_unknown_categories_are_said_and_predicted(regression, tmp_path):
    new = write(tmp_path / "new.csv", "area,rooms,city\n100,2,Genf\n")
    result = plausible("predict", regression[0], new, "-o", tmp_path / "p.csv")
    assert result.exit_code == 0
    assert "'Genf', in 1 of 1 rows" in result.stderr


def test_predict_does_not_overwrite_unasked(regression, tmp_path):
    new = write(tmp_path / "new.csv", "area,rooms,city\n100,2,Bern\n")
    out = write(tmp_path / "p.csv", "precious")
    assert "exists; choose another file or add --overwrite" in error_of(plausible("predict", regression[0], new, "-o", out))
    assert out.read_text() == "precious"
    assert plausible("predict", regression[0], new, "-o", out, "--overwrite").exit_code == 0


def test_runs_that_are_none_or_damaged(regression, tmp_path):
    import shutil

    new = write(tmp_path / "new.csv", "area,rooms,city\n100,2,Bern\n")
    assert "is not a folder" in error_of(plausible("predict", tmp_path / "none", new, "-o", "-"))
    assert "has no run.json" in error_of(plausible("predict", tmp_path, new, "-o", "-"))
    assert "no such file" in error_of(plausible("predict", regression[0], tmp_path / "none.csv", "-o", "-"))
    copy = tmp_path / "copy"
    shutil.copytree(regression[0], copy)
    text = (copy / "run.json").read_text()
    (copy / "run.json").write_text(text[: len(text) // 2])
    assert "damaged" in error_of(plausible("info", copy))
    (copy / "run.json").write_text(text.replace('"Bern"', '"Genf"'))
    assert "run.json" in error_of(plausible("info", copy))


# the other commands


def test_info(regression):
    result = plausible("info", regression[0])
    assert result.exit_code == 0
    for words in ("regression, gaussian", "area, rooms, city", "5-50-50-1, relu", "54 for training, 6 held out", "RMSE"):
        assert words in result.stdout


def test_methods_lists_all_and_shows_one():
    listed = plausible("methods")
    assert listed.exit_code == 0
    for name in pl.methods.registry:
        assert name in listed.stdout
    shown = plausible("methods", "sgld")
    assert "temperature" in shown.stdout
    assert "did you mean 'sgld'" in error_of(plausible("methods", "sgdl"))


def test_version_help_and_usage():
    assert plausible("--version").stdout == plausible("version").stdout == f"plausible {pl.__version__}\n"
    assert plausible("fit", "--help").exit_code == 0
    assert plausible("fit", "data.csv").exit_code == 2
    assert plausible("fit", "data.csv", "-t", "y", "-o", "run", "--task", "guess").exit_code == 2
    assert plausible("predicted").exit_code == 2


def test_debug_shows_the_traceback(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        plausible("fit", tmp_path / "none.csv", "-t", "y", "-o", tmp_path / "run", "--debug")
    with pytest.raises(FileNotFoundError):
        plausible("--debug", "fit", tmp_path / "none.csv", "-t", "y", "-o", tmp_path / "run")
    error_of(plausible("fit", tmp_path / "none.csv", "-t", "y", "-o", tmp_path / "run"))
    monkeypatch.setenv("PLAUSIBLE_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        plausible("fit", tmp_path / "none.csv", "-t", "y", "-o", tmp_path / "run")


def test_names_with_brackets_are_printed_as_they_are(tmp_path):
    data = write(tmp_path / "data.csv", "a,y [kg]\n" + "\n".join(f"{i},{i / 3}" for i in range(30)))
    result = plausible("fit", data, "-t", "y [kg]", "-o", tmp_path / "run", "-m", "map", "--hidden", 3, "--epochs", 1)
    assert "y [kg]" in result.stdout


def test_targets_far_from_zero_keep_their_spread(tmp_path):
    rows = [f"{i % 7},{1_700_000_000 + 3600 * (i % 5) / 5:.1f}" for i in range(60)]
    write(tmp_path / "t.csv", "x,y\n" + "\n".join(rows) + "\n")
    run = tmp_path / "run"
    assert plausible("fit", tmp_path / "t.csv", "-t", "y", "-m", "map", "--epochs", 5, "-o", run, "-q").exit_code == 0
    held = list(csv.DictReader((run / "heldout.csv").open()))
    assert all(float(row["upper"]) - float(row["lower"]) > 100 for row in held)
    assert all(abs(float(row["mean"]) - 1_700_000_720) < 3600 for row in held)


def test_targets_too_large_for_any_unit(tmp_path):
    write(tmp_path / "t.csv", "x,y\n" + "\n".join(f"{i},{i}e300" for i in range(40)) + "\n")
    result = plausible("fit", tmp_path / "t.csv", "-t", "y", "-m", "map", "-o", tmp_path / "run")
    assert result.exit_code == 1
    assert "its values are too large; use another unit" in result.output
    assert "warning" not in result.output
