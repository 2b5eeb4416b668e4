"""The flags by which processes find each other, and what stands in for them."""

import jax
import pytest

import train
from mllm.errors import UserError
from mllm.parallel import group as group_module


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((None, None, 1), "--process 1: coordinator_address should be defined"),
        (("host:http", 2, 0), "--coordinator host:http, .* invalid literal"),
        (("host:1", 2, 2), "--process 2: process_id and num_processes must be nonnegative, with process_id < num_proc"),
        ((None, None, None), "--coordinator None, .*; --cluster finds what is not given"),
    ],
)
def test_an_impossible_flag_is_refused_with_what_was_given(flags, message, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(UserError, match=message):
        group_module.join(flags, {})


def test_flags_take_precedence_over_the_environment_and_without_both_a_process_is_alone(monkeypatch):
    def found(*flags):
        options = train.make_parser().parse_args(["--config", "any.yaml", *flags])
        return options.coordinator, options.processes, options.process

    assert found() == (None, None, None)
    for name, value in (("COORDINATOR_ADDRESS", "a:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"JAX_{name}", value)
    assert found() == ("a:1", 2, 1)
    assert found("--coordinator", "b:2", "--processes", "4", "--process", "3") == ("b:2", 4, 3)
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(UserError, match="--process: invalid int value: 'one'"):
        found()
