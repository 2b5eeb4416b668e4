"""tools/bench rollout: the figures of a model of no size, the table's medians and ratios, and a method that fails."""

from tools.bench import rollout


def rows(capsys):
    """The table that was printed: its cells, without the rule."""
    columns, _, *methods = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (columns, *methods)]


def test_ratios_are_those_of_the_same_turn_and_a_method_that_fails_is_named(monkeypatch, capsys):
    seconds, tokens = {"engine": [1.0, 200.0, 1.0], "other": [3.0, 200.0, 1.0]}, {"engine": 60, "other": 30}

    def start(module, task, cache):
        method, took = task["method"], seconds[task["method"]][task["seed"]]
        own = {"n": 7} if method == "engine" else {}
        return [{"seconds": took, "tokens/s": tokens[method] / took, **own}], "MemoryError" * (task["seed"] > 1)

    monkeypatch.setattr(rollout, "METHODS", dict.fromkeys(["engine", "prefilled anew", "other"]))
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(rollout, "start", start)
    assert rollout.main(["--repeats", "2"]) == 0
    _, engine, other = rows(capsys)
    assert engine == ["engine", "1.00 (1.00 to 1.00)", "100", "30.150", "7.000"]
    assert other == ["other", "4.00 (2.00 to 6.00)", "102", "5.075", "-"]
    assert rollout.main(["--repeats", "3"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: engine: MemoryError"
