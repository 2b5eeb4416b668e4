"""Checks the head: its loss, statistics and gradients beside the same in float64, in one table.

    python tools/gradcheck.py --config gradcheck_qwen25_1p5b.yaml
    python tools/gradcheck.py --shape 64,128,1009 --dtype float32 --softmax saturated --impl xla

Every setting of the file is an option here, and an option replaces the file's. The reference is NumPy on the host
(kernels/lm_head/reference.py) and shares nothing with what is checked. A result passes if neither its largest nor its
root-mean-square error exceeds

    1.25 times that of impl full_logits: products of the same dtype, float32 in between
    + 4 times its float32 resolution: how far it moves, at most, when logits and results are rounded to float32 once.

Leaves out sharded heads, and comparisons of time (tools/bench).

Exit codes: 0 passed, 1 past tolerance, 2 wrong settings or a missing device (one line says what).
"""

import argparse
import importlib
import importlib.util
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.reference import HAIR, SLACK
from mllm.config import load as config_file
from mllm.config.schema import Section, impossible
from mllm.errors import ArgumentParser, UserError

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from tools import figures
from tools.gradcheck_problem import Problem, Results, Truth, exact, make_problem, norms, plain, progress

PLATFORMS = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
"""Implementations that run on one kind of device."""

DType = Literal["bfloat16", "float16", "float32"]
Size = Annotated[int, Field(ge=1, lt=2**31)]


class Settings(Section):
    """The settings of a check; the docstrings are the help of the options."""

    model_config = ConfigDict(use_attribute_docstrings=True)

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
    against: Literal["float64", "float32"] = "float64"
    """dtype of the reference: float64 (default), or float32, in half the time, for narrower dtypes"""
    interpret: bool = False
    """run impl mosaic_tpu or mosaic_gpu on a CPU, in Pallas' interpreter: for small shapes; GPUs' needs jax 0.12"""
    repeats: PositiveInt = 3
    """calls to time, after one that is not (default 3)"""
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
        if self.impl not in PLATFORMS:
            self.reject_unused(f"by implementations other than {' and '.join(PLATFORMS)}", "interpret")
        if self.against == self.dtype:
            raise impossible("against", f"{self.against} can't judge {self.dtype}: give float64, or a narrower dtype")
        return self


class Cost(NamedTuple):
    compile_seconds: float
    seconds: float
    """Median time of a call."""
    peak_bytes: int
    peak_by: str


class Error(NamedTuple):
    """Errors of one result: the largest, and the root mean square."""

    found: tuple[float, float]
    plain: tuple[float, float]
    reference: tuple[float, float]
    """Norms of the result itself."""
    allowed: tuple[float, float]

    @property
    def relative(self) -> tuple[float, float]:
        return ratio(self.found[0], self.reference[0]), ratio(self.found[1], self.reference[1])

    @property
    def used(self) -> float:
        """Share of what is allowed, by the worse of the two."""
        return max(map(ratio, self.found, self.allowed))

    @property
    def passed(self) -> bool:
        return self.used <= 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="NAME", help="a path, or a file in configs/")
    for name, field in Settings.model_fields.items():
        kind: dict[str, Any] = {"metavar": "X"}
        if field.annotation is bool:
            kind = {"action": "store_const", "const": "true"}
        parser.add_argument(option(name), dest=name, help=field.description, **kind)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    try:
        options = vars(parser.parse_args(arguments))
        given = {name: options[name] for name in Settings.model_fields if options[name] is not None}
        settings = load(options["config"], given)
        figures.check(options["json"])
        errors, cost = check(settings)
        print("\n".join(table(settings, errors, cost)))
        figures.write(options["json"], report(settings, errors, cost))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        reason = next(iter(str(error).splitlines()), "out of memory")
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in reason:
            raise
        print(f"error: --shape: too large for this device: {reason}", file=sys.stderr)
        return 2
    return 0 if all(error.passed for error in errors.values()) else 1


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


# --- the check ------------------------------------------------------------------------------------------------------


def check(settings: Settings) -> tuple[dict[str, Error], Cost]:
    """The errors by the result's name, and what the implementation took.

    Raises:
        UserError: the head refuses its arguments, or can't run here.
    """
    if settings.interpret and settings.impl == "mosaic_gpu":
        # A kernel's threads wait for each other, and XLA runs as many at a time as it has devices or cores.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    backend = jax.default_backend()
    if settings.interpret and backend != "cpu":
        raise UserError("--interpret: runs on a CPU; set JAX_PLATFORMS=cpu")
    wanted = backend if settings.interpret else PLATFORMS.get(settings.impl or "", backend)
    if backend != wanted:
        raise UserError(
            f"--impl: {settings.impl} runs on {wanted.upper()}s, and this is a {backend}; on a CPU, add --interpret"
        )
    interpreter = strict_interpreter(settings) if settings.interpret else nullcontext()
    try:
        problem = make_problem(
            settings.shape,
            settings.objective,
            softmax=settings.softmax,
            live=settings.live,
            dtype=settings.dtype,
            param_dtype=settings.param_dtype,
            temperature=settings.temperature,
            softcap=settings.softcap,
            seed=settings.seed,
        )
    except ValueError as error:  # NumPy's, of more bytes than can be addressed
        raise UserError(f"--shape: too large for this machine: {error}") from None
    with interpreter:
        start = time.perf_counter()
        compiled = compile_head(settings, problem)
        compile_seconds = time.perf_counter() - start
        truth = exact(problem, settings.against)
        found, cost = run(compiled, problem, truth, settings.repeats)
    errors = judge(found, plain(problem, truth.operands), truth)
    return errors, cost._replace(compile_seconds=compile_seconds)


def strict_interpreter(settings: Settings) -> Any:
    """A context in which reading past an array raises, and memory that nobody wrote is NaN.

    Raises:
        UserError: this installation has none.
    """
    if settings.impl == "mosaic_tpu":
        return pltpu.force_tpu_interpret_mode(
            pltpu.InterpretParams(out_of_bounds_reads="raise", uninitialized_memory="nan")
        )
    if jax.__version_info__ < (0, 12):
        said = f"kernels for GPUs are interpreted by jax 0.12 or later, and this is {jax.__version__}"
        raise UserError(f"--interpret: {said}")
    # The tests supply what JAX's interpreter lacks for these kernels, and they need pytest.
    if importlib.util.find_spec("pytest") is None:
        raise UserError("--interpret: pytest isn't installed, and tests/kernels/strict_gpu.py needs it")
    sys.path.append(str(Path(__file__).parent.parent / "tests/kernels"))
    context = ExitStack()
    context.enter_context(importlib.import_module("strict_gpu").strict_interpreter())
    tokens, features, vocabulary = settings.shape
    context.enter_context(gpu_tiles.override(gpu_tiles.choose(tokens, vocabulary, features)))  # though this is no GPU
    return context


def compile_head(settings: Settings, problem: Problem) -> jax.stages.Compiled:
    """((loss, statistics), (dh, dW)) as a function of hidden, weight, labels, weights and the objective's operands."""
    options: dict[str, Any] = {
        "temperature": settings.temperature,
        "softcap": settings.softcap,
        "dtype": settings.dtype,
        "impl": settings.impl,
    }
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


def run(compiled: jax.stages.Compiled, problem: Problem, truth: Truth, repeats: int) -> tuple[Results, Cost]:
    arrays = jax.device_put((*problem[:4], *truth.operands))
    seconds: list[float] = []
    with progress("calls", repeats + 1, "call") as bar:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            (loss, tokens), (dh, dw) = jax.block_until_ready(compiled(*arrays))
            seconds.append(time.perf_counter() - start)
            bar.update()
    if stats := jax.devices()[0].memory_stats():
        peak, by = stats["peak_bytes_in_use"], "the device"
    else:
        memory: Any = compiled.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        by = "the compiler: arguments, results and temporaries"
    results = Results(*map(np.asarray, (loss, *tokens, dh, dw)))
    return results, Cost(0.0, statistics.median(seconds[1:]), peak, by)


def judge(found: Results, yardstick: Results, truth: Truth) -> dict[str, Error]:
    def error(found: Any, yardstick: Any, exact: Any, resolution: float) -> Error:
        off, plain_off = norms(found, exact), norms(yardstick, exact)
        allowed = [SLACK * x + HAIR * resolution for x in plain_off]
        return Error(off, plain_off, norms(exact), (allowed[0], allowed[1]))

    errors = map(error, found, yardstick, truth.results, truth.resolution)
    return dict(zip(Results._fields, errors, strict=True))


def ratio(part: float, whole: float) -> float:
    """NaN is infinitely more than anything."""
    if part == 0:
        return 0.0
    return part / whole if whole and not math.isnan(part) else math.inf


# --- the verdict ----------------------------------------------------------------------------------------------------


def table(settings: Settings, errors: dict[str, Error], cost: Cost) -> Iterator[str]:
    defaults, always = Settings(shape=settings.shape), ("shape", "dtype", "function", "objective", "impl")
    special = [
        f"{name}={value}"
        for name, value in settings.model_dump().items()
        if value != getattr(defaults, name) and name not in {*always, "repeats"}
    ]
    yield "N={}, D={}, V={}".format(*settings.shape) + f", {settings.dtype}, on {jax.devices()[0].device_kind}"
    yield ", ".join([settings.function, settings.objective, f"impl {settings.impl or 'left to the head'}", *special])
    yield ""
    yield f"{'':9} {'largest error':>19}    {'root mean square':>19}    of what"
    yield f"{'':9} {'absolute  relative':>19}    {'absolute  relative':>19}    is allowed"
    for name, error in errors.items():
        figures = "    ".join(f"{x:9.1e} {y:9.1e}" for x, y in zip(error.found, error.relative, strict=True))
        yield f"{name:9} {figures}    {error.used:7.0%}    {'ok' if error.passed else 'PAST TOLERANCE'}"
    yield ""
    yield f"time      {cost.seconds:.3g} s a call (of {settings.repeats}); {cost.compile_seconds:.1f} s to compile"
    yield f"memory    {cost.peak_bytes / 2**20:,.0f} MiB at the peak, says {cost.peak_by}"
    yield f"against   {settings.against} in NumPy; allowed: {SLACK} times the error of full logits, and a hair"
    wrong = [name for name, error in errors.items() if not error.passed]
    yield f"verdict   {'PAST TOLERANCE: ' + ', '.join(wrong) if wrong else 'passed'}"


def report(settings: Settings, errors: dict[str, Error], cost: Cost) -> dict[str, Any]:
    """The same for JSON, which has no NaN: null."""

    def finite(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return {
        "command": shlex.join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": settings.model_dump(),
        "passed": all(error.passed for error in errors.values()),
        "errors": {
            name: {
                norm: {
                    "absolute": finite(error.found[i]),
                    "relative": finite(error.relative[i]),
                    "plain": finite(error.plain[i]),
                    "allowed": finite(error.allowed[i]),
                }
                for i, norm in enumerate(("largest", "root_mean_square"))
            }
            for name, error in errors.items()
        },
        **cost._asdict(),
    }


if __name__ == "__main__":
    sys.exit(main())
