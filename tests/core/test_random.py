"""Laws of the randomness: known answers, purity, the distribution of the noise, and the same bits on every path."""

import concurrent.futures
import math
import random as python_random
import shutil

import numpy as np
import pytest
import torch
from scipy import stats

from plausible.core import random
from plausible.core.random import threefry as noise
from plausible.core.random.threefry import threefry, threefry_lanes, threefry_rows

KNOWN = [  # key, counter, words: published with the generator (Random123)
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
N = 1_000_000

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler: g++ and clang++ not found"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def draw(key, counter, n=1000):
    return random.normal(key, torch.as_tensor(counter), torch.empty(n))


def million(seed=0, counter=0):
    return draw(random.key(seed), counter, N).double()


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


def rows_of(words):
    return np.random.default_rng(0).integers(0, 2**32, (4, words), dtype=np.uint32)


# --- the cipher ---


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_known_answers(key, counter, words):
    assert threefry(*key, *counter) == words
    tensors = threefry(*torch.tensor([*key, *counter]))
    assert tuple(word.item() for word in tensors) == words

    rows = np.array([*key, *counter], np.uint32)[:, None]  # lane 0 of a row has the row's own counter
    x0, x1, spare = np.empty((3, 1, 128), np.uint32)
    threefry_rows(rows, x0, x1, spare)
    assert (x0[0, 0], x1[0, 0]) == words
    lanes = threefry_lanes(torch.from_numpy(rows.view(np.int32)))
    assert tuple(word[0, 0].item() & 0xFFFFFFFF for word in lanes) == words


def test_three_ways_to_compute_the_rounds_agree():
    rows = rows_of(7)
    x0, x1, spare = np.empty((3, 7, 128), np.uint32)
    threefry_rows(rows, x0, x1, spare)
    lanes = threefry_lanes(torch.from_numpy(rows.view(np.int32)))
    wide = rows.astype(np.int64)[:, :, None]
    plain = threefry(wide[0], wide[1], (wide[2] + np.arange(128)) & 0xFFFFFFFF, wide[3])
    for found, lane, expected in zip((x0, x1), lanes, plain):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(lane.numpy().view(np.uint32), expected)


# --- keys ---


def test_key_is_pure_and_a_path_is_a_fold():
    assert torch.equal(random.key(3, 1, 4), random.key(3, 1, 4))
    assert torch.equal(random.key(3, 1, -4), random.fold(random.key(3), 1, torch.tensor(-4)))
    assert random.key(3).dtype == torch.int64
    assert random.key(3).shape == (2,)


def test_keys_are_all_different():
    seeds = [0, 1, -1, 2**32, 2**64, 2**200, -(2**63)]
    keys = [random.key(seed) for seed in seeds] + [random.key(0, step) for step in (0, 1, -1, 2**32, 2**40)]
    keys += [random.key(0, 0, 1), random.key(0, 1, 0)]
    words = {tuple(key.tolist()) for key in keys}
    assert len(words) == len(keys)
    assert all(0 <= word < 2**32 for pair in words for word in pair)


def test_fold_batched_mapped_and_on_other_devices_equals_the_loop():
    key, members = random.key(0), torch.arange(5)
    keys = random.fold(key, members)  # [5, 2]
    assert torch.equal(keys, torch.stack([random.key(0, i) for i in range(5)]))
    assert torch.equal(torch.func.vmap(random.fold, in_dims=(None, 0))(key, members), keys)
    twice = torch.stack([random.key(0, i, 10 + i) for i in range(5)])
    assert torch.equal(random.fold(keys, members + 10), twice)
    assert torch.equal(torch.func.vmap(random.fold)(keys, members + 10), twice)
    assert torch.equal(torch.func.vmap(lambda k: random.fold(k, 7))(keys), random.fold(keys, 7))
    tensors = torch.stack(noise.fold_words(keys[:, 0], keys[:, 1], members + 10), -1)  # what a GPU computes
    assert torch.equal(tensors, twice)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: random.key(1.5), "seed"),
        (lambda: random.key(0, "a"), "path"),
        (lambda: random.fold(random.key(0), torch.tensor(1.0)), "data"),
        (lambda: random.normal(random.key(0), 0.5, torch.empty(3)), "counter"),
        (lambda: random.normal(random.key(0), 0, {"steps": torch.zeros(3, dtype=torch.int64)}), "like"),
        (lambda: random.generator(None), "seed"),
    ],
)
def test_wrong_types_are_named(call, name):
    with pytest.raises(TypeError, match=name):
        call()


# --- the law of the noise ---


def test_normal_moments_within_five_standard_errors():
    z = million()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10395 - 225)):
        assert abs(z.pow(power).mean().item() - mean) < 5 * math.sqrt(variance / N), power


def test_normal_distribution():
    assert stats.kstest(million().numpy(), "norm").pvalue > 1e-4
    tail = (million(1).abs() > 4).sum().item()
    expected = N * 2 * stats.norm.sf(4)
    assert abs(tail - expected) < 5 * math.sqrt(expected)


def test_normals_of_a_pair_are_independent():
    first, second = million()[: N // 256 * 256].view(-1, 2, 128).unbind(1)
    bound = 5 / math.sqrt(first.numel())
    for f in (lambda x: x, torch.abs, torch.square):
        assert abs(correlation(f(first).flatten(), f(second).flatten())) < bound
    angle = torch.atan2(second, first).flatten() / (2 * math.pi) + 0.5
    assert stats.kstest(angle.numpy(), "uniform").pvalue > 1e-4


def test_neighbours_counters_keys_and_members_are_uncorrelated():
    n, key = 200_000, random.key(0)
    z = draw(key, 7, n)
    others = [draw(key, c, n) for c in (6, 8, 7 + 2**32)]
    others += [draw(random.key(1), 7, n), draw(random.key(0, 0), 7, n), draw(random.key(0, 1), 7, n)]
    others += [z.roll(shift) for shift in (1, 2, 128, 256)]
    others += [stats_normal(random.uniform(key, torch.tensor(7), torch.empty(n)))]
    bound = 5 / math.sqrt(n)
    for other in others:
        assert abs(correlation(z, other)) < bound
        assert abs(correlation(z.square(), other.square())) < bound


def stats_normal(u):
    return torch.special.ndtri(u.double())


def test_one_weight_over_consecutive_counters_is_white():
    steps = 40_000
    z = draw(random.key(5), torch.arange(steps), 4).double()  # [steps, 4]: what a weight sees during a run
    assert stats.kstest(z[:, 0].numpy(), "norm").pvalue > 1e-4
    for lag in (1, 2, 3, 10):
        for f in (lambda x: x, torch.square):
            assert abs(correlation(f(z[:-lag, 1]), f(z[lag:, 1]))) < 5 / math.sqrt(steps)


def test_extreme_words_give_finite_numbers():
    x0 = np.array([[0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]], np.uint32)
    x1 = np.array([[0, 0, 0x80000000, 0x40000000]], np.uint32)
    out = np.empty((1, 2, 4), np.float32)
    noise._normal_numpy(x0.copy(), x1.copy(), np.empty_like(x0), out)
    largest = math.sqrt(2 * 32 * math.log(2))  # 6.66 standard deviations
    np.testing.assert_allclose(out[0, :, 0], [largest, 0], rtol=1e-6)
    np.testing.assert_allclose(out[0, :, 2], [-largest, 0], atol=1e-6)
    assert np.all(out[0, :, [1, 3]] == 0)
    noise._uniform_numpy(x0.copy(), x1.copy(), np.empty_like(x0), out)
    np.testing.assert_array_equal(out[0, 0], [2.0**-24, 0.5 - 2.0**-24, 0.5 + 2.0**-24, 1 - 2.0**-24])


def test_uniform_distribution_and_open_interval():
    key, counter = random.key(2), torch.tensor(0)
    u = random.uniform(key, counter, torch.empty(N))
    assert 0 < u.min() < u.max() < 1
    assert stats.kstest(u.double().numpy(), "uniform").pvalue > 1e-4
    assert abs(correlation(u[:-1], u[1:])) < 5 / math.sqrt(N)
    for dtype in (torch.bfloat16, torch.float16):
        half = random.uniform(key, counter, torch.empty(N, dtype=dtype))
        assert 0 < half.min() < half.max() < 1


# --- a pure function of key and counter ---


def test_a_longer_draw_begins_with_the_shorter_one():
    key = random.key(0)
    longest = draw(key, 3, 100_001)
    for n in (0, 1, 2, 255, 256, 257, 5000, 40_000):
        assert torch.equal(draw(key, 3, n), longest[:n])


@pytest.mark.parametrize("n", [1, 300, 3000, 20_000])
def test_order_of_asking_and_what_was_made_ahead_change_no_bit(n):
    keys = [random.key(0), random.key(1)]
    noise._streams.clear()
    expected = {}
    for counter in reversed(range(30)):  # backwards: nothing is made ahead
        for which, key in enumerate(keys):
            expected[which, counter] = draw(key, counter, n)
    asked = [*range(30), *range(28), 3, 4, 4, 5, 29, 0, *range(0, 30, 2)]
    noise._streams.clear()
    for counter in asked:
        for which, key in enumerate(keys):
            found = draw(key, counter, n)
            assert torch.equal(found, expected[which, counter])
            found.zero_()  # what the caller does with its noise stays with the caller
    together = random.fold(random.key(9), torch.arange(3))
    for counter in asked[:40]:
        batch = draw(together, torch.tensor([0, 5, 1]) + counter, n)
        for member, offset in enumerate((0, 5, 1)):
            assert torch.equal(batch[member], draw(together[member], counter + offset, n))


def test_making_ahead_is_bounded_and_saves_passes(monkeypatch):
    passes = []
    fill = noise.fill
    monkeypatch.setattr(noise, "fill", lambda kind, rows, lanes: passes.append(rows.shape[1]) or fill(kind, rows, lanes))
    noise._streams.clear()
    for counter in range(100):
        draw(random.key(0), counter, 3000)
    assert len(passes) <= 12
    assert max(passes) * 256 <= noise._AHEAD
    for seed in range(200):
        draw(random.key(seed), 0, 10)
    assert len(noise._streams) <= noise._STREAMS


def test_threads_get_the_same_bits():
    expected = [draw(random.key(0), counter, 500) for counter in range(64)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(lambda counter: draw(random.key(0), counter, 500), range(64))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_noise_for_named_weights():
    like = {"a": torch.empty(4, 3), "b": torch.empty(()), "c": torch.empty(5, dtype=torch.float64), "d": torch.empty(0)}
    noise = random.normal(random.key(0), torch.tensor(2), like)
    assert {name: (z.shape, z.dtype) for name, z in noise.items()} == {n: (t.shape, t.dtype) for n, t in like.items()}
    flat = torch.cat([z.flatten().double() for z in noise.values()])
    assert torch.equal(flat, draw(random.key(0), 2, 18).double())
    assert torch.equal(random.normal(random.key(0), 2, like)["a"], noise["a"])
    assert random.normal(random.key(0), 2, {}) == {}


def test_large_and_negative_counters_have_streams_of_their_own():
    counters = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**62, -1, -(2**40)]
    draws = torch.stack([draw(random.key(0), counter, 8) for counter in counters])
    assert len(draws.unique(dim=0)) == len(counters)
    assert torch.equal(draws, draw(random.key(0), torch.tensor(counters), 8))
    beyond = [draw(random.key(4), 2**32 - 2 + step, 8) for step in range(6)]  # made ahead across the boundary
    assert torch.equal(torch.stack(beyond[::-1]), draw(random.key(4), 2**32 + 3 - torch.arange(6), 8))


# --- under the transforms of torch.func ---


def noise_of(key, counter):
    return random.normal(key, counter, {"a": torch.empty(7, 3), "b": torch.empty(())})


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_mapped_equals_looped(axes):
    keys, counters = random.fold(random.key(0), torch.arange(4)), torch.arange(4) + 5
    arguments = (keys if axes[0] == 0 else keys[0], counters if axes[1] == 0 else counters[0])
    mapped = torch.func.vmap(noise_of, in_dims=axes)(*arguments)
    for i in range(4):
        alone = noise_of(keys[i] if axes[0] == 0 else keys[0], counters[i] if axes[1] == 0 else counters[0])
        for name, z in alone.items():
            assert torch.equal(mapped[name][i], z)


def test_nested_maps():
    keys = random.fold(random.key(0), torch.arange(6)).view(2, 3, 2)
    counters = torch.tensor([4, 8])
    mapped = torch.func.vmap(lambda k, c: torch.func.vmap(noise_of, in_dims=(0, None))(k, c))(keys, counters)
    for i in range(2):
        for j in range(3):
            assert torch.equal(mapped["a"][i, j], noise_of(keys[i, j], counters[i])["a"])


def test_maps_over_batches():
    keys, counters = random.fold(random.key(0), torch.arange(3)), torch.tensor([4, 8])
    expected = torch.stack([torch.stack([draw(key, counter, 5) for key in keys]) for counter in counters])  # [2, 3, 5]
    assert torch.equal(torch.func.vmap(lambda counter: draw(keys, counter, 5))(counters), expected)
    assert torch.equal(torch.func.vmap(lambda key: draw(key, counters, 5))(keys), expected.transpose(0, 1))


def test_constant_under_grad():
    key, counter, weight = random.key(0), torch.tensor(1), torch.linspace(-1, 1, 9)

    def loss(w, k):
        return ((w + random.normal(k, counter, w)) ** 2).sum()

    expected = 2 * (weight + random.normal(key, counter, weight))
    torch.testing.assert_close(torch.func.grad(loss)(weight, key), expected)
    keys = random.fold(key, torch.arange(3))
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, keys)
    torch.testing.assert_close(mapped, torch.stack([torch.func.grad(loss)(weight, k) for k in keys]))


def test_operators_obey_the_rules_of_the_dispatcher():
    keys = random.fold(random.key(0), torch.arange(3))
    for operator in (torch.ops.plausible.normal, torch.ops.plausible.uniform):
        for arguments in ((keys[0], torch.tensor(1), 5), (keys, torch.tensor(1), 300), (keys, torch.arange(3), 0)):
            torch.library.opcheck(operator, arguments)
    torch.library.opcheck(torch.ops.plausible.fold, (keys, torch.tensor(1)))


# --- compiled ---


def step(state, key, counter):
    """One step of Langevin diffusion for a Gaussian, with a key derived inside."""
    noise = random.normal(random.fold(key, 3), counter, state)
    gradient = torch.func.grad(lambda w: sum((t**2).sum() for t in w.values()))(state)
    return {name: w - 0.01 * gradient[name] + 0.1 * noise[name] for name, w in state.items()}


@pytest.mark.slow
@pytest.mark.compile
@needs_compiler
def test_inside_a_compiled_step():
    state = {"a": torch.ones(30, 20), "b": torch.zeros(())}
    compiled = torch.compile(step, fullgraph=True)
    for counter in torch.arange(4):
        expected, found = step(state, random.key(0), counter), compiled(state, random.key(0), counter)
        for name in state:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    keys = random.fold(random.key(0), torch.arange(3))
    stacked = {name: torch.stack([t] * 3) for name, t in state.items()}
    mapped = torch.func.vmap(step, in_dims=(0, 0, None))
    found = torch.compile(mapped, fullgraph=True, backend="aot_eager")(stacked, keys, torch.tensor(1))
    for name, expected in mapped(stacked, keys, torch.tensor(1)).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)


def assert_backends_agree(draw_function, n):
    keys = random.fold(random.key(0), torch.arange(3))
    for key, counter in ((keys[0], torch.tensor(0)), (keys, torch.tensor(1)), (keys[1], torch.tensor(2**33))):
        with random.use_compiled(False):
            expected = draw_function(key, counter, torch.empty(n))
        with random.use_compiled(True):
            found = draw_function(key, counter, torch.empty(n))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.compile
@needs_compiler
def test_compiled_kernel_equals_numpy():
    compilations = torch._dynamo.utils.counters["frames"]["ok"]
    with torch.inference_mode():  # and neither inference mode nor a size compiles it again
        assert_backends_agree(random.normal, 1)
    for n in (1, 300, 3000, 100_000):
        assert_backends_agree(random.normal, n)
    with torch.enable_grad():
        assert_backends_agree(random.normal, 5000)
    assert torch._dynamo.utils.counters["frames"]["ok"] <= compilations + 1
    assert not noise._broken
    # a compiled step looks the choice up when it runs
    seen = []
    original = noise._fill_compiled
    noise._fill_compiled = lambda *a: seen.append(1) or original(*a)
    try:
        compiled = torch.compile(lambda k, c: 2 * random.normal(k, c, torch.empty(40_000)), fullgraph=True)
        key, counter = random.key(0), torch.tensor(1)
        plain = compiled(key, counter)
        assert not seen
        with random.use_compiled(True):
            torch.testing.assert_close(compiled(key, counter), plain, rtol=1e-6, atol=1e-6)
        assert seen
    finally:
        noise._fill_compiled = original


@pytest.mark.compile
@pytest.mark.slow
@needs_compiler
def test_compiled_uniforms_equal_numpy():
    for n in (1, 300, 100_000):
        assert_backends_agree(random.uniform, n)
    assert not noise._broken


def test_a_failing_kernel_is_said_and_replaced(monkeypatch):
    def no_compiler(*_arguments):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(noise, "_broken", False)
    monkeypatch.setattr(noise, "_kernel", lambda _kind: no_compiler)
    expected = draw(random.key(0), 0, 50_000)
    with random.use_compiled(True):
        with pytest.warns(RuntimeWarning, match="no compiler here"):
            assert torch.equal(draw(random.key(0), 0, 50_000), expected)
        assert torch.equal(draw(random.key(0), 0, 50_000), expected)  # and quiet from then on


# --- generators of others ---


def test_global_generators_are_untouched():
    def states():
        return torch.get_rng_state(), python_random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002

    before = states()
    draw(random.key(0), 0)
    random.permutation(0, 0, 10)
    random.generator(1, 2)
    with random.isolated(0):
        torch.rand(3)
    after = states()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_isolated_is_repeatable_and_restores_after_an_error():
    def inside(seed):
        with random.isolated(seed):
            return torch.randn(5)

    first = inside(0)
    torch.rand(7)
    assert torch.equal(inside(0), first)
    assert not torch.equal(inside(1), first)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), random.isolated(0):
        torch.rand(3).view(2, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_are_pure_and_differ():
    def numbers(*path):
        return torch.rand(4, generator=random.generator(*path))

    assert torch.equal(numbers(0, 1), numbers(0, 1))
    assert len(torch.stack([numbers(0), numbers(1), numbers(0, 0), numbers(0, 1), numbers(-1)]).unique(dim=0)) == 5


def test_permutations_are_pure_and_uniform():
    assert torch.equal(random.permutation(0, 3, 100), random.permutation(0, 3, 100))
    assert not torch.equal(random.permutation(0, 3, 100), random.permutation(0, 4, 100))
    assert not torch.equal(random.permutation(0, 3, 100), random.permutation(1, 3, 100))
    assert torch.equal(random.permutation(0, 3, 100).sort().values, torch.arange(100))
    orders = [tuple(random.permutation(0, epoch, 4).tolist()) for epoch in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


# --- on a GPU ---


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_noise_is_native_and_isolated():
    like = {"a": torch.empty(500, 400, device="cuda"), "b": torch.empty((), device="cuda", dtype=torch.float64)}
    key, counter = random.key(0, device="cuda"), torch.tensor(0, device="cuda")
    before = torch.cuda.get_rng_state()

    def drawn(seed):
        with random.isolated(seed, "cuda"):
            return random.normal(key, counter, like)

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(first["a"], again["a"])
    assert not torch.equal(first["a"], other["a"])
    assert {name: (z.shape, z.dtype) for name, z in first.items()} == {n: (t.shape, t.dtype) for n, t in like.items()}
    assert stats.kstest(first["a"].flatten().double().cpu().numpy(), "norm").pvalue > 1e-4
    u = random.uniform(key, counter, torch.empty(N, device="cuda"))
    assert 0 < u.min() < u.max() < 1
    assert torch.equal(random.fold(key, 3, torch.tensor(5, device="cuda")).cpu(), random.key(0, 3, 5))
    keys = random.fold(key, torch.arange(3, device="cuda"))
    assert random.normal(keys, counter, like)["a"].shape == (3, 500, 400)
    mapped = torch.func.vmap(lambda k: random.normal(k, counter, like), randomness="different")(keys)
    assert abs(correlation(mapped["a"][0].flatten(), mapped["a"][1].flatten())) < 5 / math.sqrt(200_000)


@pytest.mark.cuda
@pytest.mark.compile
@needs_cuda
def test_on_a_gpu_inside_a_compiled_step():
    state = {"a": torch.zeros(1000, 100, device="cuda")}
    key, counter = random.key(0, device="cuda"), torch.tensor(0, device="cuda")
    compiled = torch.compile(lambda s, c: random.normal(key, c, s)["a"], fullgraph=True)
    first, second = compiled(state, counter), compiled(state, counter + 1)
    assert abs(correlation(first.flatten(), second.flatten())) < 5 / math.sqrt(first.numel())
    assert stats.kstest(first.flatten().double().cpu().numpy(), "norm").pvalue > 1e-4
