"""The strict interpreter catches each mistake that it is there for, in the smallest kernel that makes it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from strict_tpu import strict_interpreter

BLOCK = (8, 128)
X = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)
BY_ROWS = pl.BlockSpec(BLOCK, lambda i: (i, 0))


def in_blocks(kernel: Callable[..., None], in_spec: pl.BlockSpec = BY_ROWS, **options: Any) -> Callable[..., jax.Array]:
    """`kernel(x_ref, o_ref, *scratch)` over the four blocks of X; made when called, as interpret mode is seen then."""
    options = {"out_specs": BY_ROWS, "out_shape": jax.ShapeDtypeStruct(X.shape, X.dtype), **options}
    return lambda x: pl.pallas_call(kernel, grid=(4,), in_specs=[in_spec], **options)(x)


def copying(kernel: Callable[..., None]) -> Callable[..., jax.Array]:
    """`kernel(x_hbm, o_ref, buffer, semaphores)`, which does its own copies."""
    return lambda x: pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct(BLOCK, X.dtype),
        scratch_shapes=[pltpu.VMEM(BLOCK, X.dtype), pltpu.SemaphoreType.DMA((2,))],
    )(x)


def strictly(function: Callable[..., jax.Array], x: jax.Array = X, **options: Any) -> np.ndarray:
    with strict_interpreter(**options):
        return np.asarray(jax.jit(function)(x))


def double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = 2 * x_ref[...]


def running_sum(x_ref: Any, o_ref: Any, sum_ref: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += x_ref[...]
    o_ref[...] = sum_ref[...]


def first_rows(x_hbm: Any, buffer: Any, semaphores: Any, which: int = 0) -> Any:
    return pltpu.make_async_copy(x_hbm.at[pl.ds(8 * which, 8)], buffer, semaphores.at[which])


# --- what is right passes ---


@pytest.mark.parametrize("cores", [1, 2])
def test_a_faultless_kernel_gives_its_result(cores: int) -> None:
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    np.testing.assert_array_equal(strictly(in_blocks(double, compiler_params=parallel), cores=cores), 2 * X)


def test_scratch_lives_from_step_to_step() -> None:
    scratch = [pltpu.VMEM(BLOCK, X.dtype)]
    got = strictly(in_blocks(running_sum, scratch_shapes=scratch))
    np.testing.assert_array_equal(got.reshape(4, 8, 128), np.cumsum(X.reshape(4, 8, 128), axis=0))


def test_an_output_s_window_lives_while_its_block_stays() -> None:
    def total(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    one_block: dict[str, Any] = {
        "out_specs": pl.BlockSpec(BLOCK, lambda i: (0, 0)),
        "out_shape": jax.ShapeDtypeStruct(BLOCK, X.dtype),
    }
    np.testing.assert_array_equal(strictly(in_blocks(total, **one_block)), X.reshape(4, 8, 128).sum(axis=0))


@pytest.mark.parametrize("copies", ["eager", "on_wait"])
def test_a_copy_that_is_waited_for_passes(copies: Any) -> None:
    def copy(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
        one = first_rows(x_hbm, buffer, semaphores)
        one.start()
        one.wait()
        o_ref[...] = buffer[...]

    np.testing.assert_array_equal(strictly(copying(copy), copies=copies), X[:8])


# --- outside of an array ---


def test_elements_in_an_input_s_index_map_are_outside() -> None:
    """An index map counts blocks."""
    with pytest.raises(AssertionError, match=r"Out-of-bounds block index \(8, 0\) for input"):
        strictly(in_blocks(double, pl.BlockSpec(BLOCK, lambda i: (8 * i, 0))))


def test_elements_in_an_output_s_index_map_are_outside() -> None:
    with pytest.raises(AssertionError, match=r"Out-of-bounds block index \(8, 0\) for output"):
        strictly(in_blocks(double, out_specs=pl.BlockSpec(BLOCK, lambda i: (8 * i, 0))))


def test_a_slice_past_its_window_s_end_is_outside() -> None:
    def next_rows(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[pl.ds(8 * pl.program_id(0) + 1, 8)]

    with pytest.raises(AssertionError, match="Out-of-bounds read"):
        strictly(in_blocks(next_rows, pl.BlockSpec(X.shape, lambda i: (0, 0))))


def test_the_part_of_a_block_past_the_array_s_end_is_nan() -> None:
    got = strictly(in_blocks(double), X[:29])
    assert np.isnan(got[29:]).all()
    np.testing.assert_array_equal(got[:29], 2 * X[:29])


# --- never written ---


def test_scratch_that_nobody_initialised_is_nan() -> None:
    def sum_without_a_start(x_ref: Any, o_ref: Any, sum_ref: Any) -> None:
        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...]

    assert np.isnan(strictly(in_blocks(sum_without_a_start, scratch_shapes=[pltpu.VMEM(BLOCK, X.dtype)]))).all()


def test_a_block_that_a_step_leaves_out_is_nan_and_not_the_one_before() -> None:
    def all_but_the_third(x_ref: Any, o_ref: Any) -> None:
        pl.when(pl.program_id(0) != 2)(lambda: double(x_ref, o_ref))

    got = strictly(in_blocks(all_but_the_third))
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), np.arange(32) // 8 == 2)


def test_an_output_s_window_holds_nothing_after_its_block() -> None:
    def sum_in_the_output(x_ref: Any, o_ref: Any) -> None:
        running_sum(x_ref, o_ref, o_ref)

    got = strictly(in_blocks(sum_in_the_output))
    assert not np.isnan(got[:8]).any()
    assert np.isnan(got[8:]).all()


def test_scratch_does_not_pass_from_core_to_core() -> None:
    options: dict[str, Any] = {
        "scratch_shapes": [pltpu.VMEM(BLOCK, X.dtype)],
        "compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",)),
    }
    assert np.isnan(strictly(in_blocks(running_sum, **options), cores=2)).any()


# --- the order of accesses ---


def test_a_block_of_an_output_is_not_visited_again_after_others() -> None:
    halves: dict[str, Any] = {
        "out_specs": pl.BlockSpec(BLOCK, lambda i: (i % 2, 0)),
        "out_shape": jax.ShapeDtypeStruct((16, 128), X.dtype),
    }
    with pytest.raises(AssertionError, match="Revisited block"):
        strictly(in_blocks(double, **halves))


def test_two_copies_to_the_same_place_race() -> None:
    def both(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
        one, other = (first_rows(x_hbm, buffer, semaphores, which) for which in (0, 1))
        one.start()
        other.start()
        one.wait()
        other.wait()
        o_ref[...] = buffer[...]

    with pytest.raises(AssertionError, match="RACE DETECTED"):
        strictly(copying(both))


def hasty(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
    """Reads before it waits."""
    one = first_rows(x_hbm, buffer, semaphores)
    one.start()
    o_ref[...] = buffer[...]
    one.wait()


def test_a_read_before_the_wait_races_with_the_copy() -> None:
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        strictly(copying(hasty))


def test_a_copy_that_nobody_waits_for_is_found_even_if_nobody_reads_it() -> None:
    def careless(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
        first_rows(x_hbm, buffer, semaphores).start()
        o_ref[...] = jnp.zeros_like(o_ref)

    with pytest.raises(AssertionError, match="non-zero count"):
        strictly(copying(careless))


def test_a_race_in_an_earlier_kernel_is_not_forgotten() -> None:
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        strictly(lambda x: in_blocks(double)(x) + copying(hasty)(x)[0] + in_blocks(double)(x))


def test_after_a_failure_the_next_kernel_runs() -> None:
    with pytest.raises(AssertionError):
        strictly(in_blocks(double, pl.BlockSpec(BLOCK, lambda i: (8 * i, 0))))
    np.testing.assert_array_equal(strictly(in_blocks(double)), 2 * X)
