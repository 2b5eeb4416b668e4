"""tools/bench rollout: the figures of a model of no size, the table's medians and ratios, and a method that fails."""

from tools.bench import __main__ as bench
from tools.bench import rollout


def rows(capsys):
    """The table that was printed: its cells, without the rule."""
    columns, _, *methods = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (columns, *methods)]


def test_a_rollout_s_table_has_speed_and_useful_share(monkeypatch, capsys):
    monkeypatch.setattr(rollout, "METHODS", {"engine": rollout.engine})
    small = ["--hidden", "64", "--layers", "1", "--repeats", "1", "--limit", "16"]
    assert bench.main(["rollout", *small, "--rows", "8", "--slots", "4"]) == 0
    columns, engine = rows(capsys)
    found = dict(zip(columns[2:], map(float, engine[2:]), strict=True))
    assert min(found["tokens/s"], found["seconds"]) > 0
    assert 0.4 < found["useful"] <= 1
    assert 8 <= found["tokens"] <= 8 * 16


def test_ratios_are_those_of_the_same_turn_and_a_method_that_fails_is_named(monkeypatch, capsys):
    seconds = {"engine": [1.0, 200.0, 0.0], "other": [3.0, 200.0, 0.0]}

    def start(module, task, cache):
        own = {"n": 7} if task["method"] == "engine" else {}
        return [{"seconds": seconds[task["method"]][task["seed"]], **own}], "MemoryError" * (task["seed"] > 1)

    monkeypatch.setattr(rollout, "METHODS", dict.fromkeys(seconds))
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(rollout, "start", start)
    assert rollout.main(["--repeats", "2"]) == 0
    _, engine, other = rows(capsys)
    assert engine == ["engine", "1.00 (1.00 to 1.00)", "100", "7.000"]
    assert other == ["other", "2.00 (1.00 to 3.00)", "102", "-"]
    assert rollout.main(["--repeats", "3"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: engine: MemoryError"
