"""docs/settings.md is what the schema says."""

from tools.settings import FILE, reference


def test_the_reference_is_what_the_schema_says_now():
    assert FILE.read_text() == reference(), "run python tools/settings.py"
