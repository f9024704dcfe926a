"""The table: model × {partition, freeze, thaw, cache, plasticity, sparse, ledger, checkpoint}; empty cells say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from zoo import REAL, TINY, Row

import egeria_lab as lab
from egeria_lab.algorithms.tracing import undisturbed
from egeria_lab.events import CacheBuilt, CacheNotice, ReferenceFallback

ROWS = {**TINY, **REAL}
EVERY = sorted(TINY, key=list(TINY).index)
WITHIN = 0.01
"""Share by which the ledger may differ from torch's own counter."""


def row_of(name: str) -> Row:
    if name.startswith("Hugging Face") or name == "BERT-Base":
        pytest.importorskip("transformers")
    return ROWS[name]


def session(row: Row, **options: Any) -> lab.Session:
    data = row.data()
    given = {
        "batch_size": 8,
        "epochs": 20,
        "freeze": None,
        "lr": 0.02,
        "seed": 5,
        "undo_bytes": 0,
        **row.options,
        **options,
    }
    return lab.Session(row.made(), (data, data), **given)


def front_of(made: lab.Session) -> str:
    """The frontmost layer with weights to train; a tied embedding's belong to the scores behind it."""
    return next(layer.name for layer in made.layer_modules if layer.parameters)


def tensors_of(made: lab.Session, layer: str) -> list[Tensor]:
    part = made.layer_modules.find(layer)
    buffers = [b for module in part.modules for b in module._buffers.values() if b is not None]
    return [t.detach().clone() for t in (*part.parameters, *buffers)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def losses(made: lab.Session) -> list[float]:
    return [float(x) for x in made.history.steps["loss"]]


@pytest.mark.parametrize("name", EVERY)
def test_partition_is_found_and_every_weight_belongs_to_one_layer(name: str) -> None:
    made = session(row_of(name))
    found = made.layer_modules
    assert len(found) >= ROWS[name].least, found
    owned = [id(p) for layer in found for p in layer.parameters]
    trained = {id(p) for p in made.model.parameters()}
    assert len(owned) == len(set(owned))
    unowned = trained - set(owned)
    names = [n for n, p in made.model.named_parameters() if id(p) in unowned]
    assert all(n.startswith(("unused", "sometimes", "backbone.fc")) for n in names), names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.model.modules())


@pytest.mark.parametrize("name", EVERY)
def test_freeze_and_thaw(name: str) -> None:
    made = session(row_of(name))
    front, last = front_of(made), made.layer_modules.names[-1]
    made.step(2)
    assert made.freeze(front).state == "done"
    before, moving = tensors_of(made, front), tensors_of(made, last)
    made.step(2)
    assert same(before, tensors_of(made, front))
    assert not same(moving, tensors_of(made, last))
    made.thaw(front)
    made.step(1)
    assert not same(before, tensors_of(made, front))
    made.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.model.modules())


@pytest.mark.parametrize("name", EVERY)
def test_cache_by_replay_or_the_reason_why_not(name: str) -> None:
    row = row_of(name)
    traces = []
    for cache in (None, lab.ActivationCache(self_profiling=False)):
        made = session(row, cache=cache)
        made.step(1)
        for layer in made.layer_modules.names[: made.layer_modules.index_of(front_of(made)) + 1]:
            made.freeze(layer)
        made.step(8)  # two passes and more, three steps each
        traces.append(losses(made))
        if cache is None:
            made.close()
            continue
        notices = [e.message for e in made.events.of(CacheNotice) if isinstance(e, CacheNotice)]
        assert made.cache is not None
        hits, built = made.cache.statistics.hits, made.events.of(CacheBuilt)
        made.close()
        if "cache" in row.empty:
            assert not hits
            assert any(row.empty["cache"] in message for message in notices), notices
        else:
            assert built
            assert hits > 0, notices
    assert traces[0] == traces[1]


@pytest.mark.parametrize("name", EVERY)
def test_plasticity_is_read(name: str) -> None:
    rule = lab.Plasticity(interval_steps=1, window=2, patience=2, tolerance=1e-9, monitor_budget=1.0, reference="int8")
    made = session(row_of(name), freeze=rule, deterministic=True)
    made.step(5)
    table = made.history.frame("plasticity")
    assert set(table["layer"]) == set(made.layer_modules.names)
    assert table["value"].notna().all()
    assert (table.groupby("layer")["value"].max()[made.layer_modules.names[0]]) >= 0
    for event in made.events.of(ReferenceFallback):
        assert len(event.sentence()) > 20  # a layer that int8 cannot hold says why
    made.close()


@pytest.mark.parametrize("name", EVERY)
def test_sparse_training_holds_its_masks(name: str) -> None:
    row, method = row_of(name), lab.SET(sparsity=0.5, interval_steps=2)
    if "sparse" in row.empty:
        with pytest.raises(lab.LayerError, match=row.empty["sparse"]):
            session(row, sparsity=method)
        return
    made = session(row, sparsity=method)
    made.step(5)
    assert made.sparse is not None
    assert made.sparse.updates >= 1
    parameters = dict(made.model.named_parameters())
    for parameter, density in made.sparse.densities.items():
        live = (parameters[parameter] != 0).float().mean().item()
        assert live <= density + 1e-6, parameter
    mean = sum(made.sparse.densities[n] * parameters[n].numel() for n in made.sparse.densities)
    assert mean / sum(parameters[n].numel() for n in made.sparse.densities) == pytest.approx(0.5, abs=0.06)
    made.close()


def counted(made: lab.Session, frozen: tuple[str, ...]) -> float:
    """FLOPs a sample of forward and backward pass, by torch's own counter on the plain model with open kernels."""
    for layer in frozen:
        made.freeze(layer)
    batch = made._train_source.example(2)
    with (
        undisturbed(made.model), sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False),
        FlopCounterMode(display=False) as counter,
    ):  # fmt: skip
        outputs, _ = made.trainer.run_model(made.model, batch.content)
        forward = counter.get_total_flops()
        first = next(x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point())
        if first.requires_grad:
            first.float().sum().backward()  # type: ignore[no-untyped-call]
    made.model.zero_grad()
    for layer in frozen:
        made.thaw(layer)
    backward = counter.get_total_flops() - forward
    grouped = [m for m in made.model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    if not grouped:
        return (forward + backward) / 2
    # torch counts the gradients of a grouped convolution as if it were full: by definition each of the two costs what
    # the forward pass does, and the very first layer has no input gradient.
    assert not frozen
    steps = made.recorder.flops(())
    return (3 * forward) / 2 - steps.forward[0]


@pytest.mark.parametrize("name", EVERY)
def test_ledger_agrees_with_torchs_counter(name: str) -> None:
    made = session(row_of(name))
    check_ledger(made)


def check_ledger(made: lab.Session) -> None:
    names = made.layer_modules.names
    half = tuple(names[: len(names) // 2])
    grouped = any(isinstance(m, nn.Conv2d) and m.groups > 1 for m in made.model.modules())
    for frozen in ((),) if grouped else ((), half):
        assert made.recorder.flops(frozen).total == pytest.approx(counted(made, frozen), rel=WITHIN), frozen
    saves = any(p.dim() >= 2 for n in half for p in made.layer_modules.find(n).parameters)
    if saves and sum(made.recorder.flops(()).forward[: len(half)]):  # a table of embeddings costs no product
        assert made.recorder.flops(half).total < made.recorder.flops(()).total


@pytest.mark.parametrize("name", list(REAL))
def test_the_architectures_of_the_papers_are_cut_counted_and_frozen(name: str) -> None:
    row = row_of(name)
    short = torch.utils.data.Subset(row.data(), range(2))
    made = lab.Session(
        row.made(), (short, short), batch_size=2, epochs=9, freeze=None, lr=1e-3, undo_bytes=0, **row.options
    )  # fmt: skip
    assert len(made.layer_modules) >= row.least, made.layer_modules
    check_ledger(made)
    front = made.layer_modules.names[: len(made.layer_modules) // 2]
    for layer in front:
        made.freeze(layer)
    before = [tensors_of(made, layer) for layer in (front[0], front[-1])]
    made.step(1)
    assert all(same(b, tensors_of(made, layer)) for b, layer in zip(before, (front[0], front[-1]), strict=True))
    assert made.recorder.book.flops_saved_fraction > 0.05
    made.close()


def test_what_cannot_be_cut_is_frozen_whole_and_the_table_says_why() -> None:
    made = session(TINY["encoder-decoder"])
    decoder = made.layers["target"]
    assert decoder.note == (
        "holds decoder.0, decoder.1 too: no cut between them, as what follows needs more than one output"
    )
    made.freeze("target")
    before = [p.detach().clone() for p in made.model.get_submodule("decoder").parameters()]
    made.step(2)
    assert same(before, list(made.model.get_submodule("decoder").parameters()))


@pytest.mark.parametrize("name", EVERY)
def test_checkpoint_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    row = row_of(name)
    made = session(row)
    made.step(2)
    made.freeze(front_of(made))
    made.step(1)
    made.save(tmp_path / "a.ckpt")
    data = row.data()
    second = lab.Session.load(tmp_path / "a.ckpt", model=row.made(), data=(data, data), **row.options)
    for one in (made, second):
        one.step(2)
        one.thaw(front_of(one))
        one.step(1)
    assert losses(made) == losses(second)
    exported = row.made()
    exported.load_state_dict(second.export().state_dict)
    assert isinstance(exported, nn.Module)
    made.close(), second.close()
