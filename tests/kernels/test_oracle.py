"""The oracle, checked by finite differences, by distributions known by heart, and by answers that it must refuse."""

import numpy as np
import pytest
from oracle import Slopes, Teacher, assert_as_accurate_as_rounding, exact

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT, LABELS = RNG.normal(size=(3, 4)), RNG.normal(size=(6, 4)), np.array([0, 4, 2])
SLOPES, LIVE = Slopes(*RNG.normal(size=(5, 3))), np.array([True, False, True])
TEACHER = Teacher(RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5)), temperature=0.9, softcap=None)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(("temperature", "softcap"), [(0.7, None), (1.3, 2.0)])
def test_the_gradients_are_the_values_central_differences(kind: str, temperature: float, softcap: float | None) -> None:
    def run(hidden: np.ndarray = HIDDEN, weight: np.ndarray = WEIGHT) -> tuple[float, np.ndarray, np.ndarray]:
        teacher = TEACHER._replace(kind=kind)
        options = {"where": LIVE, "temperature": temperature, "softcap": softcap, "vocabulary": 5, "teacher": teacher}
        found = exact(hidden, weight, LABELS, lambda _: SLOPES, **options).answer
        statistics = [getattr(found, name) for name in Slopes._fields]
        return float(np.sum(SLOPES * np.array(statistics))), found.hidden, found.weight

    for i, (name, x) in enumerate({"hidden": HIDDEN, "weight": WEIGHT}.items()):
        for index in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[index] = 1e-5
            slope = (run(**{name: x + step})[0] - run(**{name: x - step})[0]) / 2e-5
            np.testing.assert_allclose(run()[1 + i][index], slope, rtol=1e-6, atol=1e-8)


def test_it_knows_a_coin() -> None:
    """The student has probabilities 3/4 and 1/4; the teacher takes both to be equally likely."""
    one, odds, fair = np.ones((1, 1)), np.log([[3.0], [1.0]]), np.zeros((2, 1))
    kinds = ("forward_kl", "reverse_kl")
    coins = {kind: exact(one, odds, [0], teacher=Teacher(one, fair, kind)).answer for kind in kinds}
    forward, reverse = 0.5 * np.log(2 / 3) + 0.5 * np.log(2), 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    np.testing.assert_allclose([x.divergence for x in coins.values()], [[forward], [reverse]])
    coin = coins["forward_kl"]
    np.testing.assert_allclose([coin.logprob, coin.lse], [[np.log(3 / 4)], [np.log(4)]])
    np.testing.assert_allclose([coin.entropy, coin.mean_logit], [[np.log(4) - 3 / 4 * np.log(3)], [np.log(3) / 2]])
    np.testing.assert_allclose(coin.collision, [10 / 16])


def test_an_answer_with_a_nan_an_error_or_another_shape_is_refused() -> None:
    right = exact(HIDDEN, WEIGHT, LABELS, lambda _: SLOPES._replace(divergence=None))
    assert_as_accurate_as_rounding(right.answer, right)
    wrong = {"lse": right.answer.lse + 1e-4, "hidden": right.answer.hidden * np.nan, "weight": right.answer.weight[:-1]}
    for name, x in wrong.items():
        with pytest.raises(AssertionError, match=name):
            assert_as_accurate_as_rounding(right.answer._replace(**{name: x}), right)
