"""A session with sparse weights: exact, consistent with freezing, and honest about what masks save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.algorithms.cost_model import dense_weight_gradients, training_flops
from egeria_lab.engine.technique_costs import TechniqueCosts
from egeria_lab.events import MaskUpdated, Notice

METHODS: list[Any] = [
    lab.StaticSparsity(sparsity=0.8),
    lab.SET(sparsity=0.8, interval_steps=3),
    lab.RigL(sparsity=0.8, interval_steps=3),
    lab.MEST(sparsity=0.8, interval_steps=3, soft_bound=False),
    lab.MEST(sparsity=0.8, interval_steps=3),
]


def under_masks(session: lab.Session) -> float:
    """Largest magnitude under any mask, of weights and of optimizer state."""
    assert session.sparse is not None
    masks = session.sparse.masks.masks
    largest = 0.0
    for name, parameter in session.model.named_parameters():
        if name not in masks:
            continue
        state = session.optimizer.state.get(parameter, {})
        tensors = [
            parameter.detach(),
            *(v for v in state.values() if isinstance(v, Tensor) and v.shape == parameter.shape),
        ]
        largest = max([largest, *(float(t[~masks[name]].abs().max()) for t in tensors)])
    return largest


@pytest.mark.parametrize("sparsity", METHODS, ids=lambda m: type(m).__name__ + str(getattr(m, "soft_bound", "")))
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_nothing_under_a_mask_is_ever_non_zero(sparsity: Any, optimizer: str) -> None:
    """Trap 59."""
    session = lab.Session("mlp", "digits", epochs=3, optimizer=optimizer, freeze=None, sparsity=sparsity)
    for _ in range(20):
        session.step()
        assert under_masks(session) == 0.0
    changes = len(session.events.of(MaskUpdated))
    assert changes == (0 if isinstance(sparsity, lab.StaticSparsity) else 6)


def test_state_dict_names_stay_plain_and_the_model_loads_anywhere() -> None:
    """Trap 39."""
    session = lab.Session("mlp", "digits", epochs=1, freeze=None, sparsity=lab.MEST())
    session.step(3)
    data = lab.data.load("digits")
    bare = lab.models.build("mlp", input_shape=data.input_shape, num_classes=10)
    bare.load_state_dict(session.model.state_dict(), strict=True)


def test_freezing_locks_mask_and_values_and_thawing_gives_them_back() -> None:
    """Traps 65 and 66."""
    session = lab.Session(
        "mlp", "digits", epochs=3, freeze=None, sparsity=lab.SET(sparsity=0.8, interval_steps=2), optimizer="adamw"
    )
    session.step(4)
    session.freeze("layers.1")
    session.step()
    assert session.sparse is not None
    weight = dict(session.model.named_parameters())["layers.1.linear.weight"]
    before, mask = weight.detach().clone(), session.sparse.masks.masks["layers.1.linear.weight"]
    session.step(8)
    assert torch.equal(weight, before)
    assert torch.equal(session.sparse.masks.masks["layers.1.linear.weight"], mask)
    session.thaw("layers.1")
    session.step()
    assert not torch.equal(weight, before)
    session.step(2)
    assert not torch.equal(session.sparse.masks.masks["layers.1.linear.weight"], mask)
    assert under_masks(session) == 0.0


def test_a_layer_over_its_budget_is_pruned_to_the_target_when_it_freezes() -> None:
    session = lab.Session("mlp", "digits", epochs=3, freeze=None, sparsity=lab.MEST(sparsity=0.9))
    session.step(2)
    assert session.sparse is not None
    name = "layers.0.linear.weight"
    assert session.sparse.densities[name] == pytest.approx(0.15, abs=1e-4)
    session.freeze("layers.0")
    session.step()
    assert session.sparse.densities[name] == pytest.approx(0.10, abs=1e-4)
    assert session.sparse.densities["layers.1.linear.weight"] == pytest.approx(0.15, abs=1e-4)


def test_a_refused_freeze_prunes_nothing() -> None:
    session = lab.Session("mlp", "digits", epochs=3, freeze=None, sparsity=lab.MEST(sparsity=0.9))
    for name in session.layers.names[:-1]:
        session.freeze(name)
    session.step()
    assert session.sparse is not None
    before = session.sparse.densities
    assert session.freeze(session.layers.names[-1]).state == "rejected"
    assert session.sparse.densities == before
    assert not any(name.startswith("layers.3") for name in session.sparse.masks.locked)


PLANNED = [
    (lab.MEST(), "single_shot"),
    (lab.MEST(interval_steps=7), "single_shot_resume"),
    (lab.MEST(), "periodic"),
    (lab.MEST(sparsity=0.5, density="erk"), "delayed_periodic"),
    (lab.MEST(soft_bound=False), "single_shot"),
    (lab.RigL(), "single_shot"),
    (lab.RigL(interval_steps=5, stop_fraction=0.5), "delayed_periodic"),
    (lab.SET(), "single_shot"),
]


@pytest.mark.parametrize(("sparsity", "variant"), PLANNED, ids=lambda value: getattr(value, "prefix", value))
def test_a_schedule_is_solved_with_what_the_ledger_counts(sparsity: Any, variant: str) -> None:
    """Pruning at a freeze, updates that come late, and dense gradients are part of the target."""
    schedule = lab.Schedule(variant=variant, saving=0.25)
    session = lab.Session("mlp", "digits", epochs=20, freeze=schedule, sparsity=sparsity)
    session.run(progress=False)
    run = session.savings().run
    assert run is not None
    assert 0.25 <= run.saved_by_freezing <= 0.27


def test_dense_gradients_are_counted_update_by_update() -> None:
    session = lab.Session(
        "mlp", "digits", epochs=4, freeze=None, sparsity=lab.RigL(sparsity=0.8, interval_steps=5, stop_fraction=0.6)
    )
    assert session.sparse is not None
    densities, full = session.sparse.densities, session.recorder.flops(())
    session.step(12)
    session.freeze("layers.0")
    session.step(session.planned_steps - 12)
    steps = [event.step for event in session.events.of(MaskUpdated)]
    assert steps == [5, 10, 15, 20, 25]
    seen = session.history.frame("steps")["samples"].tolist()
    batches = {step: seen[step - 1] - seen[step - 2] for step in steps}
    assert len(set(batches.values())) == 1
    before, after = (dense_weight_gradients(full, densities, frozen) for frozen in ((), ("layers.0",)))
    run = session.savings().run
    assert run is not None
    assert run.dense_gradients == pytest.approx(batches[5] * (2 * before + 3 * after), rel=1e-9)
    resumed = TechniqueCosts(full, session.model, session.layer_modules, 128)
    resumed.load_state_dict(session.recorder.techniques.state_dict())
    assert resumed.totals()[0].dense_gradients == pytest.approx(run.dense_gradients, rel=1e-12)


def test_what_freezing_saves_follows_the_phases_also_when_all_that_is_masked_is_frozen() -> None:
    """Nothing is left to update then, and what the run without freezing would cost still falls with the phases."""
    session = lab.Session("mlp", "digits", epochs=4, freeze=None, sparsity=lab.MEST(sparsity=0.9))
    session.step(3)
    for name in session.layers.names[:-1]:
        session.freeze(name)
    session.step(session.planned_steps - 3)
    assert session.sparse is not None
    target = session.sparse.masks.target_densities()
    costs = session.sparse.costs()
    assert costs["unfrozen"] == pytest.approx(target)
    run, full = session.savings().run, session.recorder.flops(())
    assert run is not None
    updates = session.sparse.settings.update_steps(session.planned_steps, 12)
    edges = [0, *updates, session.planned_steps + 1]
    seen = session.history.frame("steps")["samples"].tolist()
    expected = 0.0
    for number in range(1, session.planned_steps + 1):
        at = max(edge for edge in edges if edge <= number) / session.planned_steps
        densities = session.sparse.masks.densities_at(session.sparse.settings.sparsity_at(at))
        samples = seen[number - 1] - (seen[number - 2] if number > 1 else 0)
        expected += samples * training_flops(full, densities=densities)
    assert run.after_sparsity == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sparsity", [lab.MEST(), lab.StaticSparsity(sparsity=0.5)])
def test_the_ledger_is_the_same_after_close(sparsity: Any, tmp_path: Any) -> None:
    session = lab.Session("mlp", "digits", epochs=1, freeze=None, sparsity=sparsity)
    session.step(3)
    before = session.savings().to_dict()
    session.close()
    session.close()
    assert session.savings().to_dict() == before
    assert session.report(tmp_path / "report.html").stat().st_size > 0
    session.dashboard()


@pytest.mark.parametrize(
    ("sparsity", "numbers"),
    [
        (lab.SET(interval_steps=10**6), ("every 1,000,000 steps", "24", "at most 17")),
        (lab.RigL(interval_epochs=100), ("every 1,200 steps", "24", "at most 17")),
        (lab.MEST(interval_steps=20), ("every 20 steps", "24", "at most 17")),
    ],
)
def test_masks_that_will_never_change_are_announced_once_at_the_start(sparsity: Any, numbers: tuple[str, ...]) -> None:
    session = lab.Session("mlp", "digits", epochs=2, freeze=None, sparsity=sparsity)
    session.step()
    (notice,) = session.events.of(Notice)
    assert all(number in notice.sentence() for number in numbers)
    session.step(23)
    assert len(session.events.of(Notice)) == 1
    assert not any(event.grown for event in session.events.of(MaskUpdated))


def test_masks_that_change_or_are_static_are_not_announced() -> None:
    for sparsity in (lab.SET(), lab.StaticSparsity()):
        session = lab.Session("mlp", "digits", epochs=2, freeze=None, sparsity=sparsity)
        session.step(2)
        assert not session.events.of(Notice)


def test_no_row_promises_less_than_what_is_saved() -> None:
    """The most that sparsity can save is that of whole steps: the first layer has no input gradient."""
    session = lab.Session(
        "mlp", "digits", epochs=1, freeze=None, sparsity=lab.StaticSparsity(sparsity=0.99, dense=("layers.0",))
    )
    session.step(2)
    ledger = session.savings()
    assert ledger.run is not None
    assert ledger.sparsity is not None
    assert ledger.run.saved_by_sparsity <= ledger.sparsity.maskable_share
    assert ledger.run.saved_by_sparsity == pytest.approx(0.99 * ledger.sparsity.maskable_share, abs=1e-3)


def test_what_is_left_multiplies_over_the_techniques() -> None:
    session = lab.Session("mlp", "digits", epochs=12, **lab.presets.spfde(saving=0.2, sieve=0.25, sparsity=0.9))
    session.run(progress=False)
    run = session.savings().run
    assert run is not None
    left = (1 - run.saved_by_sieving) * (1 - run.saved_by_sparsity) * (1 - run.saved_by_freezing)
    assert 1 - run.saved == pytest.approx(left, rel=1e-9)
    assert run.saved_by_sieving == pytest.approx(1 - 1078 / 1437)
    text = repr(session.savings())
    assert "masks save no time and no memory on dense kernels" in text
    assert session.savings().to_dict()["sparsity"]["density"] == pytest.approx(0.1, abs=1e-3)


def test_everything_together_trains() -> None:
    session = lab.Session("mlp", "digits", epochs=4, **lab.presets.everything(sieve=0.2, sparsity=0.5))
    session.run(progress=False)
    accuracy = session.evaluate()["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.6
    assert under_masks(session) == 0.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masks_hold_under_mixed_precision(precision: str) -> None:
    session = lab.Session(
        "mlp", "digits", epochs=2, precision=precision, freeze=None, sparsity=lab.RigL(sparsity=0.8, interval_steps=2),
        max_grad_norm=1.0,
    )  # fmt: skip
    session.step(8)
    assert under_masks(session) == 0.0


def test_masks_hold_in_a_compiled_model() -> None:
    torch._dynamo.reset()
    data = lab.data.load("digits")
    model = torch.compile(lab.models.build("mlp", input_shape=data.input_shape, num_classes=10), backend="aot_eager")
    session = lab.Session(model, "digits", epochs=2, freeze=None, sparsity=lab.SET(sparsity=0.8, interval_steps=2))  # type: ignore[arg-type]
    session.step(6)
    assert under_masks(session) == 0.0


def test_clipping_does_not_see_gradients_under_masks() -> None:
    """Trap 6, with masks: the norm that decides the factor is that of the live gradients."""
    seen: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            seen.append(float(torch.cat([g.flatten() for g in grads]).norm()))
            return super().step(closure)

    session = lab.Session(
        "mlp", "digits", epochs=1, freeze=None, max_grad_norm=1e-3, sparsity=lab.StaticSparsity(sparsity=0.9),
        optimizer=lambda p: Noting(p, lr=0.1),
    )  # fmt: skip
    session.step(3)
    assert seen == pytest.approx([1e-3] * 3, rel=1e-2)


@pytest.mark.parametrize("reference", ["fp32", "int8"])
def test_the_reference_takes_a_snapshot_of_a_masked_model(reference: str) -> None:
    """Trap 60."""
    session = lab.Session(
        "mlp", "digits", epochs=1, freeze=lab.Plasticity(interval_steps=2, reference=reference),
        sparsity=lab.MEST(sparsity=0.9),
    )  # fmt: skip
    session.step(8)
    assert len(session.history.plasticity) > 0


def test_close_leaves_a_plain_model() -> None:
    session = lab.Session("mlp", "digits", epochs=1, freeze=None, sparsity=lab.MEST())
    session.step(2)
    session.close()
    names = set(vars(session.model))
    data = lab.data.load("digits")
    assert names == set(vars(lab.models.build("mlp", input_shape=data.input_shape, num_classes=10)))
    for module in session.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert session.trainer.update_hooks is None


@pytest.mark.parametrize("value", [1.0, -0.1, float("nan"), 2, "0.9", None])
def test_a_sparsity_out_of_range_is_one_sentence(value: Any) -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"MEST.sparsity must be in \[0, 1\)"):
        lab.MEST(sparsity=value)


def test_channels_that_do_not_divide_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 10))
    with pytest.raises(lab.EgeriaLabError, match="30"):
        lab.Session(
            nn.Sequential(nn.Flatten(), model), "digits", epochs=1, freeze=None, sparsity=lab.MEST(scheme="block")
        )


@pytest.mark.parametrize("sparsity", [0.9, "mest", lab.CirculantSieve()])
def test_what_is_no_sparsity_is_one_sentence(sparsity: Any) -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"lab\.MEST"):
        lab.Session("mlp", "digits", sparsity=sparsity)


def test_a_parametrised_model_is_counted_frozen_and_thawed_by_its_own_tensors() -> None:
    """Trap 7: the optimizer's leaf tensors are frozen, not what is derived from them."""
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 16)), nn.ReLU(), nn.Linear(16, 10))
    session = lab.Session(model, "digits", epochs=2, freeze=None)
    assert session.recorder.flops(()).forward == (2 * 64 * 16, 2 * 16 * 10)
    session.step(3)
    front = session.layers.names[0]
    session.freeze(front)
    session.step()
    before = {name: p.detach().clone() for name, p in model[1].named_parameters()}
    session.step(4)
    assert all(torch.equal(before[name], p) for name, p in model[1].named_parameters())
    session.thaw(front)
    session.step(2)
    assert not any(torch.equal(before[name], p) for name, p in model[1].named_parameters())
