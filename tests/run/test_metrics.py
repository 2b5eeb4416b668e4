"""What a run writes of itself can be cut back to any step, and is whole JSON."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mllm.run import report
from mllm.run.metrics import RunLog, last_logged_step, size_until
from mllm.stopwatch import Stopwatch
from mllm.store.run_store import RunStore


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"\x00\x00\x00\n", b'{"loss": 1}\n', b"[1]\n", b"{"])
def test_a_line_that_a_crash_tore_is_cut_off_and_those_of_later_steps(torn):
    assert size_until(9, [b'{"step": 0}\n', b'{"step": 1}\n', torn]) == 24
    assert size_until(0, [b'{"step": 0}\n', b'{"step": 1}\n', torn]) == 12
    assert size_until(-1, [b'{"step": 0}\n', torn]) == 0


@pytest.mark.parametrize(
    ("steps", "last"),
    [([], -1), ([0, 1, 2], 2), ([1, 2], 2), ([2, 3], -1), ([0, 1, 3], 1), ([1, 2, 2], 2), (["0"], -1)],
)
def test_the_last_step_that_is_logged_has_no_gap_before_it(tmp_path, steps, last):
    lines = "".join(json.dumps({"step": step}) + "\n" for step in steps)
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 9')
    assert last_logged_step(RunStore(tmp_path)) == last


def test_a_number_that_is_not_finite_is_null_in_the_metrics_and_is_left_out_of_tensorboard(tmp_path, caplog, capsys):
    log = RunLog(RunStore(tmp_path), -1, 1)
    log.write(1, {"loss": math.nan, "kl": math.inf, "reward": 0.5})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "kl": null, "reward": 0.5}\n'
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"] == ["reward"]
    assert "NaN or Inf" not in caplog.text + "".join(capsys.readouterr())


def test_each_step_is_a_line(tmp_path, capsys):
    log = RunLog(RunStore(tmp_path), -1, 3)
    for step in (1, 2, 3):
        log.write_timings(step, {"time/update": 0.1, "tokens_per_second": 5.0}, {"loss": 1 / (step + 1)})
    log.close()
    first, *others = capsys.readouterr().err.split("\n")
    assert first == "step 1 of 3  loss 0.500  5 tok/s"  # which compiles, so that nothing is known of the others yet
    assert others == [f"step {step} of 3  loss {1 / (step + 1):.3f}  5 tok/s  ETA 00:00" for step in (2, 3)] + [""]


def test_phases_add_up_and_evaluation_is_not_part_of_the_speed():
    watch = Stopwatch()
    watch.seconds = {"rollout": 1.0, "update": 3.0}
    watch.count_tokens(40)
    with watch.phase("eval"):
        pass
    with watch.phase("update"):
        pass
    assert watch.timings()["tokens_per_second"] == 10.0
    assert watch.timings()["time/update"] >= 3.0
    assert set(watch.seconds) == {"rollout", "update", "eval"}


def test_the_summary_shows_what_was_measured_first_and_last_with_its_interval_and_a_loss_where_it_was_lowest(tmp_path):
    def measured(value):
        accuracy = {"eval/greedy_accuracy": value, "eval/greedy_accuracy_low": 0.2, "eval/greedy_accuracy_high": 0.9}
        return {**accuracy, "eval/reward": value, "validation/loss": (value - 0.5) ** 2}

    failed, last = {"eval/reward": math.nan, "loss": 2.0}, {"loss": 1.0, "test/reward": 0.75}
    log = RunLog(store := RunStore(tmp_path), -1, 3)
    for step, record in enumerate((measured(0.25), failed, measured(0.5), measured(0.75) | last)):
        log.write(step, record)
    log.write_timings(1, {"time/update": 0.5, "tokens_per_second": 1234.0, "memory/peak_bytes": 3 * 2**20}, {})
    log.close()
    lines = report.summary(store).splitlines()
    assert lines[1:8] == [
        "held-out, greedy   0.250 (0.200 .. 0.900) at step 0, 0.750 (0.200 .. 0.900) at step 3",
        "held-out reward    0.250 at step 0, 0.750 at step 3",
        "validation loss    0.062 at step 0, 0.000 at step 2, 0.062 at step 3",
        "test reward        0.750 at step 3",
        "loss               2.000 in the first tenth, 1.000 in the last of 2 steps",
        "tokens/s           1,234 (median of the steps; prompts and completions)",
        "seconds            update 0.5",
    ]
    assert f"tensorboard        tensorboard --logdir {tmp_path}/tensorboard" in lines
