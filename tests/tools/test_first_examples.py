"""tools/samples.py --config: what a run will learn, before it does."""

import pytest

from tools import samples

POLICY = "model={source: tests/fixtures/tiny_grpo}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["docs/examples/sft.yaml"], ["example: 8 tokens, 3 learned", "  4+39=⟦43<|im_end|>⟧"]),
        (["tiny_sft"], ["example: 12 tokens, 3 learned", "  <|im_start|>7+1+4=<|im_end|><|im_start|>⟦12<|im_end|>⟧"]),
        (["tiny_grpo", POLICY], ["prompt: 9 tokens, 0 learned", "  <|im_start|>7+1+4=<|im_end|><|im_start|>"]),
        (
            ["docs/examples/dpo.yaml", POLICY],
            ["chosen: 12 tokens, 3 learned", "  <|im_start|>7+1+4=<|im_end|><|im_start|>⟦12<|im_end|>⟧"],
        ),
    ],
)
def test_the_first_examples_are_printed_with_marks(arguments, said, capsys):
    name, *settings = arguments
    assert samples.main(["--config", name, *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(said)] == said
    assert len([line for line in lines if " learned" in line]) == (6 if "dpo" in name else 3)
