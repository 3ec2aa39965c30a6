"""The nine UCI regression sets with their splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import UCI, entry
from plausible.apps.datasets.digests import DAMAGED, damaged, members, numbers
from plausible.apps.datasets.results import Table

COLUMNS = {
    "boston": "CRIM ZN INDUS CHAS NOX RM AGE DIS RAD TAX PTRATIO B LSTAT MEDV",
    "concrete": "cement slag fly_ash water superplasticiser coarse_aggregate fine_aggregate age strength",
    "energy": "compactness surface_area wall_area roof_area height orientation glazing_area glazing_distribution heating_load",
    "kin8nm": "theta1 theta2 theta3 theta4 theta5 theta6 theta7 theta8 distance",
    "naval": "lever speed shaft_torque turbine_rate generator_rate starboard_torque port_torque turbine_exit_temperature "
    "compressor_inlet_temperature compressor_outlet_temperature turbine_exit_pressure compressor_inlet_pressure "
    "compressor_outlet_pressure exhaust_pressure injection_control fuel_flow compressor_decay",
    "power": "temperature vacuum pressure humidity output",
    "protein": "F1 F2 F3 F4 F5 F6 F7 F8 F9 RMSD",
    "wine": "fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_sulfur_dioxide total_sulfur_dioxide "
    "density pH sulphates alcohol quality",
    "yacht": "buoyancy prismatic length_displacement beam_draught length_beam froude resistance",
}
"""Names of the inputs and, last, of the target."""


def uci(name: str, dtype: torch.dtype = torch.float32) -> Table:
    """One of boston, concrete, energy, kin8nm, naval, power, protein, wine, yacht, with the splits of the literature.

    x `[N, inputs]`, y `[N, 1]`. `split(k)` are the 20 random splits (5 for protein) of Hernández-Lobato and Adams 2015, 90 %
    for training; `gap(d)` those of Foong et al. 2019, where the middle third along input d is the test set. The custom is to
    standardise by the training rows and report in the units of the target:

        split = uci("boston").split(0).standardised()
        posterior = pl.fit(net, split.train)
        split.restore(posterior.predict(split.test[0]))  # against uci("boston").split(0).test[1]
    """
    known = entry(name)
    if known not in UCI:
        raise ValueError(f"{name!r} is not one of the UCI sets {', '.join(COLUMNS)}; see plausible.datasets.load")
    (path,) = ensure(known)
    try:
        return read(path, known.name, dtype)
    except DAMAGED as error:
        raise damaged(path, known.name, error) from None


def read(path: Path, name: str, dtype: torch.dtype) -> Table:
    """An archive of text files → a table; anything inconsistent in it is an error."""
    files = {member.partition("/")[2]: raw for member, raw in members(path.read_bytes()).items()}
    values = numbers(files["data/data.txt"], entry(name).count)
    inputs, target = whole(files["data/index_features.txt"]), whole(files["data/index_target.txt"])
    *features, aim = COLUMNS[name].split()
    if len(inputs) != len(features) or len(target) != 1:
        raise ValueError(f"{len(inputs)} inputs and {len(target)} targets, expected {len(features)} and 1")
    return Table(
        name,
        torch.from_numpy(values[:, inputs]).to(dtype),
        torch.from_numpy(values[:, target]).to(dtype),
        tuple(features),
        (aim,),
        splits(files, "data", len(values)),
        splits(files, "gap", len(values)),
        hidden=100 if name == "protein" else 50,
    )


def whole(raw: bytes) -> np.ndarray:
    """Numbers separated by blanks or lines, all of them whole → int64."""
    values = numbers(raw, 1)[0]
    found = values.astype(np.int64)
    if (found != values).any():
        raise ValueError("an index is not a whole number")
    return found


def splits(files: dict[str, bytes], folder: str, rows: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """`index_train_K.txt` and `index_test_K.txt` for K = 0, 1, … → row numbers in the order of the files."""
    found: list[tuple[Tensor, Tensor]] = []
    while f"{folder}/index_train_{len(found)}.txt" in files:
        pair = tuple(whole(files[f"{folder}/index_{part}_{len(found)}.txt"]) for part in ("train", "test"))
        if not np.array_equal(np.sort(np.concatenate(pair)), np.arange(rows)):
            raise ValueError(f"split {len(found)} of {folder} does not use every row once")
        found.append((torch.from_numpy(pair[0]), torch.from_numpy(pair[1])))
    return tuple(found)
