"""Makes tests/fixtures/preferences.json: what TRL's trainers compute of given preferences with the model
tests/fixtures/tied: losses, metrics and the gradients' norms.

Run it where torch and trl are installed, which the project itself never needs: `python tests/make_preferences.py`. The
result is committed (trl 1.16.0, transformers 5.24, torch 2.13, CPU, float32). The reference is the same model with its
last norm multiplied by REFERENCE, so that no log-ratio is 0. Sequences are given as token ids, of odd lengths.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

FIXTURES = Path(__file__).parent / "fixtures"
REFERENCE, EXAMPLES, END = 1.5, 6, 1
FOLDER = tempfile.mkdtemp()
COMMON = {"output_dir": FOLDER, "per_device_train_batch_size": EXAMPLES, "report_to": [], "use_cpu": True}
COMMON |= {"bf16": False, "gradient_checkpointing": False}
PAIRS = {
    "sigmoid": {"loss_type": ["sigmoid"], "beta": 0.3},
    "ipo": {"loss_type": ["ipo"], "beta": 0.2},
    "hinge": {"loss_type": ["hinge"], "beta": 0.1},
}
KTO = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.7}
SIMPO = {"loss_type": "simpo", "beta": 0.8, "simpo_gamma": 0.4, "cpo_alpha": 0.0, "label_smoothing": 0.0}
ORPO = {"beta": 0.6}


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "tied", dtype=torch.float32, attn_implementation="eager")


def load_reference() -> torch.nn.Module:
    model = load()
    with torch.no_grad():
        model.model.norm.weight.mul_(REFERENCE)
    return model.eval()


def text(ids: list[int]) -> str:
    """A character for each id, so that a prompt and its completion are tokenized as they are apart."""
    return "".join(chr(0x4E00 + token) for token in ids)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({text([n]): n for n in range(96)}, unk_token=text([0])))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=text([0]), eos_token=text([END]))


def draw() -> list[dict[str, list[int]]]:
    """Prompts and completions of many lengths, which all end with the end of sequence, as TRL ends texts."""
    numbers = random.Random(0)

    def some(length: int) -> list[int]:
        return [numbers.randrange(2, 96) for _ in range(length)]

    lengths = [(3, 5, 2), (1, 1, 4), (6, 3, 3), (2, 7, 1), (5, 2, 6), (4, 4, 5)]
    return [dict(zip(("prompt", "chosen", "rejected"), map(some, each), strict=True)) for each in lengths]


def measure(trainer: object, batch: dict[str, object], named: str) -> dict[str, object]:
    """The loss of one batch, the norm of its gradient, and the metrics."""
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in trainer.model.parameters() if p.grad is not None))
    stored = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    metrics = {key: values[-1] for key, values in stored["train"].items() if key.startswith(named)}
    return {"loss": loss.item(), "grad_norm": norm.item(), "metrics": metrics}


def check(examples: list[dict[str, list[int]]], rows: list[dict[str, list[int]]], *names: str) -> None:
    """Raise AssertionError unless TRL learns from the very tokens that were drawn."""
    for one, row in zip(examples, rows, strict=True):
        for name in names:
            completion = one["chosen" if name == "completion" else name]
            whole = row[f"{name}_input_ids"] if f"{name}_input_ids" in row else row["prompt_ids"] + row[f"{name}_ids"]
            assert list(whole) == [*one["prompt"], *completion, END], (name, whole)


if __name__ == "__main__":
    examples, found = draw(), {}
    named = ("rewards/", "logps/", "kl", "nll", "log_odds")
    pairs = Dataset.from_list([{key: text(ids) for key, ids in one.items()} for one in examples])
    labels = [n % 3 != 1 for n in range(EXAMPLES)]
    single = [(text(one["prompt"]), text(one["chosen"]), label) for one, label in zip(examples, labels, strict=True)]
    labelled = Dataset.from_list([dict(zip(("prompt", "completion", "label"), one, strict=True)) for one in single])
    for name, settings in {**PAIRS, "kto": KTO}.items():
        kind, config, data = (KTOTrainer, KTOConfig, labelled) if name == "kto" else (DPOTrainer, DPOConfig, pairs)
        arguments = config(**COMMON, **settings, max_length=None)
        trainer = kind(load(), load_reference(), args=arguments, train_dataset=data, processing_class=tokenizer())
        rows = [trainer.train_dataset[n] for n in range(EXAMPLES)]
        check(examples, rows, *(("completion",) if name == "kto" else ("chosen", "rejected")))
        found[name] = {"settings": settings, **measure(trainer, trainer.data_collator(rows), named)}
        if name == "kto":
            found[name]["mismatched"] = [row["KL_completion_ids"] for row in rows]
    for name, kind, config, settings in (
        ("simpo", CPOTrainer, CPOConfig, SIMPO),
        ("orpo", ORPOTrainer, ORPOConfig, ORPO),
    ):
        arguments = config(**COMMON, **settings, max_length=64)
        trainer = kind(load(), args=arguments, train_dataset=pairs, processing_class=tokenizer())
        rows = [trainer.train_dataset[n] for n in range(EXAMPLES)]
        check(examples, rows, "chosen", "rejected")
        found[name] = {"settings": settings, **measure(trainer, trainer.data_collator(rows), named)}
    content = {"reference": REFERENCE, "end": END, "examples": examples, "labels": labels, "trl": found}
    (FIXTURES / "preferences.json").write_text(json.dumps(content) + "\n")
