"""Tables as people have them: dates, currencies, stray words, identifiers, other files, several problems at once."""

import builtins
import gzip
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import plausible as pl
from plausible.apps import dates, files, preparing
from plausible.apps.cli import app
from plausible.apps.cli.errors import note
from plausible.apps.tables import Column, Dates, Preprocessor, Table, mlp

SMALL = ("-m", "map", "--hidden", "3", "--epochs", "2")


def plausible(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def table(**columns):
    return Table.from_values(columns)


def rows(*columns, count=40):
    """Lines of a CSV file from functions of the row number."""
    return "\n".join(",".join(str(column(i)) for column in columns) for i in range(count)) + "\n"


def sheet(path, **options):
    return preparing.read_sheet(preparing.TableOptions(path, ("y",), **options))


# dates


@pytest.mark.parametrize(
    ("texts", "first", "format"),
    [
        (["2024-02-29", "2023-01-01"], "2024-02-29", "ISO"),
        (["2024-02-29T12:00:00Z", "2023-01-01"], "2024-02-29 12:00:00", "ISO"),
        (["2024-02", "2023-01"], "2024-02-01", "year-month"),
        (["29.02.2024", "1.1.2023"], "2024-02-29", "day.month.year"),
        (["02/29/2024", "01/01/2023"], "2024-02-29", "month/day/year"),
        (["29/02/2024 06:30", "01/01/2023 07:00"], "2024-02-29 06:30:00", "day/month/year"),
        (["Feb 29, 2024", "Jan 1, 2023"], "2024-02-29", "month day, year"),
        (["06:30", "18:00"], "1900-01-01 06:30:00", "hour:minute"),
    ],
)
def test_dates_are_read_in_one_format(texts, first, format):
    found = dates.read(texts)
    assert dates.written(found.days[texts[0]]) == first
    assert dates.FORMATS[found.format] == format
    assert found.rival == ""


def test_a_date_that_could_be_another_is_said():
    assert dates.read(["01/02/2024", "03/04/2024"]).rival == "day/month/year"
    assert dates.read(["01/02/2024", "13/02/2024"]).rival == ""
    assert dates.read(["2024-01-05", "5 apples"]) is None
    notes = Preprocessor.fit(table(day=["01/02/2024", "03/04/2024"], a=[1, 2])).notes
    assert notes == ("column 'day' holds dates, read as month/day/year, not day/month/year, which would fit as well",)


def test_the_calendar_by_hand():
    days = np.array([dates.day(text, dates.ISO) for text in ("1970-01-01", "2024-12-25T06:00", "2024-07-01")])
    parts = dates.parts(days)
    assert days[0] == 0
    assert [dates.DAYS[k] for k in parts["weekday"].argmax(1)] == ["Thursday", "Wednesday", "Monday"]
    np.testing.assert_allclose(parts["month"], [[0, 1], [-0.5, 3**0.5 / 2], [0, -1]], atol=1e-12)  # January, December, July
    np.testing.assert_allclose(parts["hour"], [[0, 1], [1, 0], [0, 1]], atol=1e-9)
    assert [dates.written(day) for day in parts["year"][:, 0]] == ["1970-01-01", "2024-01-01", "2024-01-01"]


def test_dates_become_elapsed_year_month_and_weekday():
    prep = Preprocessor.fit(table(day=["2023-01-02", "2024-03-05", None], a=[1, 2, 4]), missing="impute")
    (encoder, _) = prep.columns
    assert isinstance(encoder, Dates)
    assert encoder.parts == ("year", "month", "weekday")  # no hour, as none is said
    assert prep.features[:4] == ["day", "day: year", "day: month, sine", "day: month, cosine"]
    assert prep.features[4:12] == [*(f"day: {name}" for name in dates.DAYS), "day missing"]
    x = prep.transform(table(day=["2023-01-02", "2024-03-05"], a=[1, 2])).inputs
    np.testing.assert_allclose(x[:, 0], [-1, 1], atol=1e-6)
    again = Preprocessor.from_dict(json.loads(json.dumps(prep.to_dict())))
    assert again == prep


def test_dates_beyond_training_are_said_and_other_formats_refused():
    prep = Preprocessor.fit(table(day=["2023-01-01", "2023-12-31"], a=[1, 2]))
    assert prep.transform(table(day=["2023-06-01"], a=[1])).notes == ()
    (note,) = prep.transform(table(day=["2023-06-01", "2025-01-01"], a=[1, 1])).notes
    assert "leaves the range of training (2023-01-01 to 2023-12-31) in 1 of 2 rows" in note
    with pytest.raises(ValueError, match=r"'day' must hold dates \(ISO\) as in training, but row 2 is '1.6.2023'"):
        prep.transform(table(day=["2023-06-01", "1.6.2023"], a=[1, 1]))


def test_the_format_is_that_of_the_whole_table_not_of_the_training_rows(tmp_path):
    days = [f"{1 + i % 12:02d}/{1 + i % 11:02d}/2024" for i in range(39)] + ["25/03/2024"]
    write(tmp_path / "t.csv", "day,y\n" + rows(lambda i: days[i], lambda i: i / 3))
    found = sheet(tmp_path / "t.csv")
    assert dates.FORMATS[found.dated["day"].format] == "day/month/year"
    prepared = preparing.divided(found, np.arange(39), np.array([39]))  # the only telling row is held out
    assert prepared.preprocessor.columns[0].format == found.dated["day"].format


def test_epistemic_variance_grows_beyond_the_dates_of_training():
    days = [f"2023-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(84)]
    prep = Preprocessor.fit(table(day=days))
    x = prep.transform(table(day=days)).inputs
    y = (x[:, :1] + 0.1 * np.random.default_rng(0).normal(size=(84, 1))).astype(np.float32)
    posterior = pl.fit(mlp(x.shape[1], (10,), 1, "tanh"), (x, y), pl.HMC(draws=100, warmup=200, leapfrogs=20), progress=False)
    inside, beyond = (
        posterior.predict(prep.transform(table(day=each)).inputs).epistemic.mean()
        for each in (days, ["2026-05-05", "2027-02-02"])
    )
    assert beyond > 4 * inside


# numbers as people write them


def test_currencies_marks_and_percent():
    read = lambda cells, thousands=True: files.in_plain_digits(Column("c", tuple(cells)), thousands)  # noqa: E731
    for cells, plain, unit in [
        (("$1,234.50", "-$3", "$0.5"), ("1234.50", "-3", "0.5"), "$"),
        (("1.234,50 €", "7 €", None), ("1234.50", "7", None), "€"),
        (("CHF 1'200.-", "CHF 80.-"), ("1200", "80"), "CHF"),
        (("12 %", "3.5 %"), ("12", "3.5"), "%"),
        (("1.234.567", "2"), ("1234567", "2"), ""),
        (("0,125", "1,5"), ("0.125", "1.5"), ""),
        (("$5", "6", "unknown"), ("5", "6", "unknown"), "$"),
    ]:
        found = read(cells)
        assert (found.cells, found.unit) == (plain, unit)
    for cells in [("$5", "5 €"), ("$5", "two 2s"), ("A1", "B2"), ("05.01.2024", "06.01.2024"), ("$5", "x", "y", "z")]:
        assert read(cells).cells == cells
    assert read(("1,234", "5,678"), thousands=False).cells == ("1,234", "5,678")


def test_units_are_said(tmp_path):
    data = write(tmp_path / "t.csv", "a,y\n" + rows(lambda i: f"${i % 7}", lambda i: i / 3))
    assert "column 'a' is in $" in sheet(data).notes


@pytest.mark.parametrize("missing", ["impute", "drop", "refuse"])
def test_a_stray_word_is_said_and_no_ninety_inputs(missing, tmp_path):
    data = write(
        tmp_path / "t.csv", "a,b,y\n" + rows(lambda i: "n.k." if i == 4 else i * 1.5, lambda i: i % 3, lambda i: i / 3)
    )
    said = r"column 'a' holds numbers, but 'n.k.' in 1 of 40 rows, first in row 5"
    if missing == "refuse":
        with pytest.raises(ValueError, match=rf"{said}: mend the file, or take it as missing by --missing impute"):
            sheet(data)
        return
    found = sheet(data, missing=missing)
    assert f"{said}: taken as missing" in found.notes
    assert found.table.rows == (40 if missing == "impute" else 39)
    prep = preparing.divided(found, np.arange(30), np.arange(30, found.table.rows)).preprocessor
    assert prep.features == (["a", "a missing", "b"] if missing == "impute" else ["a", "b"])
    new = prep.transform(table(a=["?!", "3"], b=[1, 1]))
    assert "words that are no numbers, taken as missing: '?!'" in new.notes[0]
    assert len(new.inputs) == (2 if missing == "impute" else 1)


def test_few_numbers_with_words_are_categories():
    few = Column("rooms", ("1", "2", "3", "4+") * 10)
    assert few.strays == ()
    assert Preprocessor.fit(Table([few])).features == ["rooms=1", "rooms=2", "rooms=3", "rooms=4+"]
    assert Column("a", (*map(str, range(30)), "x")).strays == ("x",)
    assert Column("day", (*(f"2024-01-{i:02d}" for i in range(1, 20)), "soon")).strays == ("soon",)


# identifiers


def test_identifiers_are_no_inputs_and_go_with_the_predictions(tmp_path):
    columns = (lambda i: i, lambda i: f"H{i * 7 % 40:02d}", lambda i: 1000 - 3 * i, lambda i: i * i % 7, lambda i: i / 3)
    data = write(tmp_path / "t.csv", ",name,house_id,a,y\n" + rows(*columns))
    result = plausible("fit", data, "-t", "y", "-o", tmp_path / "run", *SMALL)
    assert "column 1 has no name and counts the rows: left out" in result.stderr
    assert "'name' is text that differs in every row: taken as an identifier" in result.stderr
    assert "'house_id' is called so and differs in every row" in result.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["network"]["inputs"] == ["a"]
    assert plausible("predict", tmp_path / "run", data, "-o", tmp_path / "p.csv").exit_code == 0
    predicted = files.read_table(tmp_path / "p.csv")
    assert list(predicted.columns)[:4] == ["unnamed 1", "name", "house_id", "mean"]
    assert predicted["house_id"].cells[:2] == ("1000", "997")
    assert plausible("predict", tmp_path / "run", data, "-o", tmp_path / "p.json").exit_code == 0
    first = json.loads((tmp_path / "p.json").read_text())[1]
    assert (first["unnamed 1"], first["name"], first["house_id"]) == (1, "H07", 997)  # numbers as numbers
    without = write(tmp_path / "new.csv", "a\n3\n")
    assert plausible("predict", tmp_path / "run", without, "-o", tmp_path / "q.csv").exit_code == 0


def test_identifiers_can_be_kept_as_inputs(tmp_path):
    data = write(tmp_path / "t.csv", "id,a,y\n" + rows(lambda i: i, lambda i: i * i % 7, lambda i: i / 3))
    assert sheet(data).aside == ("id",)
    assert sheet(data, keep_columns=("id",)).inputs == ("id", "a")


# everything at once


def test_all_problems_of_a_table_are_one_message(tmp_path):
    data = write(
        tmp_path / "t.csv",
        "a,b,c,d,y\n"
        + rows(
            lambda i: "" if i < 3 else i * 1.5,
            lambda i: "x" if i == 9 else i * 2.5,
            lambda i: "inf" if i == 5 else i,
            lambda i: i % 4,
            lambda i: "oops" if i == 7 else i / 3,
        ),
    )
    result = plausible("fit", data, "-t", "y", "-o", tmp_path / "run", *SMALL)
    assert result.exit_code == 1
    (line,) = (line for line in result.stderr.splitlines() if "error" in line)
    for words in (
        "has 4 problems: (1) missing values in a (3) of 40 rows",
        "(2) column 'b' holds numbers, but 'x' in 1 of 40 rows",
        "(3) column 'c' has 1 infinite values, first in row 6",
        "(4) target 'y' is mostly numbers, but row 8 is 'oops'",
    ):
        assert words in line
    names = plausible("fit", data, "-t", "z", "-o", tmp_path / "run", "--drop-columns", "e,f", *SMALL).stderr
    assert "has 3 problems: (1) --target: no column 'z'" in names
    assert "(3) --drop-columns: no column 'f'" in names


def test_all_problems_of_new_rows_are_one_message():
    prep = Preprocessor.fit(table(a=[1, 2], b=[1, 2], c=["x", "y"], day=["2024-01-01", "2024-02-01"]))
    with pytest.raises(
        ValueError, match=r"4 problems: .*missing values in b \(1\).*'z'.*'a' must hold numbers.*'day' must hold dates"
    ):
        prep.transform(table(a=["big"], b=[None], c=["z"], day=["x1"]), strict=True)


def test_a_table_of_identifiers_alone_is_refused(tmp_path):
    data = write(tmp_path / "t.csv", "id,y\n" + rows(lambda i: i, lambda i: i / 3))
    with pytest.raises(ValueError, match="besides the target but identifiers \\(id; --keep-columns learns from them\\)"):
        sheet(data)


def test_one_row_is_said_to_be_too_few(tmp_path):
    with pytest.raises(ValueError, match="has one row only; at least 2 are needed"):
        sheet(write(tmp_path / "t.csv", "a,y\n1,2\n"))


def test_ragged_lines_do_not_hide_what_else_is_wrong(tmp_path):
    data = write(tmp_path / "t.csv", "a,b,y\n1,2,0.5\n1,2\n1,,1.5\n1,2,2.5,9\n3,x,3.5\n")
    ragged = r"2 problems: \(1\) .*line 3: 2 cells, line 5: 4 cells"
    with pytest.raises(ValueError, match=rf"{ragged}.*\(2\) missing values in b \(1\) of 3"):
        sheet(data)
    with pytest.raises(ValueError, match=r"2 problems: \(1\) .*line 3.*\(2\) --target: no column 'y'"):
        sheet(write(tmp_path / "u.csv", "a,b\n1,2\n1\n"))


def test_a_single_word_among_few_numbers_is_a_slip_and_a_frequent_one_a_category(tmp_path):
    slip = "rooms,y\n" + rows(lambda i: "many" if i == 7 else i % 5, lambda i: i / 3)
    with pytest.raises(ValueError, match=r"numbers, but 'many' in 1 of 40 rows, first in row 8.*--categorical 'rooms'"):
        sheet(write(tmp_path / "t.csv", slip))
    assert not sheet(tmp_path / "t.csv", missing="impute").categorical
    assert sheet(tmp_path / "t.csv", categorical=("rooms",)).categorical == {"rooms"}
    often = "rooms,y\n" + rows(lambda i: "3+" if i % 5 == 3 else i % 5, lambda i: i / 3)
    assert sheet(write(tmp_path / "u.csv", often)).categorical == {"rooms"}


def test_negative_amounts_as_accounts_write_them(tmp_path):
    text = (
        'flow,label,odd,y\n"(1,234.50)",(1),12 (345),1\n$7,(2),12 (345),2\n"$(8.00)",(1),12 (345),3\n\N{MINUS SIGN}3,(2),1,4\n'
    )
    table = files.read_table(write(tmp_path / "t.csv", text))
    assert table["flow"].cells == ("-1234.50", "7", "-8.00", "-3")
    assert table["flow"].unit == "$"
    assert table["label"].levels == ("(1)", "(2)")  # in parentheses one and all: labels
    assert table["odd"].levels[1] == "12 (345)"


def test_recommendations_need_no_complete_rows(tmp_path):
    data = write(tmp_path / "t.csv", "a,y\n" + rows(lambda i: "" if i == 3 else i % 7, lambda i: i / 3))
    result = plausible("recommend", data, "-t", "y")
    assert result.exit_code == 0
    assert "ensemble" in result.output


def test_all_ragged_lines_and_repeated_names_are_one_message(tmp_path):
    data = write(tmp_path / "t.csv", "a,a,y\n1,2\n1,2,3\n1\n1,2,3,4\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"same name: a; .*; line 2: 2 cells, line 4: 1 cells, line 5: 4 cells \(and 1 more"):
        files.read_table(data)


# files


def test_every_ending_is_read_alike_and_written(tmp_path):
    pytest.importorskip("pyarrow")
    columns = {"a": [1, 2, 3], "b": [0.5, None, 2.25], "c": ["x", "y, z", "ä"]}
    names = ["t.csv", "t.csv.gz", "t.tsv", "t.json", "t.json.gz", "t.jsonl", "t.parquet"]
    for name in names:
        files.write_table(tmp_path / name, columns)
        assert files.read_table(tmp_path / name).columns == files.read_table(tmp_path / "t.csv").columns, name
    assert (tmp_path / "t.parquet").read_bytes()[:4] == b"PAR1"
    assert gzip.decompress((tmp_path / "t.csv.gz").read_bytes()) == (tmp_path / "t.csv").read_bytes()
    assert json.loads((tmp_path / "t.json").read_text())[1] == {"a": 2, "b": None, "c": "y, z"}


@pytest.mark.parametrize("name", ["t.xlsx", "t.feather", "t.parquet.gz", "t.zip"])
def test_other_kinds_of_files_are_refused_both_ways(name, tmp_path):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"a table is .csv, .tsv, .*, no .* save it as one of these"):
        files.read_table(tmp_path / name)
    with pytest.raises(ValueError, match=r"save it as one of these"):
        files.check_writable(tmp_path / name)


def test_json_by_columns_and_what_is_no_table(tmp_path):
    data = write(tmp_path / "t.json", '{"a": [1, 2], "b": ["$1,000", "$5"]}')
    assert files.read_table(data)["b"].cells == ("1000", "5")
    by_rows = write(tmp_path / "t.json", '{"a": {"0": 1, "1": 2}, "b": {"0": "x"}}')  # as pandas writes a frame
    assert [column.cells for column in files.read_table(by_rows).columns.values()] == [("1", "2"), ("x", None)]
    for text, message in [
        ("{", "is not JSON"),
        ("[1, 2]", "a list of records"),
        ('[{"a": {"b": 1}}]', "values inside values in column 'a'"),
        ('{"a": [1], "b": []}', "different lengths"),
        ("[]", "has no rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            files.read_table(write(tmp_path / "t.json", text))
    (tmp_path / "t.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="not a readable gzip file"):
        files.read_table(tmp_path / "t.csv.gz")


def test_encodings(tmp_path):
    (tmp_path / "t.csv").write_bytes("städte,y\n1,2\n".encode("latin-1"))
    assert list(files.read_table(tmp_path / "t.csv", "latin-1").columns) == ["städte", "y"]
    (tmp_path / "u.csv").write_bytes("städte,y\n1,2\n".encode("utf-16"))
    assert list(files.read_table(tmp_path / "u.csv", "utf-16").columns) == ["städte", "y"]
    with pytest.raises(ValueError, match="is not ascii text"):
        files.read_table(tmp_path / "t.csv", "ascii")


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    data = write(tmp_path / "t.csv", "a,y\n" + rows(lambda i: i % 7, lambda i: i / 3))
    assert plausible("fit", data, "-t", "y", "-o", tmp_path / "run", *SMALL).exit_code == 0
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] in ("pyarrow", "polars", "pandas"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    result = plausible("predict", tmp_path / "run", data, "-o", tmp_path / "p.parquet")
    assert result.exit_code == 1
    assert "writing a .parquet file needs pyarrow: pip install 'plausible[tables]', or name a .csv" in result.stderr
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"pip install 'plausible\[tables\]'"):
        files.read_table(tmp_path / "t.parquet")


# scores


def test_scores_where_the_target_is_there(tmp_path):
    rng = np.random.default_rng(0)
    made = rng.normal(size=60)
    train = write(tmp_path / "t.csv", "a,y\n" + rows(lambda i: f"{made[i]:.4f}", lambda i: f"{3 * made[i] + 5:.4f}", count=60))
    options = ("-m", "map", "--hidden", "none", "--epochs", 300, "--lr", 0.05)
    assert plausible("fit", train, "-t", "y", "-o", tmp_path / "run", *options).exit_code == 0
    new = write(tmp_path / "new.csv", "a,y\n0,5\n1,\n1,9\n")
    result = plausible("predict", tmp_path / "run", new, "-o", tmp_path / "p.csv")
    assert "2 scored rows, map" in result.stdout
    assert "fitted to" not in result.stderr
    mean = [float(cell) for cell in files.read_table(tmp_path / "p.csv")["mean"].cells]
    expected = np.sqrt(((mean[0] - 5) ** 2 + (mean[2] - 9) ** 2) / 2)
    assert f"{expected:.4f}"[:4] in result.stdout
    piped = plausible("predict", tmp_path / "run", new, "-o", "-")
    assert "scored" not in piped.stdout
    assert "2 scored rows" in piped.stderr
    words = write(tmp_path / "new.csv", "a,y\n0,much\n")
    assert "no scores: target 'y' must hold numbers" in plausible("predict", tmp_path / "run", words, "-o", "-").stderr


def test_classes_that_the_run_does_not_know_are_not_scored(tmp_path):
    data = write(tmp_path / "t.csv", "a,y\n" + rows(lambda i: i % 7, lambda i: "ny"[i % 7 > 3]))
    assert plausible("fit", data, "-t", "y", "-o", tmp_path / "run", *SMALL).exit_code == 0
    new = write(tmp_path / "new.csv", "a,y\n1,n\n6,y\n3,maybe\n")
    result = plausible("predict", tmp_path / "run", new, "-o", tmp_path / "p.csv")
    assert "2 scored rows" in result.stdout
    assert len(files.read_table(tmp_path / "p.csv")["prediction"].cells) == 3


# auto


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    rng = np.random.default_rng(0)
    x = rng.normal(size=60)
    data = write(folder / "t.csv", "a,y\n" + rows(lambda i: f"{x[i]:.4f}", lambda i: f"{1000 * np.sin(x[i]):.3f}", count=60))
    with torch.random.fork_rng():
        result = plausible("fit", data, "-t", "y", "-o", folder / "run", "--time", "1s", "--hidden", 5)
    return folder / "run", data, result


def test_fit_chooses_and_says_so_with_scores_and_verdict(chosen):
    run, _, result = chosen
    assert result.exit_code == 0, result.output
    record = json.loads((run / "run.json").read_text())
    assert record["method"] in ("hmc", "ensemble", "laplace", "ivon")
    assert record["target"]["likelihood"] in ("student-t", "gaussian")
    assert record["settings"]["choice"].startswith(record["method"])
    assert f"auto: {record['settings']['choice']}" in result.stderr
    assert f"6 held-out rows, {record['method']}" in result.stdout
    assert "90 % intervals cover" in result.stdout.replace("\u00a0", " ")  # the verdict
    assert "Disagreement of draws" in result.stdout
    assert "chosen because" in json.loads((run / "evidence.json").read_text())["facts"]


def test_recommend_lists_the_candidates_of_the_rule(chosen):
    _, data, _ = chosen
    result = plausible("recommend", data, "-t", "y", "--time", "60s", "--memory", "4G", "--hidden", 5)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit() and "row" not in line.split()[1]]
    names = [line[1] for line in lines if line[0] in "12345"]
    assert names == ["nuts", "ensemble", "laplace", "ivon", "laplace"]
    assert "60 rows and" in result.stdout
    assert "--method auto takes nuts: NUTS(draws=" in result.stdout
    tight = plausible("recommend", data, "-t", "y", "--time", "60s", "--memory", "100", "--hidden", 5)
    assert "Nothing fits" in tight.stdout
    assert "time must be" in plausible("recommend", data, "-t", "y", "--time", "soon").stderr


def test_text_is_no_formula_in_a_spreadsheet(tmp_path):
    files.write_table(tmp_path / "a.csv", {"=name": ["=1+1", "@x", "-3", "- a", "plain"], "n": [-1.5, 2, -3, 4, 5]})
    assert (tmp_path / "a.csv").read_text().splitlines() == ["'=name,n", "'=1+1,-1.5", "'@x,2", "-3,-3", "'- a,4", "plain,5"]


def test_notes_obey_no_escape_codes(capsys):
    note("column \x1b[31mred\x1b]0;title\x07")
    assert capsys.readouterr().err == "plausible: column \\x1b[31mred\\x1b]0;title\\x07\n"
