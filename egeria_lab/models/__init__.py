"""Models by name, each an `nn.Sequential` of layer modules under `layers`, front to back."""

from egeria_lab.models.mlp import Mlp
from egeria_lab.models.registry import build, names
from egeria_lab.models.resnet import ResNet
from egeria_lab.models.transformer import Transformer

__all__ = ["Mlp", "ResNet", "Transformer", "build", "names"]
