"""Models by name, each an `nn.Sequential` of layer modules under `layers`, front to back.

Example:
    >>> len(build("mlp", input_shape=(1, 8, 8), num_classes=10).layers)
    4
"""

from egeria_lab.models.mlp import Mlp
from egeria_lab.models.pretrained import EfficientNetLite0, MiniLm, minilm_tokenizer
from egeria_lab.models.registry import build, names
from egeria_lab.models.resnet import ResNet
from egeria_lab.models.transformer import Transformer

__all__ = ["EfficientNetLite0", "MiniLm", "Mlp", "ResNet", "Transformer", "build", "minilm_tokenizer", "names"]


def __dir__() -> list[str]:
    return __all__
