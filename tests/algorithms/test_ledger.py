"""The savings table: theoretical and measured apart, every zero with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from egeria_lab.algorithms.cost_model import effective_densities, floor_share, layer_flops, training_flops, weight_flops
from egeria_lab.algorithms.costs import LEAST_TIMES, CostBook, StepFlops, count_flops, measure_saved_tensors
from egeria_lab.algorithms.freezing import freeze_layers
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.ledger import Ledger, LedgerLayer, SieveFigures, SparsityFigures
from egeria_lab.algorithms.memory_model import LayerSizes, MemoryRun, layer_sizes, memory_over_run
from egeria_lab.algorithms.run_costs import Interval, RunFlops, run_flops


def ledger(states: str, frozen_steps: int | None = None, **book: Any) -> Ledger:
    """A ledger over layers of equal cost; one letter a layer, "F" for frozen."""
    rows = tuple(
        LedgerLayer(
            name=f"layers.{i}", parameters=10, forward_flops=10.0, backward_flops=20.0,
            state="frozen" if letter == "F" else "active",
            frozen_steps=(5 if letter == "F" else 0) if frozen_steps is None else frozen_steps,
        )
        for i, letter in enumerate(states)
    )  # fmt: skip
    return Ledger(book=CostBook(**book), layers=rows, predicted_saved_bytes=600.0)


def test_nothing_frozen_says_so_three_times() -> None:
    why = ledger("aaa").why()
    assert set(why.values()) == {"no layer has been frozen yet"}


def test_a_frozen_prefix() -> None:
    why = ledger("FFa").why()
    assert why["flops"] == "2 of 3 layers frozen from the front skip their backward pass"
    assert why["memory"] == "the frozen front keeps nothing for backward (2 of 3 layers)"
    assert why["time"] == "too few steps with nothing frozen to compare with"


def test_a_hole_says_why_memory_did_not_fall() -> None:
    """traps row 69: '0 B: trainable layers lie before it'."""
    why = ledger("aFa").why()
    assert why["flops"].endswith("1 behind trainable layers save weight gradients only")
    assert why["memory"] == "0 B from freezing at the front: trainable layers lie before the frozen ones"
    both = ledger("FaFa").why()
    assert both["flops"].startswith("1 of 4 layers frozen from the front")
    assert both["flops"].endswith("1 behind trainable layers save weight gradients only")


def test_thawed_again() -> None:
    why = ledger("aaa", frozen_steps=3).why()
    assert why["flops"] == "layers were frozen for a while and are trained again"
    assert why["memory"] == "0 B now: no layer is frozen"


def test_the_floor_is_named() -> None:
    """traps row 12: all forward work and the head's backward remain whatever is frozen: (20 + 30) / 90."""
    assert ledger("FFa").always_active_share == pytest.approx(50 / 90)
    assert "55.6 % of the FLOPs are the floor" in repr(ledger("FFa"))


def test_theoretical_and_measured_do_not_mix() -> None:
    """traps row 64."""
    book: dict[str, Any] = {
        "steps": 30, "executed_flops": 75.0, "full_flops": 100.0, "train_seconds": 8.0, "monitor_seconds": 2.0,
        "full_steps": 10, "full_step_seconds": [1.0] * LEAST_TIMES, "frozen_seconds": 10.0, "saved_bytes": 500,
        "full_saved_bytes": 1000,
    }  # fmt: skip
    made = ledger("FFa", **book)
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["flops"]["saved_fraction"] == 0.25
    assert plain["time"]["predicted_saved_fraction"] == 0.25
    assert plain["time"]["measured_saved_fraction"] == pytest.approx(1 / 3)
    assert plain["time"]["monitor_fraction"] == pytest.approx(0.2)
    assert plain["memory"]["saved_fraction"] == 0.5
    assert plain["memory"]["theoretical_saved_fraction"] == pytest.approx(0.4)
    assert [layer["state"] for layer in plain["layers"]] == ["frozen", "frozen", "active"]
    text, page = repr(made), made._repr_html_()
    for cell in ("theoretical", "measured", "25.0 %", "33.3 %", "50.0 %", "40.0 %", "-20.0 %", "cost of watching"):
        assert cell in text
        assert cell in page


def test_unknown_figures_are_dashes() -> None:
    made = ledger("FFa", steps=1)
    assert made.memory_saved_fraction is None
    assert made.memory_predicted_fraction is None
    assert "–" in repr(made)
    assert json.loads(json.dumps(made.to_dict()))["time"]["measured_saved_fraction"] is None


def test_nothing_gained_has_its_reason() -> None:
    """Each zero (and each loss) says why it is one."""
    slow: dict[str, Any] = {
        "steps": 30,
        "full_steps": 10,
        "full_step_seconds": [1.0] * LEAST_TIMES,
        "frozen_seconds": 20.0,
    }
    assert "nothing gained" in ledger("FFa", **slow).why()["time"]
    assert "nothing gained" not in ledger("FFa", **(slow | {"frozen_seconds": 10.0})).why()["time"]
    assert "0 so far" in ledger("FFa", executed_flops=10.0, full_flops=10.0).why()["flops"]
    assert "0 so far" not in ledger("FFa", executed_flops=9.0, full_flops=10.0).why()["flops"]
    assert ledger("FFa", saved_bytes=10, full_saved_bytes=10).why()["memory"].startswith("0 B: the frozen front")


def test_the_floor_can_be_counted() -> None:
    """Once all before it is frozen, the head's own input gradient goes too."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 30)), torch.zeros(2, 4)
    step = count_flops(model, layers(model, x), lambda: model(x).sum(), 2)
    made = Ledger(book=CostBook(), layers=ledger("Fa").layers, floor=floor_share(step))
    assert made.always_active_share == pytest.approx((32 + 240 + 240) / (2 * 32 + 3 * 240))
    assert made.to_dict()["flops"]["floor_fraction"] == made.always_active_share


# --- features that may be off ----------------------------------------------------------------------------

STEP = StepFlops((10.0, 10.0, 10.0), (20.0, 20.0, 20.0), ("layers.0", "layers.1", "layers.2"))
SIZES = tuple(LayerSizes(name, {f"{name}.weight": 100}, 1000.0, frozenset({f"{name}.weight"})) for name in STEP.names)
SPARSE = {"layers.1": 0.15, "layers.2": 0.15}
TARGETS = {"layers.1": 0.1, "layers.2": 0.1}
NEW_LABELS = (
    "FLOPs by sieving", "FLOPs by sparsity", "FLOPs, all together", "cost of the soft bound", "cost of dense gradients",
    "cost of masks", "most that sparsity can save", "memory, as the papers count", "peak memory",
)  # fmt: skip


def sieve(kept: int = 75) -> SieveFigures:
    return SieveFigures(method="circulant sieve", kept=kept, total=100, updates=3, seconds=0.25)


def sparsity(**changes: Any) -> SparsityFigures:
    figures: dict[str, Any] = {
        "method": "MEST EM&S", "density": 0.15, "target_density": 0.1, "mean_density": 0.133, "maskable_share": 0.9,
        "updates": 4, "seconds": 0.5,
    }  # fmt: skip
    return SparsityFigures(**(figures | changes))


def complete(**changes: Any) -> Ledger:
    """Half of the run with the first layer frozen, at density 0.15, a quarter of the samples left out."""
    plan = [
        Interval(samples=100, sieved=0.25, densities=SPARSE, targets=TARGETS, dense_gradient_steps=9),
        Interval(samples=100, sieved=0.25, densities=SPARSE, targets=TARGETS, frozen=("layers.0",)),
    ]
    parts: dict[str, Any] = {
        "run": run_flops(STEP, plan), "sieve": sieve(), "sparsity": sparsity(),
        "paper_memory": memory_over_run(SIZES, plan), "peak_bytes": 600, "full_peak_bytes": 1000,
    }  # fmt: skip
    return Ledger(
        book=CostBook(steps=10, executed_flops=75.0, full_flops=100.0),
        **({"layers": ledger("Faa").layers} | parts | changes),
    )


def test_rows_of_features_that_are_off_are_absent() -> None:
    off = ledger("FFa", steps=1)
    for label in NEW_LABELS:
        assert label not in repr(off)
        assert label not in off._repr_html_()
    plain = off.to_dict()
    assert all(plain[part] is None for part in ("run", "sieve", "sparsity", "paper_memory", "cache"))
    assert list(plain["why"]) == ["flops", "time", "memory"]
    only_sieve = complete(sparsity=None, paper_memory=None, peak_bytes=None)
    shown = [label for label in NEW_LABELS if label in repr(only_sieve)]
    assert shown == ["FLOPs by sieving", "FLOPs, all together"]
    assert "FLOPs, all together" not in repr(complete(sparsity=None, sieve=None))


def test_the_complete_ledger() -> None:
    made = complete()
    text = repr(made)
    for label in (*NEW_LABELS, "FLOPs by freezing"):
        assert label in text
        assert label in made._repr_html_()
    run = made.run
    assert run is not None
    sparse = 30 * (1 + 2 * 0.15)
    assert run.saved_by_sieving == pytest.approx(0.25)
    assert run.after_sparsity == pytest.approx(75 * (sparse + 2 * 8.5 / 10) + 75 * sparse)
    assert run.after_freezing == pytest.approx(75 * (sparse + 2 * 8.5 / 10) + 75 * (sparse - 20))
    assert run.soft_bound == pytest.approx(2 * 75 * 2 * 0.05 * 30)
    assert run.dense_gradients == pytest.approx(75 * 2 * 8.5 / 10)
    factors = [run.saved_by_sieving, run.saved_by_sparsity, run.saved_by_freezing]
    product = (1 - factors[0]) * (1 - factors[1]) * (1 - factors[2])
    assert 1 - run.saved == pytest.approx(product)
    assert "10.0 % of the FLOPs are the floor" in text
    for cell in (
        "25.0 %", "75 of 100 samples a pass, 3 updates in 0.2 s", "15.0 % live, 13.3 % on average",
        "(1 − 25.0 % sieving) × (1 − ", "0.5 s in 4 updates", "on paper only", "40.0 %", "600 B of 1 kB",
    ):  # fmt: skip
        assert cell in text, cell


def rows_of(made: Ledger) -> dict[str, list[str]]:
    return {row[0]: row for row in made._rows()}


def test_one_label_stands_for_one_number() -> None:
    """What freezing saved of a run with masks is the factor of all together; what the kernels did has another name."""
    made = complete()
    rows, run = rows_of(made), made.run
    assert run is not None
    assert len(rows) == len(made._rows())
    factor = f"{100 * run.saved_by_freezing:.1f} %"
    assert rows["FLOPs by freezing"][1] == factor
    assert f"(1 − {factor} freezing)" in rows["FLOPs, all together"][4]
    assert rows["FLOPs by freezing"][2] == "on paper only"
    assert rows["FLOPs that ran"][1:3] == ["25.0 %", "counted, not timed"]
    assert "dense kernels, which masks do not spare" in rows["FLOPs that ran"][4]
    assert "most that freezing can save of what ran" in rows
    only_sieve = rows_of(complete(sparsity=None))
    assert only_sieve["FLOPs by freezing"][1:3] == [factor, "counted, not timed"]
    assert "masks" not in only_sieve["FLOPs that ran"][4]
    plain = rows_of(ledger("FFa", steps=1))
    assert "FLOPs by freezing" not in plain
    assert {"FLOPs", "most that freezing can save"} <= plain.keys()


def test_a_sparse_run_that_froze_nothing_says_so() -> None:
    run = run_flops(STEP, [Interval(samples=100, densities=SPARSE)])
    row = rows_of(complete(run=run, layers=ledger("aaa").layers))["FLOPs by freezing"]
    assert row[1] == "0.0 %"
    assert row[4] == "0: no step has been made in which a frozen layer spared work"


def test_masks_never_claim_time_or_memory() -> None:
    """traps row 64: theoretical for masks, and said so; the measured rows do not move."""
    made, without = complete(), complete(sparsity=None, run=None, sieve=None)
    assert "masks save no time and no memory on dense kernels" in repr(made)
    plain, dense = json.loads(json.dumps(made.to_dict())), without.to_dict()
    assert plain["time"] == dense["time"]
    assert plain["memory"] == dense["memory"]
    assert plain["flops"]["saved_fraction"] == dense["flops"]["saved_fraction"] == 0.25  # counted on dense kernels
    assert "dense kernels" in plain["sparsity"]["note"]
    assert plain["run"]["saved_by_sparsity"] > 0.5


def test_the_complete_ledger_as_plain_data() -> None:
    plain = json.loads(json.dumps(complete().to_dict()))
    assert plain["sieve"]["sieved_share"] == 0.25
    assert plain["sparsity"]["mean_density"] == 0.133
    assert set(plain["why"]) == {"flops", "time", "memory", "sieving", "sparsity", "paper_memory"}
    assert plain["paper_memory"]["gradients"]["mean_saved"] < plain["paper_memory"]["outputs"]["mean_saved"]
    assert plain["memory"]["peak_bytes"] == 600
    assert plain["layers"][0]["frozen_share"] == 0.5
    assert plain["layers"][0]["cached_share"] == 0
    assert plain["layers"][0]["density"] is None


def test_zero_savings_of_features_carry_their_reason() -> None:
    fresh = complete(run=RunFlops(), paper_memory=MemoryRun(), sieve=sieve(100), sparsity=sparsity(density=1.0))
    assert fresh.why()["sieving"] == "circulant sieve has set no sample aside yet"
    assert fresh.why()["sparsity"] == "0: every weight is live under MEST EM&S"
    assert fresh.why()["paper_memory"].startswith("0 B: no layer has been frozen yet")
    assert "0: nothing has been saved yet" in repr(fresh)
    before_a_step = complete(run=RunFlops())
    assert before_a_step.why()["sieving"].endswith("no step has been made since samples were set aside")
    assert before_a_step.why()["sparsity"].startswith("0: no step has been made under the masks")
    cache = {"hits": 0, "misses": 0, "num_bytes": 0, "wait_seconds": 0.0, "write_seconds": 0.0}
    assert "nothing served yet" in repr(complete(cache=cache))
    assert "nothing served yet" not in repr(complete(cache=cache | {"hits": 1}))


def test_overheads_that_are_not_there_have_no_row() -> None:
    run = run_flops(STEP, [Interval(samples=10, densities=TARGETS)])
    text = repr(complete(run=run))
    assert "cost of the soft bound" not in text
    assert "cost of dense gradients" not in text


def test_by_layer_shows_what_is_on() -> None:
    row: dict[str, Any] = {"parameters": 10, "forward_flops": 10.0, "backward_flops": 20.0}
    rows = (
        LedgerLayer(name="a", state="frozen", frozen_steps=5, cached_steps=2.5, density=1.0, **row),
        LedgerLayer(name="b", state="active", frozen_steps=0, density=0.107, **row),
    )
    text = repr(complete(layers=rows).by_layer())
    for cell in ("50.0 %", "25.0 %", "10.7 %", "cached", "density", "samples left out"):
        assert cell in text
    plain = repr(ledger("Fa", steps=10).by_layer())
    assert all(column not in plain for column in ("cached", "density", "samples left out"))
    assert "frozen" in plain
    assert "50.0 %" in ledger("Fa", steps=10).by_layer()._repr_html_()


def test_a_complete_ledger_from_ones_own_loop() -> None:
    """No session: a plain loop with masks and a frozen front, counted, modelled and measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(16, 8)
    found = layers(model, x)
    step = count_flops(model, found, lambda: model(x).sum(), len(x))
    densities = {"2.weight": 0.25}
    masks = {"2.weight": torch.rand(32, 32) < densities["2.weight"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    book, run, memory, sizes = CostBook(), RunFlops(), MemoryRun(batch_size=16), layer_sizes(model, found, step)
    frozen_steps = dict.fromkeys(found.names, 0)
    for number in range(10):
        if number == 5:
            freeze_layers(model, ["0"], optimizer=optimizer)
        frozen = ("0",) if number >= 5 else ()
        with measure_saved_tensors([*model.parameters(), x]) as sizes_kept:
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model[2].weight *= masks["2.weight"]
        now = Interval(samples=len(x), frozen=frozen, densities=densities)
        run.add(step, now)
        memory.add(sizes, now)
        book.steps += 1
        book.executed_flops += len(x) * training_flops(step, frozen=frozen)
        book.full_flops += len(x) * training_flops(step)
        book.saved_bytes = sum(sizes_kept)
        book.full_saved_bytes = book.full_saved_bytes or book.saved_bytes
        for name in frozen:
            frozen_steps[name] += 1
    dense = layer_flops(step)
    rows = tuple(
        LedgerLayer(
            name=name, parameters=layer.num_parameters, forward_flops=forward, backward_flops=backward,
            state="frozen" if name in frozen else "active", frozen_steps=frozen_steps[name],
            density=effective_densities(step, densities)[name],
        )
        for name, layer, forward, backward in zip(found.names, found, dense.forward, dense.backward, strict=True)
    )  # fmt: skip
    figures = sparsity(
        method="static", density=0.25, target_density=0.25, mean_density=0.25,
        maskable_share=3 * weight_flops(step)["2.weight"] / step.total,
    )  # fmt: skip
    made = Ledger(book=book, layers=rows, run=run, sparsity=figures, paper_memory=memory, floor=floor_share(step))
    macs, rest = 32 * 32, 8 * 32 * 2 + 32 * 4 * 3
    full = rest + 3 * macs
    assert run.saved_by_sparsity == pytest.approx(0.75 * 3 * macs / full)
    frozen_saves = 8 * 32 + 0.25 * macs  # weight gradient of the first layer, input gradient of the second
    assert run.saved_by_freezing == pytest.approx(0.5 * frozen_saves / (rest + 3 * 0.25 * macs))
    assert book.flops_saved_fraction == pytest.approx(0.5 * (8 * 32 + macs) / full)
    assert made.memory_saved_fraction == pytest.approx(0)  # the first boundary is kept: it is all the front had
    assert made.why()["memory"].startswith("0 B: the frozen front held no more than its output")
    assert memory.outputs.most_saved > memory.gradients.most_saved > 0
    assert "static, on paper only" in repr(made)
    assert [row["density"] for row in made.to_dict()["layers"]] == [1.0, 0.25, 1.0]
