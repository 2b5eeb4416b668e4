"""Problems made by code, to copy; docs/examples/task_function.yaml uses them."""


def sums():
    """All sums of three digits: a test set of every tenth, and the others."""
    digits = range(10)
    problems = [
        {"prompt": f"{a}+{b}+{c}=", "answer": a + b + c, "largest": max(a, b, c)}
        for a in digits
        for b in digits
        for c in digits
    ]
    test = problems[3::10]
    return {"train": [problem for problem in problems if problem not in test], "test": test}
