import json

import numpy as np
import pytest
import torch

from plausible.apps.tables import Column, Preprocessor, Table, mlp


def table(**columns):
    return Table.from_values(columns)


# mlp


def test_mlp_is_the_formula():
    net = mlp(3, (4, 5), 2, "tanh").double()
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second, last = net[0], net[2], net[4]
    expected = last(torch.tanh(second(torch.tanh(first(x)))))
    assert len(net) == 5
    torch.testing.assert_close(net(x), expected)


def test_mlp_without_hidden_layers_is_linear():
    net = mlp(3, (), 2, "relu")
    assert [type(layer).__name__ for layer in net] == ["Linear"]


@pytest.mark.parametrize(("arguments", "word"), [((3, (0,), 1, "relu"), "width"), ((3, (5,), 1, "sine"), "sine")])
def test_mlp_refuses(arguments, word):
    with pytest.raises(ValueError, match=word):
        mlp(*arguments)


# columns


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-2", "+3"], "integer"),
        (["1", "2.0"], "float"),
        (["1e3", ".5", "5."], "float"),
        (["1", None], "integer"),
        (["1_000", "2"], "text"),
        (["1,5", "2"], "text"),
        (["True", "False"], "text"),
        (["0x10"], "text"),
        ([None, None], "empty"),
    ],
)
def test_kind_is_read_off_the_cells(cells, kind):
    assert Column("c", tuple(cells)).kind == kind


@pytest.mark.parametrize("word", ["", "  ", "NA", "na", "NaN", "nan", "null", "NULL", "?", "N/A", "None", None, np.nan])
def test_missing_words(word):
    assert table(a=[word, "x"])["a"].cells == (None, "x")


def test_levels_of_integers_sort_as_numbers():
    assert table(a=["10", "9", "1", "10"])["a"].levels == ("1", "9", "10")
    assert table(a=["b10", "b9"])["a"].levels == ("b10", "b9")


def test_infinite_and_unreadable_numbers_name_column_and_row():
    with pytest.raises(ValueError, match=r"'a' has 1 infinite values, first in row 2"):
        _ = table(a=["1", "inf"])["a"].numbers
    with pytest.raises(ValueError, match=r"'a' must hold numbers, but row 3 is '12 kg'"):
        _ = table(a=["1", "2", "12 kg"])["a"].numbers


def test_rows_keep_their_numbers_when_taken():
    taken = table(a=["1", "2", "x"]).take(np.array([2, 0]))
    assert taken["a"].cells == ("x", "1")
    assert taken["a"].unreadable == (3, "x")


def test_unknown_column_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"no column 'prise' \(did you mean 'Price'\?\); there are: Price, area"):
        table(Price=["1"], area=["2"])["prise"]


def test_from_values_takes_numpy_and_python():
    made = Table.from_values({"a": np.array([1.5, np.nan]), "b": [True, None], "c": np.array([1, 2])})
    assert made["a"].cells == ("1.5", None)
    assert made["b"].cells == ("True", None)
    assert made["c"].kind == "integer"


# preprocessing


def test_standardisation_and_one_hot_by_hand():
    train = table(size=[1, 2, 3, 6], colour=["red", "blue", "red", "green"])
    prep = Preprocessor.fit(train)
    x = prep.transform(train).inputs
    values = np.array([1.0, 2, 3, 6])
    np.testing.assert_allclose(x[:, 0], (values - 3) / np.sqrt(3.5), rtol=1e-6)
    assert prep.features == ["size", "colour=blue", "colour=green", "colour=red"]
    np.testing.assert_array_equal(x[:, 1:], [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert x.dtype == np.float32


def test_statistics_come_from_the_fitted_rows_alone():
    prep = Preprocessor.fit(table(a=[0, 2]))
    np.testing.assert_allclose(prep.transform(table(a=[5])).inputs, [[4.0]])


def test_numeric_codes_can_be_categories():
    prep = Preprocessor.fit(table(zip=["10", "9", "10"], a=[1, 2, 3]), categorical=["zip"])
    assert prep.features == ["zip=9", "zip=10", "a"]
    with pytest.raises(ValueError, match="zipp"):
        Preprocessor.fit(table(zip=["1", "2"]), categorical=["zipp"])


def test_constant_and_empty_columns_are_left_out_with_a_note():
    prep = Preprocessor.fit(table(a=[1, 2], same=["x", "x"], gone=[None, None]), missing="impute")
    assert prep.names == ["a"]
    assert "'same' is constant (x)" in prep.notes[0]
    assert "'gone' is empty" in prep.notes[1]
    with pytest.raises(ValueError, match="no input column is left"):
        Preprocessor.fit(table(same=["x", "x"]))


def test_missing_refused_with_counts_and_the_fix():
    gappy = table(age=[1, None, None], city=["a", "b", None], fine=[1, 2, 3])
    with pytest.raises(ValueError, match=r"age \(2\), city \(1\) of 3 rows.*--missing impute.*--missing drop"):
        Preprocessor.fit(gappy)
    prep = Preprocessor.fit(table(age=[1, 2]))
    with pytest.raises(ValueError, match=r"age \(1\) of 1 rows"):
        prep.transform(table(age=[None]))


def test_impute_fills_the_median_and_marks_the_gap():
    train = table(age=[1, 2, 9, None], city=["a", None, "b", "a"], full=[0, 1, 2, 3])
    prep = Preprocessor.fit(train, missing="impute")
    x = prep.transform(train).inputs
    assert prep.features == ["age", "age missing", "city=a", "city=b", "city missing", "full"]
    mean, std = 4.0, np.array([1.0, 2, 9]).std()
    np.testing.assert_allclose(x[:, 0], (np.array([1, 2, 9, 2]) - mean) / std, rtol=1e-6)
    np.testing.assert_array_equal(x[:, 1], [0, 0, 0, 1])
    np.testing.assert_array_equal(x[:, 2:5], [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]])


def test_a_gap_where_training_had_none_is_said():
    prep = Preprocessor.fit(table(a=[1, 2, 6], c=["x", "y", "y"]), missing="impute")
    found = prep.transform(table(a=[None], c=[None]))
    np.testing.assert_allclose(found.inputs[0], [(2 - 3) / np.sqrt(14 / 3), 0, 0], rtol=1e-6)
    assert len(found.notes) == 2
    assert all("complete in training" in line for line in found.notes)


def test_drop_keeps_complete_rows_in_order():
    prep = Preprocessor.fit(table(a=[1, None, 3], b=[1, 2, 4]), missing="drop")
    found = prep.transform(table(a=[None, 3, 1], b=[1, 1, 4]))
    np.testing.assert_array_equal(found.kept, [False, True, True])
    np.testing.assert_allclose(found.inputs, [[1, -1], [-1, 1]])


def test_unknown_categories_are_zeros_with_a_note_or_refused():
    prep = Preprocessor.fit(table(c=["x", "y"], a=[1, 2]))
    new = table(c=["z", "x"], a=[1, 2])
    found = prep.transform(new)
    np.testing.assert_array_equal(found.inputs[:, :2], [[0, 0], [1, 0]])
    assert "'z', in 1 of 2 rows" in found.notes[0]
    with pytest.raises(ValueError, match=r"'c'.*'z'.*known are x, y"):
        prep.transform(new, strict=True)


def test_missing_columns_are_named():
    prep = Preprocessor.fit(table(alpha=[1, 2], beta=[3, 5]))
    with pytest.raises(ValueError, match=r"missing input columns: beta \(did you mean 'betta'\?\)"):
        prep.transform(table(alpha=[1], betta=[1]))


def test_identifiers_and_free_text_are_refused():
    names = [f"n{i}" for i in range(101)]
    with pytest.raises(ValueError, match=r"'who' has 101 different texts in 202 rows.*--drop-columns 'who'"):
        Preprocessor.fit(table(who=names * 2))
    with pytest.raises(ValueError, match="identifier"):
        Preprocessor.fit(table(who=names[:20]))
    assert Preprocessor.fit(table(who=names[:100] * 2)).columns[0].name == "who"
    mostly = [str(i) for i in range(150)] + ["12 kg"]
    with pytest.raises(ValueError, match="mostly numbers, but row 151 is '12 kg'"):
        Preprocessor.fit(table(weight=mostly))


def test_row_numbers_count_up():
    assert table(a=range(5, 9))["a"].counts_up
    for cells in ([1, 2, 4], [1, 2, None], ["a", "b"], [1.0, 2.0], [3, 2, 1]):
        assert not table(a=cells)["a"].counts_up


def test_values_beyond_float32_are_refused():
    prep = Preprocessor.fit(table(a=[1, 2]))
    with pytest.raises(ValueError, match="values in a are too far"):
        prep.transform(table(a=["1e300"]))


def test_json_round_trip_gives_the_same_inputs():
    train = table(age=[1, 2.5, None, 7], city=["ä", "b, c", None, "ä"], full=[0, 1, 2, 3])
    prep = Preprocessor.fit(train, missing="impute")
    again = Preprocessor.from_dict(json.loads(json.dumps(prep.to_dict())))
    assert again == prep
    np.testing.assert_array_equal(again.transform(train).inputs, prep.transform(train).inputs)


@pytest.mark.parametrize("bad", [{}, {"columns": [{"kind": "numeric", "name": "a"}], "missing": "drop", "notes": []}])
def test_damaged_descriptions_are_refused(bad):
    with pytest.raises(ValueError, match="preprocessor"):
        Preprocessor.from_dict(bad)
