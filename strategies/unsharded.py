"""`single`: the whole model on one rank, the reference that every other strategy must equal."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from strategies.model import compile_layers
from strategies.sharded import BuildConfig, Sharded, adamw, compute_dtype
from strategies.spec import Mode


def build_single(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Compiles when asked; cuts nothing."""
    if config.mode is Mode.COMPILE:
        compile_layers(model)
    return Sharded(
        module=model,
        unwrapped=model,
        optimizer=adamw(model, config.layout.workload.learning_rate),
        mesh=mesh,
        autocast_dtype=compute_dtype(config.layout),
    )
