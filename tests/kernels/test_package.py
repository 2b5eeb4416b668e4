"""The head is a package of its own: its installed files, its imports, its requirements, its settings for libtpu."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from lm_head import libtpu

ROOT = Path(__file__).parents[2]
JAX = ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy")


def test_libtpu_settings_are_made_without_a_tpu_if_unset(monkeypatch):
    made = {"TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_WORKER_HOSTNAMES": "localhost"}
    own, no_tpu = dict.fromkeys(made, "own"), {"TPU_SKIP_MDS_QUERY": "1"}
    for environment, expected in (({}, {}), (no_tpu, made), (no_tpu | own, own)):
        for name in (*no_tpu, *made):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        importlib.reload(libtpu)
        assert {name: os.environ[name] for name in made if name in os.environ} == expected


@pytest.mark.nightly
def test_readme_lines_run_with_jax_alone(tmp_path):
    """The interpreter has JAX with its requirements, another package named `kernels`, and the head installed by pip."""
    site, source = tmp_path / "site", tmp_path / "kernels"  # pip builds where the source is
    (site / "kernels").mkdir(parents=True)
    (site / "kernels/__init__.py").touch()
    for name in JAX:
        for part in {file.parts[0] for file in distribution(name).files or () if ".." not in file.parts}:
            (site / part).symlink_to(Path(str(distribution(name).locate_file(part))))
    shutil.copytree(ROOT / "kernels", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", site, source], check=True, stderr=subprocess.DEVNULL)
    [metadata] = site.glob("lm_head-*.dist-info/METADATA")
    assert re.findall(r"^Requires-Dist: (?!.*extra)(\w+)", metadata.read_text(), re.MULTILINE) == ["jax"]
    [lines] = re.findall(r"^```python\n(.*?)^```", (ROOT / "kernels/README.md").read_text(), re.DOTALL | re.MULTILINE)
    program = (
        f"{lines}\nimport sys, lm_head, kernels\nprint(float(value) > 0, dh.shape, dw.shape, lm_head.__file__)\n"
        "print(*sorted({'absl', 'jaxtyping', 'mllm', 'jax.experimental.pallas'} & sys.modules.keys()))\n"
        "import lm_head.tpu.engine, lm_head.logits_tpu"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    output = subprocess.check_output([sys.executable, "-S", "-c", program], cwd=site, env=environment, text=True)
    assert output == f"True (64, 32) (1000, 32) {site / 'lm_head/__init__.py'}\n\n"


# --- pages ---

PAGE = ROOT / "docs/head.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SNIPPETS += [path.read_text() for path in sorted((ROOT / "docs/examples").glob("head_*.py"))]


@pytest.mark.nightly
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_of_the_page_on_the_head_runs(snippet: str) -> None:
    """Examples over a mesh take four of the tests' virtual devices."""
    exec(compile(snippet, str(PAGE), "exec"), {"__name__": "snippet"})
