"""`single`: the whole model on one rank, the reference that every other strategy must equal."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from strategies.model import prepare_layers
from strategies.optimizer import adamw
from strategies.sharded import BuildConfig, Sharded, compute_dtype


def build_single(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Cuts nothing."""
    prepare_layers(model, config.layout)
    return Sharded(
        module=model,
        unwrapped=model,
        optimizer=adamw(model.parameters(), config.layout),
        mesh=mesh,
        layout=config.layout,
        autocast_dtype=compute_dtype(config.layout),
    )
