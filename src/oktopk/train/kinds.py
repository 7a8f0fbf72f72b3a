"""Kinds of parameters, by the module that owns them."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

KINDS = ("convolution", "recurrent", "linear", "embedding", "norm", "bias", "other")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "convolution": (_ConvNd,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
    "linear": (nn.Linear, nn.Bilinear, nn.MultiheadAttention),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "norm": (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
}


def kinds_of(net: nn.Module) -> dict[str, str]:
    """The kind of each parameter, by its name. One that several modules share is of the first.

    A bias is a bias in any module but a norm, whose parameters are all of one kind.
    """
    seen, kinds = set(), {}
    for prefix, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                kinds[f"{prefix}.{name}" if prefix else name] = _kind(module, name)
    return kinds


def _kind(module: nn.Module, name: str) -> str:
    found = next((kind for kind, types in _MODULES.items() if isinstance(module, types)), "other")
    return "bias" if "bias" in name and found != "norm" else found
