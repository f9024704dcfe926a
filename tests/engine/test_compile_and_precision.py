"""torch.compile, mixed precision and gradient checkpointing keep working across freezes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import egeria_lab as lab
from egeria_lab.events import LayerFrozen, Recompiled

RULE = lab.Plasticity(interval_steps=2)


def mlp() -> nn.Module:
    data = lab.data.load("digits")
    return lab.models.build("mlp", input_shape=data.input_shape, num_classes=10, seed=1)


def losses_with_a_freeze_and_a_thaw(session: lab.Session) -> list[float]:
    session.step(4)
    session.freeze("layers.0")
    session.step(4)
    session.thaw("layers.0")
    session.step(4)
    return [float(loss) for loss in session.history.steps["loss"]]


def test_compiled_model_trains_as_the_plain_one_and_readings_go_on() -> None:
    """Traps 48 and 50: the right gradients after each change, and no hook silently dead."""
    torch._dynamo.reset()
    compiled = lab.Session(torch.compile(mlp(), backend="aot_eager"), "digits", epochs=2, freeze=RULE)  # type: ignore[arg-type]
    plain = lab.Session(mlp(), "digits", epochs=2, freeze=RULE)
    assert losses_with_a_freeze_and_a_thaw(compiled) == pytest.approx(losses_with_a_freeze_and_a_thaw(plain), abs=1e-6)
    assert compiled.layers.names == plain.layers.names
    assert all("_orig_mod" not in name for name, _ in compiled.model.named_parameters())
    mine, theirs = compiled.history.plasticity["value"], plain.history.plasticity["value"]
    assert len(mine) == len(theirs) > 0
    assert mine.max() > 0


def test_recompilations_are_counted_and_announced() -> None:
    torch._dynamo.reset()
    session = lab.Session(torch.compile(mlp(), backend="aot_eager"), "digits", epochs=2, freeze=None)  # type: ignore[arg-type]
    session.step(3)
    session.freeze("layers.0")
    session.step(3)
    announced = [e for e in session.events.of(Recompiled) if isinstance(e, Recompiled)]
    assert [e.step for e in announced] == [1, 4]
    assert announced[-1].total == sum(e.graphs for e in announced)


def test_frozen_layer_of_a_compiled_model_gets_no_gradient() -> None:
    torch._dynamo.reset()
    session = lab.Session(torch.compile(mlp(), backend="aot_eager"), "digits", epochs=2, freeze=None)  # type: ignore[arg-type]
    session.step(2)
    session.freeze("layers.0")
    session.step(2)
    frozen = [p.grad for name, p in session.model.named_parameters() if name.startswith("layers.0.")]
    active = [p.grad for name, p in session.model.named_parameters() if not name.startswith("layers.0.")]
    assert all(grad is None for grad in frozen)
    assert all(grad is not None for grad in active)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_with_clipping_freezes_and_thaws(precision: str) -> None:
    """Trap 51: loss scaling meets a frozen layer."""
    session = lab.Session("mlp", "digits", epochs=2, precision=precision, max_grad_norm=1.0, freeze=RULE)
    losses = losses_with_a_freeze_and_a_thaw(session)
    assert losses[-1] < losses[0]
    assert session.model.layers[0][0].weight.dtype == torch.float32 if hasattr(session.model.layers[0], "0") else True
    assert len(session.history.plasticity) > 0


class Checkpointed(nn.Module):
    """Two blocks that are recomputed in the backward pass, and a head."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 10)
        self.use_reentrant = use_reentrant
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant).relu()
        out: Tensor = self.head(x)
        return out


def test_checkpointing_reads_once_a_step_and_freezing_makes_a_difference() -> None:
    """Traps 53 and 55: recomputation fires hooks again, and freezing is no no-op."""
    traces = []
    for freeze in (None, "blocks.0"):
        session = lab.Session(Checkpointed(False), "digits", epochs=4, freeze=RULE)
        session.step(4)
        if freeze:
            session.freeze(freeze)
        session.step(8)
        traces.append([float(x) for x in session.history.steps["loss"]])
        steps = session.history.frame("plasticity").groupby(["step", "layer"]).size()
        assert steps.max() == 1
    assert traces[0][:4] == traces[1][:4]
    assert traces[0][6:] != traces[1][6:]


def test_reentrant_checkpointing_with_a_frozen_front_advises_the_other_kind() -> None:
    """Traps 52 and 54: a reentrant checkpoint whose input needs no gradient cuts the graph."""
    session = lab.Session(Checkpointed(False), "digits", epochs=4, freeze=None)
    session.freeze("blocks.0")
    session.step(2)
    assert session.model.blocks[1].weight.grad is not None  # type: ignore[union-attr,index]
    reentrant = lab.Session(Checkpointed(True), "digits", epochs=4, freeze=None)
    reentrant.freeze("blocks.0")
    with pytest.raises(lab.TrainingError, match="use_reentrant=False"):
        reentrant.step(2)


def test_layers_of_a_compiled_model_freeze_together_so_that_it_compiles_once() -> None:
    def run(model: nn.Module) -> tuple[list[int], list[int]]:
        torch._dynamo.reset()
        eager = lab.Plasticity(
            interval_steps=1,
            window=2,
            patience=2,
            tolerance=50.0,
            bootstrap_change=10.0,
            refresh_on_freeze=False,
            monitor_budget=1.0,
        )
        session = lab.Session(model, "digits", epochs=4, freeze=eager)
        session.run(progress=False)
        return [e.step for e in session.events.of(LayerFrozen)], [e.step for e in session.events.of(Recompiled)]

    frozen_at, compiled_at = run(torch.compile(mlp(), backend="aot_eager"))  # type: ignore[arg-type]
    one_by_one, _ = run(mlp())
    assert len(frozen_at) == len(one_by_one) >= 2
    assert len(set(frozen_at)) == 1 < len(set(one_by_one))
    assert [step for step in compiled_at if step > frozen_at[0]] == [frozen_at[0] + 1]
