"""Expected utility: brute force, invariances, Chow's rule, what information is worth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from plausible.analysis.decisions import decide, value_of_epistemic_information, value_of_perfect_information
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from plausible.posteriors.predictive import Predictive

Z = 5.0  # standard errors that Monte Carlo may be off


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS = 2 * random(6, 40, 4)  # 6 draws, 40 inputs, 4 classes
PROBS = LOGITS.softmax(-1)
PREDICTIVE = Predictive.from_functions(LOGITS, Categorical())
UTILITY = torch.tensor([[1.0, 0.0, -1.0, 0.2], [0.0, 1.5, 0.0, -1.0], [-0.5, 0.0, 1.0, 0.7]], dtype=torch.float64)


def test_zero_one_utility_is_the_most_probable_class():
    decision = decide(PREDICTIVE, torch.eye(4))
    assert torch.equal(decision.action, PREDICTIVE.probs.argmax(-1))
    torch.testing.assert_close(decision.expected_utility, PREDICTIVE.probs.amax(-1))
    assert decision.chosen == decision.action.tolist()
    assert len(decision) == 40
    assert not decision.rejected.any()


def test_matrix_is_brute_force():
    decision = decide(PREDICTIVE, UTILITY)
    mean = PROBS.mean(0)
    for n in range(40):
        by_hand = [sum(float(mean[n, c] * UTILITY[a, c]) for c in range(4)) for a in range(3)]
        assert int(decision.action[n]) == int(np.argmax(by_hand))
        assert float(decision.expected_utility[n]) == pytest.approx(max(by_hand))
        assert decision.utilities[n].tolist() == pytest.approx(by_hand)
        low, high = sorted(by_hand)[-2:]
        assert float(decision.margin[n]) == pytest.approx(high - low)
    assert not decision.standard_error.any()
    assert not decision.margin_error.any()


def test_every_way_to_say_the_same_agrees():
    reference = decide(PREDICTIVE, UTILITY).utilities
    table = UTILITY.tolist()
    for given in (PROBS, PROBS.mean(0), PROBS.mean(0).numpy(), PROBS.mean(0).tolist()):
        for utility in (UTILITY, UTILITY.numpy(), table, UTILITY.expand(40, 3, 4)):
            torch.testing.assert_close(decide(given, utility).utilities, reference)
        called = decide(given, lambda action, y: table["abc".index(action)][y], actions=["a", "b", "c"])
        torch.testing.assert_close(called.utilities, reference)
        assert called.chosen == ["abc"[i] for i in called.action.tolist()]
    default = decide(PREDICTIVE, lambda action, y: 1.0 if action == y else 0.0)  # actions: the classes
    assert torch.equal(default.action, PREDICTIVE.probs.argmax(-1))


def test_utilities_that_differ_between_inputs():
    utility = random(40, 3, 4, seed=2)
    decision = decide(PREDICTIVE, utility)
    for n in (0, 17, 39):
        torch.testing.assert_close(decision.utilities[n], decide(PREDICTIVE, utility[n]).utilities[n])


def test_constants_per_class_and_positive_scales_change_nothing():
    decision = decide(PREDICTIVE, UTILITY, reject=0.4)
    shifted = decide(PREDICTIVE, 2.5 * (UTILITY + random(4, seed=3)), reject=2.5 * 0.4)
    assert torch.equal(shifted.action, decision.action)
    assert decision.rejected.any()
    assert not decision.rejected.all()
    torch.testing.assert_close(shifted.margin, 2.5 * decision.margin)


def test_yes_no_targets_and_dense_targets():
    utility = [[0.0, -10.0], [-1.0, 0.0]]  # act from p = 1/11 on
    p = np.array([0.05, 0.09, 0.092, 0.5])
    assert decide(p, utility).action.tolist() == [0, 0, 1, 1]
    logits = torch.tensor(np.log(p / (1 - p)))[None]
    assert decide(Predictive.from_functions(logits, Bernoulli()), utility).action.tolist() == [0, 0, 1, 1]
    labels = decide(Predictive.from_functions(logits.reshape(1, 2, 2), Bernoulli()), utility)
    assert labels.action.tolist() == labels.chosen == [[0, 0], [1, 1]]
    dense = Predictive.from_functions(random(2, 5, 7, 3), Categorical())
    assert torch.equal(decide(dense, torch.eye(3)).action, dense.probs.argmax(-1))
    value = value_of_epistemic_information(dense, torch.eye(3))
    assert value.shape == (5, 7)


@pytest.mark.parametrize("utility", [torch.eye(4), torch.eye(4) - 1], ids=["gain", "loss"])
@pytest.mark.parametrize("cost", [0.0, 0.15, 0.4, 0.8])
def test_reject_is_chows_rule(utility, cost):
    decision = decide(PREDICTIVE, utility, reject=np.float64(cost))
    best = PROBS.mean(0).amax(-1)
    assert torch.equal(decision.rejected, 1 - best > cost)
    assert torch.equal(decision.action[~decision.rejected], PROBS.mean(0).argmax(-1)[~decision.rejected])
    top = float(utility.max())
    torch.testing.assert_close(decision.expected_utility, torch.maximum(best - 1, torch.tensor(-cost)) + top)
    assert [name is None for name in decision.chosen] == decision.rejected.tolist()
    assert decision.utilities.shape == (40, 5)
    torch.testing.assert_close(decision.utilities[:, -1], torch.full((40,), top - cost, dtype=torch.float64))


def test_reject_where_information_is_worth_more_than_it_costs():
    value = value_of_perfect_information(PREDICTIVE, UTILITY)
    assert torch.equal(decide(PREDICTIVE, UTILITY, reject=0.5).rejected, value > 0.5)
    samples = 3 + torch.linspace(0.2, 2, 30) * random(400, 30)
    given = {"actions": range(6), "outcomes": "numbers"}
    value = value_of_perfect_information(samples, profit, **given)
    cost = float(value.median()) + 1e-3
    decision = decide(samples, profit, reject=cost, **given)
    assert torch.equal(decision.rejected, value > cost)
    assert 0 < int(decision.rejected.sum()) < 30
    torch.testing.assert_close(decision.margin[decision.rejected], (value - cost)[decision.rejected])


def test_perfect_information_for_two_points():
    """Bet or not: u(bet, win) = a, u(bet, loss) = −b, not betting 0. VPI is b(1−p) where one bets, a·p where not."""
    a, b = 3.0, 2.0
    p = torch.linspace(0, 1, 11, dtype=torch.float64)
    value = value_of_perfect_information(p, [[-b, a], [0.0, 0.0]])
    bets = a * p - b * (1 - p) > 0
    torch.testing.assert_close(value, torch.where(bets, b * (1 - p), a * p))


def test_epistemic_information_for_two_draws():
    """Two draws that are sure of opposite classes: the right draw tells the class, and is worth all of it."""
    sure = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    bet = [[-2.0, 3.0], [0.0, 0.0]]
    torch.testing.assert_close(value_of_perfect_information(sure, bet), torch.tensor([1.0, 1.0]).double())
    torch.testing.assert_close(value_of_epistemic_information(sure, bet), torch.tensor([1.0, 0.0]).double())


@pytest.mark.parametrize("seed", range(5))
def test_information_is_never_worthless_and_the_part_not_more_than_the_whole(seed):
    utility = random(3, 4, seed=seed)
    per_input = random(40, 3, 4, seed=seed)
    for matrix in (utility, per_input):
        perfect = value_of_perfect_information(PREDICTIVE, matrix)
        epistemic = value_of_epistemic_information(PREDICTIVE, matrix)
        assert (epistemic >= 0).all()
        assert (epistemic <= perfect + 1e-6).all()
        torch.testing.assert_close(value_of_epistemic_information(PROBS, matrix), epistemic)
    brute = torch.stack([(UTILITY @ p).amax(0) for p in PROBS.transpose(1, 2)]).mean(0)
    expected = brute - (UTILITY @ PROBS.mean(0).T).amax(0)
    torch.testing.assert_close(value_of_epistemic_information(PREDICTIVE, UTILITY), expected)


def test_one_draw_has_no_epistemic_information():
    single = Predictive.from_functions(LOGITS[:1], Categorical())
    assert value_of_epistemic_information(single, UTILITY).abs().max() < 1e-12
    assert value_of_perfect_information(single, UTILITY).max() > 0.1


def test_blocks_change_nothing():
    utility = random(40, 3, 4, seed=2)
    whole = value_of_epistemic_information(PREDICTIVE, utility)
    parts = Predictive(Categorical(), PREDICTIVE._source, num_inputs=40, num_draws=6, output_shape=(4,), budget_bytes=4000)
    torch.testing.assert_close(value_of_epistemic_information(parts, utility), whole)
    assert len(list(parts._blocks(6))) > 3


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def profit(action, y):
    """Stock `action`, sell what is asked for at 2, pay 1 each."""
    return 2 * torch.minimum(y, torch.as_tensor(float(action))) - action


MEANS = random(5, 8, seed=4)
NUMBERS = Predictive.from_functions(MEANS, Gaussian(0.7))


def test_quadratic_utility_on_the_mixture():
    """E −(a − y)² = −(a − E[y])² − Var[y], whatever the mixture: an exact answer for each action."""
    actions = [-1.0, -0.3, 0.2, 0.9]
    decision = decide(NUMBERS, lambda a, y: -((a - y) ** 2), actions=actions, samples=20_000)
    exact = -((torch.tensor(actions) - NUMBERS.mean[:, None]) ** 2) - NUMBERS.variance[:, None]
    assert decision.utilities.shape == decision.standard_error.shape == (8, 4)
    assert ((decision.utilities - exact).abs() < Z * decision.standard_error).all()
    clear = decision.margin > Z * decision.margin_error
    assert clear.sum() >= 6
    assert torch.equal(decision.action[clear], exact.argmax(-1)[clear])
    best = exact.topk(2, -1).values
    assert ((decision.margin - (best[:, 0] - best[:, 1])).abs() < Z * decision.margin_error)[clear].all()


def test_standard_errors_are_honest():
    """Over many seeds the scatter of the estimates is the standard error that each reports."""
    runs = [decide(NUMBERS, lambda a, y: (y > a).double(), actions=[0.0, 0.5], samples=200, seed=s) for s in range(300)]
    scatter = torch.stack([run.utilities for run in runs]).std(0)
    reported = torch.stack([run.standard_error for run in runs]).square().mean(0).sqrt()
    torch.testing.assert_close(scatter, reported, rtol=0.2, atol=0)
    above = torch.stack([1 - NUMBERS.cdf(torch.full((8,), a, dtype=torch.float64)) for a in (0.0, 0.5)], -1)
    mean = torch.stack([run.utilities for run in runs]).mean(0)
    assert ((mean - above).abs() < Z * reported / math.sqrt(300)).all()
    margins = torch.stack([run.utilities[:, 0] - run.utilities[:, 1] for run in runs]).std(0)
    margin_error = torch.stack([run.margin_error for run in runs]).square().mean(0).sqrt()
    torch.testing.assert_close(margins, margin_error, rtol=0.2, atol=0)
    assert (margin_error < 0.8 * (reported[:, 0] ** 2 + reported[:, 1] ** 2).sqrt()).all()  # common random numbers


def test_same_seed_same_bits_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    first, again, other = (decide(NUMBERS, profit, actions=[0, 1], seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.utilities, again.utilities)
    assert not torch.equal(first.utilities, other.utilities)
    assert torch.equal(state, torch.get_rng_state())


def test_shapes_of_the_callables_result():
    wide = Predictive.from_functions(random(5, 8, 2), Gaussian(1.0))
    each = decide(wide, lambda a, y: -((a - y) ** 2), actions=np.array([0.0, 1.0]))
    assert each.utilities.shape == (8, 2, 2)
    joint = decide(wide, lambda a, y: -((a - y) ** 2).sum(-1), actions=torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(joint.utilities, each.utilities.sum(1))
    nothing = decide(wide, lambda a, y: 0.0 if a == "wait" else y[..., 0], actions=["wait", "go"])
    assert nothing.utilities.shape == (8, 2)
    assert not nothing.utilities[:, 0].any()
    assert nothing.standard_error[:, 0].abs().max() == 0
    last = decide(wide, lambda a, y: 0.0 if a == "wait" else y.numpy(), actions=["wait", "go"])
    assert last.utilities.shape == (8, 2, 2)
    single = decide(wide, lambda a, y: 1.0, actions=["only"])
    assert single.margin.isinf().all()
    assert not single.margin_error.any()


def test_counts_and_plain_samples():
    counts = Predictive.from_functions(random(4, 6) + 1, Poisson())
    decision = decide(counts, profit, actions=range(8), samples=4000)
    assert decision.action.min() >= 0
    samples = counts.sample(2000)
    plain = decide(samples, profit, actions=range(8), outcomes="numbers")
    brute = torch.stack([profit(a, samples.double()).mean(0) for a in range(8)], -1)
    torch.testing.assert_close(plain.utilities, brute)


def test_information_about_numbers():
    """Bet on the sign of y ~ N(μ_s, σ²): perfect information is worth E|y|, and the right draw E_s|E sign(y)|·…, by quadrature."""
    utility = lambda a, y: a * y  # noqa: E731
    perfect = value_of_perfect_information(NUMBERS, utility, actions=[-1.0, 1.0], samples=100_000)
    epistemic = value_of_epistemic_information(NUMBERS, utility, actions=[-1.0, 1.0], samples=100_000)
    sigma = 0.7
    absolute = sigma * math.sqrt(2 / math.pi) * torch.exp(-(MEANS**2) / (2 * sigma**2)) + MEANS * torch.erf(
        MEANS / (sigma * math.sqrt(2))
    )
    best = MEANS.mean(0).abs()
    error = Z * 2 * (sigma + MEANS.abs().amax(0)) / math.sqrt(100_000)
    assert ((perfect - (absolute.mean(0) - best)).abs() < error).all()
    assert ((epistemic - (MEANS.abs().mean(0) - best)).abs() < error + 0.01).all()
    assert (epistemic <= perfect).all()
    assert (epistemic >= 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Bad input

GOOD = np.array([[0.2, 0.8], [0.5, 0.5]])
EYE = np.eye(2)


@pytest.mark.parametrize("function", [decide, value_of_perfect_information, value_of_epistemic_information])
@pytest.mark.parametrize(
    ("given", "utility", "message"),
    [
        (GOOD * 1.1, EYE, "must sum to one in each row"),
        (np.array([[np.nan, 1.0]]), EYE, "must be finite"),
        (np.array([[1.2, -0.2]]), EYE, "must not be negative"),
        (np.zeros((0, 2)), EYE, "predictive is empty"),
        (np.zeros(0), EYE, "predictive is empty"),
        (np.full((2, 2, 2, 2), 0.5), EYE, "pass a Predictive for anything larger"),
        (GOOD, np.eye(3), r"utility has shape \[3, 3\], expected \[actions, 2\], one column for each class"),
        (GOOD, np.zeros((2, 3)), r"pass utility.T"),
        (GOOD, np.zeros((3, 2, 2)), r"expected \[2, actions, 2\] for 2 inputs"),
        (GOOD, np.zeros(2), r"utility has shape \[2\]"),
        (GOOD, np.zeros((0, 2)), "at least one action"),
        (GOOD, np.array([[0.0, np.inf]]), r"utility must be finite; it is not at index \[0, 1\]"),
        (GOOD, lambda a, y: math.nan, "utility must be finite, got nan for action 0 and class 0"),
        (GOOD, lambda a, y: [0.0, 1.0], r"gave shape \[2\] for action 0 and class 0, expected one number"),
    ],
)
def test_bad_classes(function, given, utility, message):
    if function is value_of_epistemic_information and given.ndim == 2 and given.size:
        given = np.stack([given, given])
    with pytest.raises(ValueError, match=message):
        function(given, utility)


@pytest.mark.parametrize("function", [decide, value_of_perfect_information, value_of_epistemic_information])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"utility": EYE}, TypeError, "must be a callable"),
        ({"utility": profit}, ValueError, "actions must be given for numbers"),
        ({"utility": profit, "actions": []}, ValueError, "actions is empty"),
        ({"utility": profit, "actions": 3}, TypeError, "must be a sequence of actions, got 3"),
        ({"utility": profit, "actions": "ab"}, TypeError, "must be a sequence of actions"),
        ({"utility": lambda a, y: y[0], "actions": [1]}, ValueError, r"gave shape \[8\], expected that of y"),
        ({"utility": lambda a, y: y[a:], "actions": [0, 1]}, ValueError, "must be the same for all actions"),
        ({"utility": lambda a, y: y / 0, "actions": [0]}, ValueError, "utility must be finite, but is not for action 0"),
        ({"utility": profit, "actions": [0], "samples": 1}, ValueError, "samples must be an integer of at least 2"),
    ],
)
def test_bad_numbers(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(NUMBERS, **arguments)


def test_other_bad_input():
    with pytest.raises(ValueError, match="predictive is empty"):
        decide(Predictive.from_functions(torch.zeros(2, 0, 3), Categorical()), np.eye(3))
    with pytest.raises(ValueError, match="finite"):
        decide(Predictive.from_functions(torch.full((2, 1, 3), torch.nan), Categorical()), np.eye(3))
    with pytest.raises(ValueError, match="not finite"):
        decide(Predictive.from_functions(torch.full((2, 1), torch.nan), Gaussian(1.0)), profit, actions=[0])
    for cost in (-0.1, math.nan, math.inf, True, "dear"):
        with pytest.raises(ValueError, match="reject must be the cost"):
            decide(GOOD, EYE, reject=cost)
    with pytest.raises(ValueError, match="actions has 3 entries, but utility has 2 rows"):
        decide(GOOD, EYE, actions=["a", "b", "c"])
    with pytest.raises(ValueError, match="outcomes must be one of"):
        decide(GOOD, EYE, outcomes="words")
    with pytest.raises(ValueError, match="1 sample of y"):
        decide(np.zeros((1, 3)), profit, actions=[0], outcomes="numbers")
    with pytest.raises(ValueError, match="probabilities of several draws"):
        value_of_epistemic_information(GOOD, EYE)
    with pytest.raises(TypeError, match="labels or counts"):
        decide(np.array([[0, 1]]), EYE)


def test_all_labellings_of_a_matrix_are_covered():
    """The best action under every deterministic predictive is the best row of that column."""
    for label, action in itertools.product(range(4), range(3)):
        point = torch.eye(4)[label : label + 1]
        assert float(decide(point, UTILITY).utilities[0, action]) == pytest.approx(float(UTILITY[action, label]))
