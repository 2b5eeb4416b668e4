"""docs/settings.md is what the schema says."""

from mllm.config.schema import Config
from mllm.config.section import fields_of
from tools.settings import FILE, reference


def test_the_reference_is_what_the_schema_says_now():
    assert FILE.read_text() == reference(), "run python tools/settings.py"


def test_each_setting_has_one_line_with_a_meaning():
    lines = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    keys = [key for key, _ in fields_of(Config) if key.split(".")[0] != "changes"]
    assert sorted(line[0].strip("| `") for line in lines) == sorted(keys)
    assert [line[0] for line in lines if len(line[-1]) < 10] == []


def test_types_and_defaults_are_readable():
    table = reference()
    for row in (
        "| `steps` | int > 0 or `null` | `null` |",
        "| `optimizer.final_fraction` | float >= 0, <= 1 | `0.0` |",
        "| `data.validation.share` | float > 0, < 1 or `null` | `null` |",
        "| `head.impl` | one of `full_logits`, `xla`, `mosaic_tpu`, `mosaic_gpu` or `null` | `null` |",
        "| `rollout.stop` | list of str | `[]` |",
        "| `model.step` | int or str or `null` | `null` |",
        "| `model` | [section](#model) | required |",
        '| `task.rewards` | [section](#taskrewards) | `[{"name": "exact_match"}]` |',
    ):
        assert row in table
