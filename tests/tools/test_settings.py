"""docs/settings.md is what the schema says."""

from mllm.config.schema import Config
from mllm.config.section import keys_of
from tools.settings import FILE, reference


def test_the_reference_is_what_the_schema_says_now():
    assert FILE.read_text() == reference(), "run python tools/settings.py"


def test_each_setting_has_one_line_with_a_meaning():
    lines = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    keys = [key for key in keys_of(Config) if key.split(".")[0] != "changes"]
    assert sorted(line[0].strip("| `") for line in lines) == sorted(keys)
    assert [line[0] for line in lines if len(line[-1]) < 10] == []
