"""Room strategies/gpu_attention.py, on a GPU: blocks put together by its kernels are attention over all keys."""

import math

import pytest

from perf.facts.gpus import visible_gpus
from tests.gpu_ranks import KERNELS, Blocks

pytestmark = pytest.mark.skipif(not visible_gpus(None), reason="needs a GPU")
BFLOAT16_BAND = 2e-2


def test_blocks_are_attention_over_all_keys(launcher):
    ((found,), _) = launcher.run("tests.gpu_ranks:blocks", None, world_size=1, record=Blocks, deadline_s=120.0)
    assert len(found.errors) == 8 * len(KERNELS)
    wrong = {
        case: errors
        for case, errors in found.errors.items()
        if not all(math.isfinite(error) and error < BFLOAT16_BAND for error in errors.values())
    }
    assert not wrong
