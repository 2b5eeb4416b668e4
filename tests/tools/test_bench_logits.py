"""`python tools/bench logits`: its table, and a check that fails where a number is off."""

import jax.numpy as jnp
import pytest

from tools.bench import __main__ as bench
from tools.bench import logits_programs


@pytest.mark.slow
def test_the_table_has_plain_jax_and_the_engine_and_the_check_holds(capsys):
    small = ["logits", "--shape", "8,300", "--rounds", "1"]
    assert bench.main(small) == 0
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[3:]] == ["plain JAX", "xla"]
    assert bench.main([*small, "--check"]) == 0


def test_a_number_that_is_off_fails_the_check(monkeypatch):
    right = logits_programs.fused
    off = lambda *given, **options: right(*given, **options) + jnp.float32(1e-3)  # noqa: E731
    monkeypatch.setattr(logits_programs, "fused", off)
    assert bench.main(["logits", "--shape", "8,300", "--check"]) == 1


def test_a_wrong_shape_or_target_is_an_error_in_one_line(capsys):
    assert bench.main(["logits", "--target", "v99"]) == 2
    assert "--target: " in capsys.readouterr().err
