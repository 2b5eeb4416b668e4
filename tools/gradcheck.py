"""Checks the head: its loss, statistics and gradients beside the same in float64, in one table.

    python tools/gradcheck.py --config gradcheck_qwen25_1p5b.yaml
    python tools/gradcheck.py --shape 64,128,1009 --dtype float32 --softmax saturated --impl xla

Every setting of the file is an option here, and an option replaces the file's. The reference is NumPy on the host
(kernels/lm_head/reference.py) and shares nothing with what is checked. A result passes if neither its largest nor its
root-mean-square error exceeds

    1.25 times that of impl full_logits: products of the same dtype, float32 in between
    + 4 times its float32 resolution: how far it moves, at most, when logits and results are rounded to float32 once.

Leaves out sharded heads; time and memory are tools/bench's.

Exit codes: 0 passed, 1 past tolerance, 2 wrong settings or a missing device (one line says what).
"""

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float
from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss
from kernels.lm_head.reference import HAIR, SLACK
from mllm import errors
from mllm.config import load as config_file
from mllm.config.section import Section
from mllm.errors import UserError

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from tools import figures
from tools.gradcheck_problem import Problem, Results, Truth, exact, make_problem, norms, plain

PLATFORMS = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
"""Implementations that run on one kind of device."""
NORMS = ("largest", "root_mean_square")

DType = Literal["bfloat16", "float16", "float32"]
Size = Annotated[int, Field(ge=1, lt=2**31)]


class Settings(Section):
    """The settings of a check; the docstrings are the help of the options."""

    shape: tuple[Size, Size, Size]
    """N,D,V: tokens, hidden size, vocabulary"""
    impl: str | None = None
    """the head's implementation, by name; default: what the head picks on this device"""
    function: Literal["token_loss", "token_logprobs"] = "token_loss"
    """token_loss (default) or token_logprobs: which of the head's two functions is differentiated"""
    objective: Literal["cross_entropy", "grpo"] = "cross_entropy"
    """cross_entropy (default), or grpo: the clipped ratio and a bonus of half the entropy"""
    workspace: int | None = Field(default=None, ge=0)
    """bytes that token_loss may take; default: the head's choice"""
    softcap: PositiveFloat | None = None
    """softcap of the logits; default: none"""
    temperature: PositiveFloat = 1.0
    """temperature of the softmax (default 1)"""
    live: float = Field(default=1.0, ge=0, le=1)
    """the share of rows that count (default 1); the others hold NaN, and labels that are none"""
    softmax: Literal["near-uniform", "peaked", "saturated"] = "near-uniform"
    """near-uniform (default); with peaked or saturated, two rows of three match a row of the weight, with a probability
    near 0.9 or of 1"""
    dtype: DType = "bfloat16"
    """dtype of hidden states and products: bfloat16 (default), float16 or float32"""
    param_dtype: DType | None = None
    """dtype of the weight; default: that of the products"""
    interpret: bool = False
    """run impl mosaic_tpu on a CPU, in Pallas' interpreter: for small shapes"""
    seed: int = Field(default=0, ge=0)
    """seed of the random inputs (default 0)"""

    @field_validator("shape", mode="before")
    @classmethod
    def split(cls, shape: Any) -> Any:
        sizes = shape.split(",") if isinstance(shape, str) else shape
        if isinstance(sizes, list) and len(sizes) != 3:
            raise PydanticCustomError("shape", "expected N,D,V: three whole numbers")
        return sizes

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.function == "token_logprobs":
            self.reject_unused("by token_logprobs", "workspace")
        if self.impl == "full_logits":
            self.reject_unused("with impl: full_logits", "workspace")
        if self.impl != "mosaic_tpu":
            self.reject_unused("by implementations other than mosaic_tpu", "interpret")
        return self


class Error(NamedTuple):
    """The errors of one result, as its largest and its root mean square."""

    found: tuple[float, float]
    allowed: tuple[float, float]
    size: float
    """The largest magnitude of the exact result."""

    @property
    def passed(self) -> bool:
        return all(found <= allowed for found, allowed in zip(self.found, self.allowed, strict=True))  # NaN fails


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="NAME", help="a path, or a file in configs/")
    for name, field in Settings.model_fields.items():
        kind: dict[str, Any] = {"metavar": "X"}
        if field.annotation is bool:
            kind = {"action": "store_const", "const": "true"}
        parser.add_argument(option(name), dest=name, help=field.description, **kind)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = vars(parser.parse_args(arguments))
    given = {name: options[name] for name in Settings.model_fields if options[name] is not None}
    settings = load(options["config"], given)
    figures.check(options["json"])
    try:
        found = check(settings)
    except Exception as error:
        if not isinstance(error, MemoryError) and not errors.is_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), "out of memory")
        raise UserError(f"--shape: too large for this device: {reason}") from None
    print("\n".join(table(settings, found)))
    figures.write(options["json"], report(settings, found))
    return 0 if all(error.passed for error in found.values()) else 1


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def load(name: str | None, given: dict[str, str]) -> Settings:
    """The settings of a file, if one is named, with those given laid over it.

    Raises:
        UserError: the file is not there or not YAML, or a setting is unknown, missing or impossible.
    """
    path = config_file.find(name) if name else None
    settings = config_file.read(path) if path else {}
    if not path and "shape" not in given:
        raise UserError("--shape: give N,D,V, or a --config")
    for key, text in given.items():
        try:
            config_file.apply_override(settings, f"{key}={text}")
        except UserError as error:
            raise UserError(f"{option(key)}: {error}") from None
    try:
        return Settings.model_validate(settings)
    except ValidationError as error:
        explained = config_file.explain(error, Settings)
        key = explained.split(":")[0].split(".")[0]
        raise UserError(f"{option(key) if key in given else path}: {explained}") from None


# --- the check


def check(settings: Settings) -> dict[str, Error]:
    """The errors by the result's name.

    Raises:
        UserError: the head refuses its arguments, or can't run here.
    """
    backend = jax.default_backend()
    if settings.interpret and backend != "cpu":
        raise UserError("--interpret: runs on a CPU; set JAX_PLATFORMS=cpu")
    wanted = backend if settings.interpret else PLATFORMS.get(settings.impl or "", backend)
    if backend != wanted:
        way_out = "; on a CPU, add --interpret" if wanted == "tpu" else ""
        raise UserError(f"--impl: {settings.impl} runs on {wanted.upper()}s, and this is a {backend}{way_out}")
    names = {"softmax", "live", "dtype", "param_dtype", "temperature", "softcap", "seed"}
    try:
        problem = make_problem(settings.shape, settings.objective, **settings.model_dump(include=names))
    except ValueError as error:  # NumPy's, of more bytes than can be addressed
        raise UserError(f"--shape: too large for this machine: {error}") from None
    # The interpreter raises where a kernel reads past an array, and memory that nobody wrote is NaN.
    strict = pltpu.InterpretParams(out_of_bounds_reads="raise", uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(strict) if settings.interpret else nullcontext():
        compiled = compile_head(settings, problem)
        truth = exact(problem)
        (loss, tokens), (dh, dw) = compiled(*jax.device_put((*problem[:4], *truth.operands)))
        found = Results(*map(np.asarray, (loss, *tokens, dh, dw)))
    return judge(found, plain(problem, truth.operands), truth)


def compile_head(settings: Settings, problem: Problem) -> jax.stages.Compiled:
    """((loss, statistics), (dh, dW)) as a function of hidden, weight, labels, weights and the objective's operands."""
    options: dict[str, Any] = settings.model_dump(include={"temperature", "softcap", "dtype", "impl"})
    objective = problem.objective.in_jax

    def loss(
        hidden: Float[Array, "N D"], weight: Float[Array, "V D"], labels: Array, weights: Array, *operands: Array
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        if settings.function == "token_loss":
            return token_loss(
                hidden, weight, labels, objective, *operands, weights=weights, workspace=settings.workspace, **options
            )
        tokens = token_logprobs(hidden, weight, labels, where=weights != 0, **options)
        return jnp.sum(weights * objective(tokens.logprob, tokens.entropy, *operands)), tokens

    arrays = (*problem[:4], *[problem.weights] * problem.objective.operands)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    try:
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(*shapes).compile()
    except ValueError as error:  # the head's word on its arguments
        raise UserError(f"the head: {error}") from None


def judge(found: Results, yardstick: Results, truth: Truth) -> dict[str, Error]:
    """The errors of `found`, and those that the yardstick's allow, by the result's name."""

    def error(found: Any, yardstick: Any, exact: Any, resolution: float) -> Error:
        largest, mean = (SLACK * x + HAIR * resolution for x in norms(yardstick, exact))
        return Error(norms(found, exact), (largest, mean), norms(exact)[0])

    results = map(error, found, yardstick, truth.results, truth.resolution)
    return dict(zip(Results._fields, results, strict=True))


# --- the verdict


def table(settings: Settings, found: dict[str, Error]) -> Iterator[str]:
    always = ("shape", "dtype", "function", "objective", "impl")
    special = [f"{name}={x}" for name, x in settings.model_dump(exclude_defaults=True).items() if name not in always]
    yield "N={}, D={}, V={}".format(*settings.shape) + f", {settings.dtype}, on {jax.devices()[0].device_kind}"
    yield ", ".join([settings.function, settings.objective, f"impl {settings.impl or 'left to the head'}", *special])
    yield ""
    yield f"{'':9} {'largest error':>13}  {'relative':>9}  {'allowed':>9}    {'root mean square':>16}  {'allowed':>9}"
    for name, error in found.items():
        (largest, mean), (most, most_mean) = error.found, error.allowed
        relative = largest / error.size if error.size else largest
        figures = f"{largest:13.1e}  {relative:9.1e}  {most:9.1e}    {mean:16.1e}  {most_mean:9.1e}"
        yield f"{name:9} {figures}    {'ok' if error.passed else 'PAST TOLERANCE'}"
    yield ""
    yield f"against   float64 in NumPy; allowed: {SLACK} times the error of full logits, and {HAIR:g} resolutions"
    wrong = [name for name, error in found.items() if not error.passed]
    yield f"verdict   {'PAST TOLERANCE: ' + ', '.join(wrong) if wrong else 'passed'}"


def report(settings: Settings, found: dict[str, Error]) -> dict[str, Any]:
    """The same for JSON, which has no NaN: null."""

    def by_norm(numbers: tuple[float, float]) -> dict[str, float | None]:
        return {norm: x if math.isfinite(x) else None for norm, x in zip(NORMS, numbers, strict=True)}

    return {
        "command": shlex.join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": settings.model_dump(),
        "passed": all(error.passed for error in found.values()),
        "errors": {n: {"error": by_norm(e.found), "allowed": by_norm(e.allowed)} for n, e in found.items()},
    }


if __name__ == "__main__":
    errors.run_main(main)
