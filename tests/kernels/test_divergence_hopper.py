"""`token_divergence` and `divergence_loss` by the Hopper kernels, interpreted: what test_divergence.py asks of engines.

200 rows make two waves of 128 rows, or two blocks in one; 296 columns make three tiles in two chunks.
"""

import jax
import numpy as np
import pytest
from divergence_cases import (
    F32,
    GENERAL,
    HOPPER,
    Models,
    check,
    check_equal_and_near,
    check_masters,
    check_nan,
    models_of,
)
from engines import GPU_SIZES, needs_interpreter
from jax.sharding import AxisType
from lm_head_cases import SCALES

from kernels.lm_head import HeadSharding, token_divergence
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
    check_equal_and_near(HOPPER, way, kind)


@pytest.mark.parametrize(("way", "kind"), cases(("none", "forward_kl"), ("all", "jsd")))
def test_a_nan_in_a_row_that_counts_is_not_hidden(way, kind):
    check_nan(HOPPER, way, kind)


@pytest.mark.parametrize(("way", "kind"), cases(("none", "reverse_kl"), ("some", "reverse_kl")))
def test_float32_masters_with_bfloat16_products_get_float32_gradients(way, kind):
    check_masters(HOPPER, way, kind)


@pytest.mark.parametrize(
    ("axis", "way", "kind"),
    cases(("tokens", GENERAL, "forward_kl"), ("tokens", "all", "jsd"), ("vocabulary", "none", "jsd"))
    + cases(("vocabulary", "all", "reverse_kl")),
)
def test_a_mesh_is_as_accurate_as_full_logits(axis, way, kind):
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    sharding = HeadSharding(mesh, ("dp",)) if axis == "tokens" else HeadSharding(mesh, (), vocabulary="dp")
    engine = HOPPER._replace(shape=(256, 272, 128))
    check(engine, way, models_of(engine), kind, "most", sharding=sharding)


def test_what_the_kernels_cannot_multiply_is_refused_by_name():
    models, why_not = models_of(HOPPER), "impl: mosaic_gpu can't run here: (of the teacher, weight|dtype) is"
    for wrong in (models._replace(teacher_weight=models.teacher_weight[:-1]), Models(*(x.astype(F32) for x in models))):
        with gpu_tiles.override(GPU_SIZES), pytest.raises(ValueError, match=why_not):
            token_divergence(*wrong, kind="jsd", impl="mosaic_gpu")
