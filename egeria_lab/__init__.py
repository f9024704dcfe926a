"""Watch and steer layer freezing while a PyTorch model trains.

Example:
    >>> import egeria_lab as lab
    >>> session = lab.Session("mlp", "digits", epochs=2)
    >>> session.step().step
    1
"""

from egeria_lab import data, integrations, models, presets
from egeria_lab.algorithms.cost_model import layer_flops, training_flops
from egeria_lab.algorithms.costs import count_flops
from egeria_lab.algorithms.diagnostics import (
    mask_churn,
    representational_similarity,
    representations,
    structural_similarity,
)
from egeria_lab.algorithms.distances import (
    cosine_distance,
    linear_cka_distance,
    relative_l2_distance,
    sp_distance,
)
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.freezing import Freezer, freeze_layers
from egeria_lab.algorithms.gradient_norm import GradientNorm
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.memory_model import layer_sizes, paper_memory
from egeria_lab.algorithms.run_costs import Interval, run_flops
from egeria_lab.algorithms.sieving.settings import CirculantSieve, LossSieve, OneShotSieve, RandomSieve
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.algorithms.sparse.masked_training import SparseTraining
from egeria_lab.algorithms.sparse.methods import MEST, SET, RigL, StaticSparsity
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.data.augment import Augment, Replayable
from egeria_lab.data.datasets import ArrayDataset, Data
from egeria_lab.data.sieved import KeptSampler
from egeria_lab.engine.recorder import StepRecord
from egeria_lab.errors import (
    CheckpointError,
    DataError,
    EgeriaLabError,
    InvalidSettingError,
    LayerError,
    MissingPackageError,
    TrainingError,
    UnknownNameError,
)
from egeria_lab.integrations import loggers
from egeria_lab.session import Session, compare, replay

__version__ = "0.1.0"


def __dir__() -> list[str]:  # what a notebook completes after `lab.`: not every module inside
    return [*__all__, "errors", "events"]


__all__ = [
    "MEST",
    "SET",
    "ActivationCache",
    "ArrayDataset",
    "Augment",
    "CheckpointError",
    "CirculantSieve",
    "Data",
    "DataError",
    "EgeriaLabError",
    "Freezer",
    "GradientNorm",
    "Interval",
    "InvalidSettingError",
    "KeptSampler",
    "LayerError",
    "LossSieve",
    "MissingPackageError",
    "OneShotSieve",
    "Plasticity",
    "RandomSieve",
    "Replayable",
    "RigL",
    "Schedule",
    "Session",
    "Sieve",
    "SparseTraining",
    "StaticSparsity",
    "StepRecord",
    "TrainingError",
    "UnknownNameError",
    "__version__",
    "compare",
    "cosine_distance",
    "count_flops",
    "data",
    "freeze_layers",
    "integrations",
    "layer_flops",
    "layer_sizes",
    "layers",
    "linear_cka_distance",
    "loggers",
    "mask_churn",
    "models",
    "paper_memory",
    "presets",
    "relative_l2_distance",
    "replay",
    "representational_similarity",
    "representations",
    "run_flops",
    "sp_distance",
    "structural_similarity",
    "training_flops",
]
