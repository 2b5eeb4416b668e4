"""`token_divergence` and `divergence_loss` by the Hopper kernels, interpreted: what test_divergence.py asks of engines.

200 rows make two waves of 128 rows, or two blocks in one; 296 columns make three tiles in two chunks.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from divergence_cases import F32, GENERAL, HOPPER, Models, alike, check, models_of, run
from engines import GPU_SIZES, needs_interpreter
from lm_head_cases import SCALES, assert_near

from kernels.lm_head import token_divergence
from kernels.lm_head.gpu import tiles as gpu_tiles

interpreted = (needs_interpreter, pytest.mark.slow)


def cases(*found):
    return [pytest.param(*x, marks=interpreted, id=", ".join(map(str, x))) for x in found]


@pytest.mark.parametrize(
    ("way", "kind"),
    cases((GENERAL, "forward_kl"), ("none", "jsd"), ("some", "reverse_kl"), ("some", "jsd"), ("all", "forward_kl")),
)
def test_any_softmaxes_of_any_rows_are_as_accurate_as_full_logits(way, kind):
    for softmax, rows in (("near-uniform", "every"), ("peaked", "a block and one"), ("saturated", "few")):
        check(HOPPER, way, models_of(HOPPER, SCALES[softmax]), kind, rows)
    assert not np.any(check(HOPPER, way, models_of(HOPPER), kind, "none").weight)


@pytest.mark.parametrize(
    ("way", "kind", "more", "common"),
    cases(("none", "forward_kl", -16, None), ("some", "jsd", 40, 130), ("all", "reverse_kl", 8, 1)),
)
def test_tokens_of_both_vocabularies_after_softcap_and_temperature(way, kind, more, common):
    models = models_of(HOPPER, 30.0, more=more, common=common)
    got = check(HOPPER, way, models, kind, "most", teacher_vocabulary=common, softcap=20.0, temperature=0.6)
    smaller = min(len(models.weight), len(models.teacher_weight))
    assert not np.any(got.weight.astype(F32)[common or smaller :])


@pytest.mark.parametrize(("way", "kind"), cases(("none", "reverse_kl"), ("some", "jsd"), ("all", "forward_kl")))
def test_equal_models_differ_by_exactly_nothing_and_near_ones_never_by_less(way, kind):
    for scale in SCALES.values():
        total, got = run(HOPPER, way, alike(models_of(HOPPER, scale)), kind)
        assert total == 0
        assert not any(np.any(x.astype(F32)) for x in got)
        assert np.min(run(HOPPER, way, alike(models_of(HOPPER, scale), 1e-2), kind)[1].values) >= -1e-6


@pytest.mark.parametrize(("way", "kind"), cases(("none", "forward_kl"), ("all", "jsd")))
def test_a_nan_in_a_row_that_counts_is_not_hidden(way, kind):
    models = models_of(HOPPER)
    for side in ("hidden", "teacher_hidden"):
        total, got = run(HOPPER, way, models._replace(**{side: getattr(models, side).at[5].set(jnp.nan)}), kind)
        assert np.isnan(total)
        assert np.isnan(got.weight.astype(F32)).any()
        for x in (got.values, got.hidden.astype(F32).sum(axis=1)):
            np.testing.assert_array_equal(np.isnan(x), np.arange(len(models.hidden)) == 5)


@pytest.mark.parametrize(("way", "kind"), cases(("none", "reverse_kl"), ("some", "reverse_kl")))
def test_float32_masters_with_bfloat16_products_get_float32_gradients(way, kind):
    narrow = models_of(HOPPER)
    _, want = run(HOPPER, way, narrow, kind)
    _, got = run(HOPPER, way, Models(*(x.astype(F32) for x in narrow)), kind, dtype=jnp.bfloat16)
    assert_near(got.values, want.values, 1e-5)
    assert_near(got[1:], [x.astype(F32) for x in want[1:]], 2**-7)
    assert all(np.any(x != x.astype(jnp.bfloat16).astype(F32)) for x in got[1:])


def test_what_the_kernels_cannot_multiply_is_refused_by_name():
    models, why_not = models_of(HOPPER), "impl: mosaic_gpu can't run here: (of the teacher, weight|dtype) is"
    for wrong in (models._replace(teacher_weight=models.teacher_weight[:-1]), Models(*(x.astype(F32) for x in models))):
        with gpu_tiles.override(GPU_SIZES), pytest.raises(ValueError, match=why_not):
            token_divergence(*wrong, kind="jsd", impl="mosaic_gpu")
