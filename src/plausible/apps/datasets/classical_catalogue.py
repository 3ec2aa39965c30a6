"""The part of the catalogue with small classical sets."""

from __future__ import annotations

from plausible.apps.datasets.entries import Direct, Entry, File

GITHUB = "https://raw.githubusercontent.com"
RDATASETS = "https://github.com/vincentarelbundock/Rdatasets"


def file(path: str, size: int, sha256: str, content: str, origin: str | None) -> File:
    """A file below `small/`; `origin` is the repository and the path there."""
    source = None
    if origin is not None:
        owner, repository, below = origin.split("/", 2)
        source = Direct((f"{GITHUB}/{owner}/{repository}/HEAD/{below}",))
    return File(f"small/{path}", size, sha256, content, source)


SMALL = (
    Entry(
        "lynx",
        "series",
        "114",
        "Canadian lynx trappings, 1821 to 1934",
        "GPL",
        "Campbell and Walker 1977, A survey of statistical work on the Mackenzie River series",
        RDATASETS,
        (
            file(
                "lynx.csv",
                1_438,
                "0766d4043eb8a20ac83afefff1c78063beff3891571c59e8e38d72503ca86cf1",
                "sha256:ea3e07f5eea35ad71bee0db4812c4f4e62247656255370dfefe72516b8f8aa01",
                "vincentarelbundock/Rdatasets/csv/datasets/lynx.csv",
            ),
        ),
    ),
    Entry(
        "airquality",
        "regression",
        "153",
        "New York air quality, 1973; 111 complete rows",
        "GPL",
        "Chambers, Cleveland, Kleiner, Tukey 1983, Graphical methods for data analysis",
        RDATASETS,
        (
            file(
                "airquality.csv",
                3_315,
                "65d2c4afd976c169af9bb0bd97e9e78e1e8a185f1b52e2e3153e30f90c7fb5f8",
                "sha256:1814302fbc70ff2f201a8ca439289ec455600e5d67abf1369ea2ce94bbbf44e1",
                "vincentarelbundock/Rdatasets/csv/datasets/airquality.csv",
            ),
        ),
    ),
    Entry(
        "ozone",
        "regression",
        "330",
        "Los Angeles ozone, 1976; 9 inputs",
        "GPL-3",
        "Breiman and Friedman 1985, Estimating optimal transformations",
        "https://cran.r-project.org/package=earth (`ozone1`)",
        (
            file(
                "ozone.csv",
                18_050,
                "4ee84761332e0c622542b66b9e2f0a4ffc096145e127af19bd67f3f56f52a87d",
                "sha256:5595ef35568545532db2d4b1de8be3fee2ade783901bb4b0cecbfd7a48288db7",
                None,
            ),
        ),
    ),
    Entry(
        "auto_fuel",
        "regression",
        "392",
        "fuel consumption of cars; 7 inputs",
        "GPL",
        "Quinlan 1993, Combining instance-based and model-based learning",
        RDATASETS,
        (
            file(
                "auto_fuel.csv",
                18_944,
                "0cb5b8651c0af5448a9808f703bfad5a44e6c64e0742347d522d8bc2b92136d2",
                "sha256:714c52928cbed17ec6959e2eeefffc8eee4e747f653866b77bf231e522099f62",
                "vincentarelbundock/Rdatasets/csv/ISLR/Auto.csv",
            ),
        ),
    ),
    Entry(
        "nlschools",
        "regression",
        "2,287",
        "language scores of Dutch pupils in classes",
        "GPL",
        "Snijders and Bosker 1999, Multilevel analysis",
        RDATASETS,
        (
            file(
                "nlschools.csv",
                57_214,
                "d1ced305b7fea1e97c47b90db7a99fef107279cbaa8daa75cc1956ebf1b844d0",
                "sha256:0d4a1a80d88444dc8307f8a7631007cb8a1c6970761c96420230026db3a51e00",
                "vincentarelbundock/Rdatasets/csv/MASS/nlschools.csv",
            ),
        ),
    ),
    Entry(
        "mcycle",
        "regression",
        "133",
        "head acceleration in a motorcycle crash; heteroscedastic",
        "GPL",
        "Silverman 1985, Some aspects of the spline smoothing approach",
        RDATASETS,
        (
            file(
                "mcycle.csv",
                1_753,
                "b89a1e4eb0391a982b32be3e378df00e8593ff9971e9425e9c5d7929b74f9801",
                "sha256:4f9be0bda8237b911eb2f96a3b08eb2ee207129d648d4907b6107ba8901391bc",
                "vincentarelbundock/Rdatasets/csv/MASS/mcycle.csv",
            ),
        ),
    ),
    Entry(
        "galaxies",
        "density",
        "82",
        "velocities of galaxies in km/s",
        "GPL",
        "Roeder 1990, Density estimation with confidence sets",
        RDATASETS,
        (
            file(
                "galaxies.csv",
                737,
                "5c094d8beb8ecc980493de62e9fd4d2cf7f891b07aed6b1c55a5b42879f498d0",
                "sha256:187413e2f81a2fa6397b203d89b5455ba239d6315ef1fe88ceafdfd29c1a9fa0",
                "vincentarelbundock/Rdatasets/csv/MASS/galaxies.csv",
            ),
        ),
    ),
    Entry(
        "co2_monthly",
        "series",
        "468",
        "CO2 at Mauna Loa, monthly, 1959 to 1997",
        "GPL",
        "Keeling and Whorf 1997, Scripps Institution of Oceanography",
        RDATASETS,
        (
            file(
                "mauna_loa_co2_monthly.csv",
                12_431,
                "16f9baa6f3986f31d5b4585d14f5479471a719906638626570ea96faab038807",
                "sha256:d951b544dd96baae76d7bd0afcdca50fdb0ea71d1eb3509fb0a5a99e77075c75",
                "vincentarelbundock/Rdatasets/csv/datasets/co2.csv",
            ),
        ),
        ("mauna_loa_co2_monthly",),
    ),
    Entry(
        "co2_weekly",
        "series",
        "2,284",
        "CO2 at Mauna Loa, weekly, 1958 to 2001; 2,225 complete rows",
        "public domain",
        "Keeling and Whorf 2004, Scripps Institution of Oceanography",
        "https://github.com/statsmodels/statsmodels",
        (
            file(
                "mauna_loa_co2_weekly.csv",
                33_974,
                "16695fa2786e53414e5a6b54767a3fdf5de99cfbc68617f69d1362d92776a92f",
                "sha256:126475014fb0312714d436dc9b8590adb618757b99bd9dfd8195c9bb9d4cf6ac",
                "statsmodels/statsmodels/statsmodels/datasets/co2/co2.csv",
            ),
        ),
        ("mauna_loa_co2_weekly",),
    ),
    Entry(
        "robot_arm",
        "regression",
        "200 + 400",
        "joint angles to the place of a robot's hand; 2 targets",
        "BSD",
        "MacKay 1992, A practical Bayesian framework for backpropagation networks",
        "https://github.com/jeremyfix/easykf",
        (
            file(
                "robot_arm/Mackay-inputs.data",
                11_999,
                "e7f02c69c45c21c7fdef40c4e2a88e67b0ea5c5a730ce9fe8ab3cb2b22cc4f12",
                "sha256:f7040978c126bf8952e062dacc73dd4c03f24f7aa796d3f620285ae674179431",
                "jeremyfix/easykf/examples/Data/Mackay-inputs.data",
            ),
            file(
                "robot_arm/Mackay-outputs.data",
                12_024,
                "a59ed45cd3570f4ead9257e24343fac9292014da9ccbd1375d36bd50d734c455",
                "sha256:2d6aea5632aba3a8bc2c9091d4a2e34e4b16dbc892d19270d0b84c47874f94fd",
                "jeremyfix/easykf/examples/Data/Mackay-outputs.data",
            ),
        ),
    ),
    Entry(
        "neal_regression",
        "regression",
        "100 + 1,000",
        "a smooth curve with noise 0.1",
        "attribution",
        "Neal 1998, Software for flexible Bayesian modeling",
        "https://github.com/radfordneal/fbm",
        (
            file(
                "neal/rdata",
                23_100,
                "3a6660873f0df220fc352be7a2ace8db4813415045fd17281ac04f0bcfadf192",
                "sha256:92aebb986001f9a533b2800cd0c31ac7530085424b77a65255ff2dbe8518d2d1",
                "radfordneal/fbm/ex-netgp/rdata",
            ),
        ),
    ),
    Entry(
        "neal_binary",
        "classes",
        "300 + 1,000",
        "two inputs, two classes",
        "attribution",
        "Neal 1998, Software for flexible Bayesian modeling",
        "https://github.com/radfordneal/fbm",
        (
            file(
                "neal/bdata",
                27_300,
                "64138759fb8dd86f42c32654859aefea134e5cd141d7a2bfa77449c9c5685cb7",
                "sha256:6d7ecd3d49e4c0d54788b89d74215eba7e27cd79582ebf9fcbf5717bee4cc78e",
                "radfordneal/fbm/ex-netgp/bdata",
            ),
        ),
    ),
    Entry(
        "neal_classes",
        "classes",
        "400 + 1,000",
        "four inputs of which two carry nothing, three classes",
        "attribution",
        "Neal 1998, Software for flexible Bayesian modeling",
        "https://github.com/radfordneal/fbm",
        (
            file(
                "neal/cdata",
                54_600,
                "f86bcbe22445de810680324e97a67557ded5a1a03e015b9f347fb348e528b947",
                "sha256:7cf2e85861e5c06ede7b1e364fd5d752e83fb443609ecf07e9bf1b672ff0e184",
                "radfordneal/fbm/ex-netgp/cdata",
            ),
        ),
    ),
    Entry(
        "inbetween_axis",
        "regression",
        "100",
        "two clusters of inputs parted along one axis",
        "MIT",
        "Foong, Burt, Li, Turner 2020, On the expressiveness of approximate inference in BNNs",
        "https://github.com/cambridge-mlg/expressiveness-approx-bnns",
        (
            file(
                "inbetween_2d/axis_x.txt",
                5_050,
                "1e48e3e090b39914ebe2f05bd9416dba5c37da21d07fa40deff53bcb681d38b2",
                "sha256:1e48e3e090b39914ebe2f05bd9416dba5c37da21d07fa40deff53bcb681d38b2",
                "cambridge-mlg/expressiveness-approx-bnns/datasets/axis/axis_x.txt",
            ),
            file(
                "inbetween_2d/axis_y.txt",
                2_500,
                "8b745ed34b83af2dcc2a9ecf65a1e8379df58eb7fcf44bbff6e40cf039c127eb",
                "sha256:8b745ed34b83af2dcc2a9ecf65a1e8379df58eb7fcf44bbff6e40cf039c127eb",
                "cambridge-mlg/expressiveness-approx-bnns/datasets/axis/axis_y.txt",
            ),
        ),
    ),
    Entry(
        "inbetween_origin",
        "regression",
        "100",
        "two clusters of inputs on either side of the origin",
        "MIT",
        "Foong, Burt, Li, Turner 2020, On the expressiveness of approximate inference in BNNs",
        "https://github.com/cambridge-mlg/expressiveness-approx-bnns",
        (
            file(
                "inbetween_2d/origin_x.txt",
                5_100,
                "0138acedcb795f3abf15fc140681fb36c80ddee86433f140fe0132eca711b237",
                "sha256:0138acedcb795f3abf15fc140681fb36c80ddee86433f140fe0132eca711b237",
                "cambridge-mlg/expressiveness-approx-bnns/datasets/origin/origin_x.txt",
            ),
            file(
                "inbetween_2d/origin_y.txt",
                2_551,
                "422bf501f1b40f281f3e1a90355ac68bd55d48073a591eba994d0b24614d7fb9",
                "sha256:422bf501f1b40f281f3e1a90355ac68bd55d48073a591eba994d0b24614d7fb9",
                "cambridge-mlg/expressiveness-approx-bnns/datasets/origin/origin_y.txt",
            ),
        ),
    ),
)
