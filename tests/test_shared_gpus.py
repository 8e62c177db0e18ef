"""Helper tests/shared_gpus.py: which tests on GPUs a machine can make."""

import pytest

from tests.shared_gpus import lack_of_gpus


@pytest.mark.parametrize(
    ("world_size", "num_gpus", "is_on", "expected"),
    [
        (1, 1, False, ""),
        (4, 4, False, ""),
        (4, 1, True, ""),
        (1, 0, True, "needs 1 GPU, sees 0"),
        (2, 0, False, "needs 2 GPUs, sees 0"),
        (4, 2, False, "needs 4 GPUs, sees 2; under MPS ranks share them: nvidia-cuda-mps-control -d"),
    ],
)
def test_ranks_share_gpus_only_where_their_kernels_run_at_once(tmp_path, world_size, num_gpus, is_on, expected):
    if is_on:
        (tmp_path / "control").touch()
    assert lack_of_gpus(world_size, num_gpus, tmp_path) == expected
