"""Plain values are YAML 1.2's, in files and on the command line, and what is written reads as the same."""

import pytest
import tiny
import yaml
from runs import arguments

from mllm.config import load as configs
from mllm.config.load import PlainDumper, PlainLoader
from mllm.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("010", 10),
        ("08", 8),
        ("0o10", 8),
        ("0x1F", 31),
        ("+7", 7),
        ("1:40", "1:40"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("no", "no"),
        ("yes", "yes"),
        ("Off", "Off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("2026-11-27", "2026-11-27"),
        ("=", "="),
    ],
)
def test_a_plain_value_is_what_yaml_1_2_says(text, value):
    read = yaml.load(f"{{scale: {text}}}" if text else "scale:", PlainLoader)["scale"]
    assert (read, type(read)) == (value, type(value))
    assert yaml.load(yaml.dump({"x": read, "y": text}, Dumper=PlainDumper), PlainLoader) == {"x": value, "y": text}
    assert yaml.safe_load(yaml.dump([text], Dumper=PlainDumper)) == [text]  # for readers of 1.1, too


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999", "9" * 30])
def test_what_is_no_finite_number_is_refused(text):
    with pytest.raises(ValueError, match="is no number that settings take"):
        yaml.load(text, PlainLoader)


def test_a_reward_s_arguments_and_overrides_are_read_so(tmp_path):
    name, *others = arguments(tiny.config(run_dir=str(tmp_path / "run")))[1:]
    args = "task.rewards=[{name: overlong, weight: 1, args: {cache: 010, scale: 1e-3, quiet: no}}]"
    found = configs.load(name, [*others, args, "seed=010"])
    assert found.seed == 10
    assert found.task.rewards[0].args == {"cache": 10, "scale": 1e-3, "quiet": "no"}
    for bad in ("steps=1:40", "steps=0b11"):
        with pytest.raises(UserError, match="steps"):
            configs.load(name, [*others, bad])
