"""What a rank does in the tests of products: says where it stands."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from perf.facts import jsonfile
from perf.measure.server import RankContext
from strategies.layout import Layout
from strategies.value import Value
from tests.equivalence import join, leave


class Place(Value, frozen=True, kw_only=True):
    """A rank in torch's mesh."""

    coordinates: dict[str, int]
    groups: dict[str, tuple[int, ...]]
    """Axis -> the ranks of its group."""


def stand(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server."""
    layout = jsonfile.convert(payload, Layout, source="layout")
    join(context)
    mesh = init_device_mesh("cpu", tuple(layout.axes.values()), mesh_dim_names=tuple(layout.axes))
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    groups = {axis: tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in layout.axes}
    leave(context, Place(coordinates=dict(zip(layout.axes, coordinates, strict=True)), groups=groups))
