"""Laplace: seconds, peak memory and agreement of fits and linearised predictions, ours and laplace-torch's in one run.

`python -m benchmarks.laplace`: network 784-400-400-10, 10,000 points, 10 classes, prior N(0, 1). Points and weights are random,
so that no class is ruled out anywhere; "trained" contests have the first 10,000 images of MNIST and the weights that
`MAP(epochs=20)` finds for them, and ours take part twice, also with `negligible=1e-5`. Every candidate is a process of its own
and takes its turn; the ratio is the median over rounds, per row of data. laplace-torch is looked for in the environment of the
interpreter that `PLAUSIBLE_PEERS` names, then in this one; without it ours is measured alone. Peers that take minutes get fewer
rows, which the report says. Memory is the highest resident set of the first run less that before it, with network and data (for
predictions also the fitted posterior) in place, and after a run on 32 rows, which loads what is loaded once.

`python -m benchmarks.laplace limits`: Kronecker factors of a ResNet-18, and a last layer of 512 inputs and 3,100 classes.
`python -m benchmarks.laplace cuda`: the same work on a GPU, ours alone.
`python -m benchmarks.laplace floor`: the matrix products of a fit alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.laplace_problem import Job, problem, trained, with_file
from benchmarks.timing import interleave
from benchmarks.workers import Worker, serve

PEERS = ("curvlinops", "backpack", "asdl")
"""Backends of laplace-torch, its default first."""


@dataclass(frozen=True)
class Contest:
    """The same work by ours and by peers: `peers` gives the rows of each backend, `faster` what ours aims at."""

    name: str
    job: Job
    peers: dict[str, int]
    faster: float
    limit: float = 150.0


def contests() -> list[Contest]:
    """Fits of 10,000 points; predictions of 200 inputs over all weights, 1,000 over the last layer."""
    fit = Job("plausible", "fit", "kron", "all", rows=10_000, points=10_000)
    predict = replace(fit, task="predict", rows=200)
    every, most = dict.fromkeys(PEERS, 10_000), {"backpack": 50, "curvlinops": 50}
    last = {"where": "last"}
    return [
        Contest("fit, Kronecker, all weights", fit, every, 3),
        Contest("fit, diagonal, all weights", replace(fit, structure="diag"), {**every, "curvlinops": 128}, 3),
        Contest("fit, Kronecker, all weights, trained", replace(fit, network="trained"), every, 3),
        Contest(
            "fit, diagonal, all weights, trained",
            replace(fit, structure="diag", network="trained"),
            {"backpack": 10_000, "asdl": 10_000},
            3,
        ),
        Contest("fit, Kronecker, last layer", replace(fit, **last), every, 1),
        Contest("fit, full, last layer", replace(fit, structure="full", **last), dict.fromkeys(PEERS, 1_000), 1),
        Contest("predict, Kronecker, all weights", predict, most, 50),
        Contest("predict, diagonal, all weights", replace(predict, structure="diag"), {"backpack": 50}, 50),
        Contest("predict, Kronecker, last layer", replace(predict, rows=1_000, **last), dict.fromkeys(most, 1_000), 1),
    ]


# Candidates: a function that does the work once, and one that gives means and covariances of f(x) ------------------------

Candidate = tuple[Callable[[], Any], Callable[[Tensor], tuple[Tensor, Tensor]]]


def ours(job: Job) -> Candidate:
    import plausible as pl

    net, x, y = problem(job)
    method = pl.Laplace(mode=None, structure=job.structure, where=job.where, predictive="probit", negligible=job.negligible)
    data = (x[: job.points], y[: job.points])

    def fit() -> Any:
        return pl.fit(net, data, method, likelihood=pl.likelihoods.Categorical(), prior=pl.priors.Gaussian(1.0), progress=False)

    posterior = fit() if job.task == "predict" else None

    def predict() -> Tensor:
        assert posterior is not None
        return posterior.predict(x[: job.rows]).probs

    def moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return (posterior or fit()).moments(inputs)

    return (predict if job.task == "predict" else fit), moments


def theirs(job: Job) -> Candidate:
    import laplace

    net, x, y = problem(job)
    names = {"curvlinops": "CurvlinopsGGN", "backpack": "BackPackGGN", "asdl": "AsdlGGN"}
    backend = getattr(laplace.curvature, names[job.who])
    data = torch.utils.data.TensorDataset(x[: job.points], y[: job.points])
    loader = torch.utils.data.DataLoader(data, batch_size=500)
    subset = "all" if job.where == "all" else "last_layer"

    def fit() -> Any:
        found = laplace.Laplace(
            net,
            "classification",
            subset_of_weights=subset,
            hessian_structure=job.structure,
            backend=backend,
            prior_precision=1.0,
        )
        found.fit(loader)
        return found

    fitted = fit() if job.task == "predict" else None

    def predict() -> Tensor:
        assert fitted is not None
        return fitted(x[: job.rows], pred_type="glm", link_approx="probit")

    def moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return (fitted or fit())._glm_predictive_distribution(inputs)

    return (predict if job.task == "predict" else fit), moments


def peer_python() -> str | None:
    """An interpreter that can import laplace-torch."""
    for python in filter(None, (os.environ.get("PLAUSIBLE_PEERS"), sys.executable)):
        with contextlib.suppress(OSError):
            if not subprocess.run([python, "-c", "import laplace"], capture_output=True).returncode:
                return python
    return None


def child(job: Job) -> None:
    """Do a job when asked; "moments" answers means and covariances of 20 f(x)."""
    candidate = ours if job.who == "plausible" else theirs
    if job.network in ("mlp", "trained"):
        candidate(replace(job, rows=32, points=32))[0]()  # what is loaded and set up once is no cost of the work
    run, moments = candidate(job)

    def listed() -> dict[str, Any]:
        mean, covariance = moments(problem(job)[1][:20])
        return {"mean": mean.tolist(), "covariance": covariance.tolist()}

    def columns() -> dict[str, Any]:
        return {"columns": run().diagnostics().get("columns")}

    serve(run, moments=listed, columns=columns)


@contextlib.contextmanager
def workers(jobs: Sequence[Job], limit: float, peer: str | None = None) -> Iterator[list[Worker]]:
    """Processes for jobs, those of laplace-torch under the interpreter `peer`; ended afterwards."""
    started: list[Worker] = []
    try:
        for job in jobs:
            python = sys.executable if job.who == "plausible" else peer or sys.executable
            words = [python, "-m", "benchmarks.laplace", "child", json.dumps(asdict(job))]
            started.append(Worker(words, limit, quiet=job.who != "plausible"))
        yield started
    finally:
        for worker in started:
            worker.close()


# Reports --------------------------------------------------------------------------------------------------------------


def compete(contest: Contest, peer: str | None, rounds: int = 5, budget: float = 60.0) -> dict[str, Any]:
    """Take turns, and print a table of it."""
    own, jobs = contest.job, [contest.job]
    if own.network == "trained":
        jobs.append(replace(own, negligible=1e-5))
    for who, rows in contest.peers.items() if peer else ():
        jobs.append(replace(own, who=who, rows=rows, points=rows if own.task == "fit" else own.points))
    with workers(jobs, contest.limit, peer) as running:
        begun = time.perf_counter()
        for number in range(rounds + 1):
            for worker in running:
                worker.turn(number)
            if number and time.perf_counter() - begun > budget:
                break
        columns = [w.ask("columns") if j.who == "plausible" and j.task == "fit" else None for j, w in zip(jobs, running)]
    mine, found = running[0], dict[str, dict[str, float]]()
    print(f"{contest.name}, {own.rows:,} {'points' if own.task == 'fit' else 'inputs'}")
    for job, worker, looked in zip(jobs, running, columns):
        name = job.who + ("" if job.rows == own.rows else f", {job.rows:,}") + (", 1e-5" if job.negligible else "")
        if not worker.times:
            print(f"  {name:20} failed, or took more than {contest.limit:.0f} s")
            continue
        found[name] = {"rows": job.rows, "seconds": worker.seconds, "MiB": worker.bytes / 2**20}
        line = f"  {name:20} {worker.seconds:9.3f} s {worker.bytes / 2**20:9.0f} MiB"
        if worker is not mine and mine.times:
            ratio = worker.ratio(mine) * own.rows / job.rows
            found[name] |= {"slower": ratio, "larger": worker.bytes / mine.bytes}
            line += f"   {ratio:8.{1 if ratio > 1 else 2}f} × our time per row, {found[name]['larger']:6.1f} × our memory"
        if looked and looked["columns"] is not None:
            found[name]["columns"] = looked["columns"]
            line += f"   {looked['columns']:.1f} columns for each example"
        print(line, flush=True)
    rated = [row for name, row in found.items() if not name.startswith("plausible")]
    for name, row in found.items():
        if rated and name.startswith("plausible"):
            faster = min(other.get("slower", math.nan) for other in rated) / row.get("slower", 1.0)
            smaller = min(other["MiB"] for other in rated) / row["MiB"]
            print(
                f"  {name}: {faster:.1f} times faster than the fastest "
                f"(aim {contest.faster:g}: {verdict(faster >= contest.faster)}), "
                f"{smaller:.1f} times smaller than the smallest (aim 3: {verdict(smaller >= 3)})"
            )
    return found


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def agreement(peer: str, file: str | None) -> dict[str, float]:
    """Largest difference of covariances of f(x) over the largest covariance, where both are exact."""
    found = {}
    print("covariances of f(x) at 20 inputs, theirs less ours, in units of the largest; aim 1e-4")
    base = Job("plausible", "fit", "diag", "all", rows=1_000, points=1_000)
    cases = {"diag, all": base, "diag, all, trained": replace(base, network="trained", rows=10_000, points=10_000)}
    cases["diag, all, trained, negligible=1e-5"] = replace(cases["diag, all, trained"], negligible=1e-5)
    for structure, where in (("full", "last"), ("kron", "last"), ("kron", "all")):
        cases[f"{structure}, {where}"] = replace(base, structure=structure, where=where)  # type: ignore[arg-type]
    for name, job in ((name, with_file(job, file)) for name, job in cases.items()):
        if job is None:
            continue
        with workers([job, replace(job, who="backpack")], 150.0, peer) as running:
            both = [worker.ask("moments") for worker in running]
        if not all(both):
            print(f"  {name}: not to be had")
            continue
        (m, c), (n, d) = ([torch.tensor(b[key], dtype=torch.float64) for key in ("mean", "covariance")] for b in both if b)
        found[name] = float((d - c).abs().max() / c.abs().max())
        print(f"  {name}: {found[name]:.1e} (means differ by {float((n - m).abs().max()):.1e})", flush=True)
    return found


def limits() -> dict[str, Any]:
    """Fits and predictions that must stay below 2 GiB."""
    jobs = {
        "fit, Kronecker, all weights, ResNet-18, 16 images": Job("plausible", "fit", "kron", "all", 16, 16, "resnet"),
        "fit, Kronecker, last layer, 512 × 3,100, 10,000 points": Job(
            "plausible", "fit", "kron", "last", 10_000, 10_000, "classes"
        ),
        "predict, Kronecker, last layer, 512 × 3,100, 1,000 inputs": Job(
            "plausible", "predict", "kron", "last", 1_000, 10_000, "classes"
        ),
    }
    found = {}
    for name, job in jobs.items():
        with workers([job], 600.0) as (worker,):
            answer = worker.ask("run") or {"seconds": float("nan"), "bytes": float("nan")}
        size = answer["bytes"] / 2**20
        found[name] = {"seconds": answer["seconds"], "MiB": size}
        print(f"{name}: {answer['seconds']:.2f} s, {size:,.0f} MiB (aim 2,048 MiB: {verdict(size <= 2048)})")
    return found


def cuda() -> dict[str, Any]:
    """Seconds and peak memory of ours on a GPU."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    base = Job("plausible", "fit", "kron", "all", 10_000, 10_000, device="cuda")
    jobs = [replace(contest.job, device="cuda") for contest in contests()]
    jobs += [
        replace(base, rows=256, points=256, network="resnet"),
        replace(base, where="last", network="classes"),
        replace(base, task="predict", where="last", rows=1_000, network="classes"),
    ]
    found = {}
    with trained(True) as file:
        for job in filter(None, (with_file(job, file) for job in jobs)):
            run, _ = ours(job)
            times = []
            for _ in range(6):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before, begun = torch.cuda.memory_allocated(), time.perf_counter()
                run()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
            size = (torch.cuda.max_memory_allocated() - before) / 2**20
            name = f"{job.task}, {job.structure}, {job.where}, {job.network}, {job.rows:,} rows"
            found[name] = {"seconds": statistics.median(times[1:]), "MiB": size}
            print(f"  {name:44} {found[name]['seconds']:8.4f} s {size:9.0f} MiB", flush=True)
    return found


def floor(rows: int = 256, points: int = 10_000, columns: int = 10) -> dict[str, float]:
    """Seconds of the matrix products alone that fits of 10,000 points need, by chunks of 256: what no bookkeeping can undercut."""
    from plausible.blocks.curvature.layers import add_gram

    x, h, slopes = torch.rand(rows, 784), torch.rand(rows, 400), torch.rand(rows * columns, 400)
    first, second = torch.rand(784, 400), torch.rand(400, 400)
    curved, into = slopes[: rows * (columns - 1)].unsqueeze(1), [torch.rand(rows, 1, n) for n in (785, 401, 401)]
    totals, outward = [torch.zeros(1, a.shape[-1], a.shape[-1]) for a in into], torch.zeros(1, 400, 400)
    squares = [torch.zeros(a.shape[-1], 400) for a in into[:2]]

    def forward() -> int:
        x @ first
        h @ second
        return 1

    def backward() -> int:
        slopes @ second
        return 1

    def factors() -> int:
        for total, a in zip(totals, into):
            add_gram(total, a, a)
        for _ in range(2):
            add_gram(outward, curved, curved)
        return 1

    def diagonals() -> int:
        for total, a in zip(squares, into):
            total.addmm_(a[:, 0].T, h)
        return 1

    parts = {"forward": forward, "backward": backward, "factors": factors, "diagonals": diagonals}
    found = {n: statistics.median(v) * points / rows for n, v in interleave(parts, rounds=25).items()}
    shared = found["forward"] + found["backward"]
    found |= {"fit, Kronecker": shared + found["factors"], "fit, diagonal": shared + found["diagonals"]}
    print(f"products alone, {points:,} points: " + ", ".join(f"{name} {value:.2f} s" for name, value in found.items()))
    return found


def main() -> None:
    """Arguments: nothing, "limits", "cuda", "floor", or a part of the names of contests ("fit", "predict, diag", …)."""
    words = sys.argv[1:]
    warnings.simplefilter("ignore")
    if words[:1] == ["child"]:
        return child(Job(**json.loads(words[1])))
    if words[:1] == ["cuda"]:
        print(json.dumps(cuda()))
        return None
    if words[:1] == ["floor"]:
        print(json.dumps(floor()))
        return None
    result: dict[str, Any] = {}
    if words[:1] != ["limits"]:
        peer = peer_python()
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, MLP 784-400-400-10")
        if peer is None:
            print("laplace-torch is absent, ours is measured alone: PLAUSIBLE_PEERS may name an interpreter that has it")
        part = words[0] if words else ""
        wanted = [contest for contest in contests() if part in contest.name]
        agrees = peer is not None and part in ("", "agreement")
        with trained(agrees or any(contest.job.network == "trained" for contest in wanted)) as file:
            for contest in wanted:
                if own := with_file(contest.job, file):
                    result[contest.name] = compete(replace(contest, job=own), peer)
            if peer and agrees:
                result["agreement"] = agreement(peer, file)
    if not words or words[0] == "limits":
        result |= limits()
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
