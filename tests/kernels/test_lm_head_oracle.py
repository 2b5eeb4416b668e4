"""The oracle of the LM head's tests, checked by finite differences and by distributions known by heart."""

import functools

import numpy as np
import pytest
from oracle import exact


@pytest.mark.parametrize(("temperature", "softcap"), [(0.7, None), (1.3, 2.0)])
def test_the_oracle_s_gradients_are_its_values_central_differences(temperature: float, softcap: float | None) -> None:
    rng = np.random.default_rng(0)
    inputs = {"hidden": rng.normal(size=(3, 4)), "weight": rng.normal(size=(5, 4))}
    labels, cotangents = np.array([0, 4, 2]), rng.normal(size=(3, 3))
    where = np.array([True, False, True])
    run = functools.partial(exact, labels=labels, cotangents=lambda *_: cotangents, where=where)
    run = functools.partial(run, temperature=temperature, softcap=softcap)

    def total(**changed: np.ndarray) -> float:
        out = run(**(inputs | changed))
        return float(np.sum(cotangents * [out.logprob, out.lse, out.entropy]))

    for name, x in inputs.items():
        for index in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[index] = 1e-5
            slope = (total(**{name: x + step}) - total(**{name: x - step})) / 2e-5
            np.testing.assert_allclose(getattr(run(**inputs), name)[index], slope, rtol=1e-7, atol=1e-8)


def test_the_oracle_knows_a_coin() -> None:
    coin = exact([[1.0]], [[np.log(3.0)], [0.0]], [0], lambda *_: np.zeros((3, 1)))
    np.testing.assert_allclose(coin[:3], [[np.log(3 / 4)], [np.log(4)], [np.log(4) - 3 / 4 * np.log(3)]])
