"""Interpreted kernels are slow: of the cases of a test, one of each engine runs daily, the others nightly."""

import pytest

MATRICES = ("test_head_values", "test_head_losses", "test_labels", "test_logits", "test_properties")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        if item.path.stem not in MATRICES:
            continue
        for engine in [name for name in ("mosaic_tpu", "mosaic_gpu") if name in item.name]:
            case = item.path, item.name.partition("[")[0], engine
            if case in seen:
                item.add_marker(pytest.mark.nightly)
            seen.add(case)
