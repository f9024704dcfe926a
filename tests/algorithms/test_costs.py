"""FLOPs against hand arithmetic, saved bytes against a count on paper, and the running totals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import egeria_lab as lab
from egeria_lab.algorithms.costs import (
    LEAST_TIMES,
    MOST_TIMES,
    WARM_UP_STEPS,
    CostBook,
    StepFlops,
    count_flops,
    measure_saved_tensors,
)
from egeria_lab.algorithms.layers import LayerModules, layers

# Multiply-adds of ResNet-8 on a 1×8×8 image with 3 classes. 3×3 convolutions: pixels × in × out × 9.
STEM = 64 * 1 * 16 * 9
BLOCK_1 = 2 * 64 * 16 * 16 * 9
BLOCK_2_FIRST, BLOCK_2_SHORTCUT, BLOCK_2_SECOND = 16 * 16 * 32 * 9, 16 * 16 * 32, 16 * 32 * 32 * 9
BLOCK_3 = 4 * 32 * 64 * 9 + 4 * 32 * 64 + 4 * 64 * 64 * 9
HEAD = 64 * 3
BLOCK_2 = BLOCK_2_FIRST + BLOCK_2_SHORTCUT + BLOCK_2_SECOND


def flops(*macs: float) -> tuple[float, ...]:
    return tuple(2.0 * x for x in macs)


def mlp() -> tuple[nn.Module, LayerModules, Callable[[], Tensor]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    x, y = torch.randn(10, 4), torch.randint(0, 2, (10,))
    return model, layers(model, x), lambda: F.cross_entropy(model(x), y)


def resnet() -> tuple[nn.Module, LayerModules, Callable[[], Tensor]]:
    model = lab.models.build("resnet8", input_shape=(1, 8, 8), num_classes=3)
    x, y = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    return model, layers(model, x), lambda: F.cross_entropy(model(x), y)


def test_mlp_by_hand() -> None:
    """Forward in × out multiply-adds a layer; backward twice that, the first layer without input gradient."""
    model, found, loss = mlp()
    counted = count_flops(model, found, loss, 10)
    assert counted.forward == flops(4 * 8, 8 * 6, 6 * 2)
    assert counted.backward == flops(4 * 8, 2 * 8 * 6, 2 * 6 * 2)
    assert counted.total == 2 * (2 * 32 + 3 * 48 + 3 * 12)


@pytest.mark.parametrize(
    ("frozen", "backward"),
    [
        (("0",), (0, 8 * 6, 2 * 6 * 2)),  # the second layer now has no input gradient
        (("0", "2"), (0, 0, 6 * 2)),
        (("2",), (4 * 8, 8 * 6, 2 * 6 * 2)),  # a hole: its input gradient alone
        (("4",), (4 * 8, 2 * 8 * 6, 6 * 2)),
        (("2", "4"), (4 * 8, 8 * 6, 6 * 2)),
    ],
)
def test_mlp_with_frozen_layers_by_hand(frozen: tuple[str, ...], backward: tuple[int, ...]) -> None:
    model, found, loss = mlp()
    counted = count_flops(model, found, loss, 10, frozen)
    assert counted.forward == flops(4 * 8, 8 * 6, 6 * 2)
    assert counted.backward == flops(*backward)


def test_resnet_by_hand() -> None:
    model, found, loss = resnet()
    counted = count_flops(model, found, loss, 2)
    assert counted.forward == flops(STEM, BLOCK_1, BLOCK_2, BLOCK_3, HEAD)
    assert counted.backward == flops(STEM, 2 * BLOCK_1, 2 * BLOCK_2, 2 * BLOCK_3, 2 * HEAD)


def test_resnet_with_a_frozen_prefix_by_hand() -> None:
    """Behind the frozen front, first convolution and shortcut of the block need no input gradient."""
    model, found, loss = resnet()
    counted = count_flops(model, found, loss, 2, ("layers.0", "layers.1"))
    assert counted.forward == flops(STEM, BLOCK_1, BLOCK_2, BLOCK_3, HEAD)
    block_2 = BLOCK_2_FIRST + BLOCK_2_SHORTCUT + 2 * BLOCK_2_SECOND
    assert counted.backward == flops(0, 0, block_2, 2 * BLOCK_3, 2 * HEAD)
    all_but_head = count_flops(model, found, loss, 2, tuple(found.names[:-1]))
    assert all_but_head.backward == flops(0, 0, 0, 0, HEAD)


def test_resnet_with_a_frozen_hole_by_hand() -> None:
    """A hole saves its weight gradients only: forward and input gradient remain."""
    model, found, loss = resnet()
    counted = count_flops(model, found, loss, 2, ("layers.2",))
    assert counted.backward == flops(STEM, 2 * BLOCK_1, BLOCK_2, 2 * BLOCK_3, 2 * HEAD)


def test_attention_products_are_counted() -> None:
    """16 patches of width 16, two heads of 8: q·k and weights·v are 16 × 16 × 16 multiply-adds each."""
    model = lab.models.build("transformer", input_shape=(1, 8, 8), num_classes=3, dim=16, depth=1, heads=2, patch=2)
    x, y = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    counted = count_flops(model, layers(model, x), lambda: F.cross_entropy(model(x), y), 2)
    linear = 16 * (16 * 48 + 16 * 16 + 2 * 16 * 64)
    encoder = linear + 2 * 16 * 16 * 16
    assert counted.forward == flops(16 * 4 * 16, encoder, 16 * 3)
    assert counted.backward == flops(16 * 4 * 16, 2 * encoder, 2 * 16 * 3)


def test_encoder_layers_of_torch_are_counted_with_their_attention() -> None:
    encoders = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 8), *encoders, nn.Linear(8, 2))
    x = torch.randn(3, 5, 4)
    counted = count_flops(model, layers(model, x), lambda: model(x).sum(), 3)
    encoder = 5 * (8 * 24 + 8 * 8 + 2 * 8 * 16) + 2 * 5 * 5 * 8
    assert counted.forward == flops(5 * 4 * 8, encoder, encoder, 5 * 8 * 2)
    assert counted.backward == flops(5 * 4 * 8, 2 * encoder, 2 * encoder, 2 * 5 * 8 * 2)


def test_counting_is_per_sample() -> None:
    model, found, _ = mlp()
    for rows in (1, 7):
        x = torch.randn(rows, 4)
        assert count_flops(model, found, lambda x=x: model(x).sum(), rows).forward == flops(32, 48, 12)


def test_what_its_owner_had_excluded_is_not_counted_as_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    x = torch.randn(10, 4)
    found = layers(model, x)
    counted = count_flops(model, found, lambda: model(x).sum(), 10)
    assert counted.backward == flops(0, 8 * 6, 2 * 6 * 2)
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    counted = count_flops(model, layers(model, x), lambda: model(x).sum(), 10)
    assert counted.backward == flops(0, 0, 6 * 2)


def test_counting_leaves_the_model_alone() -> None:
    model, found, loss = resnet()
    model.train()
    model.layers[1].eval()  # type: ignore[index]
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    model.layers[2].conv1.weight.requires_grad_(False)  # type: ignore[index]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    rng = torch.get_rng_state()
    count_flops(model, found, loss, 2, ("layers.0",))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [m.training for m in model.modules()] == modes
    assert first.grad is not None
    assert bool((first.grad == 1).all())
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0
    assert torch.equal(torch.get_rng_state(), rng)


# --- bytes kept for backward -----------------------------------------------------------------------------


def small(rows: int = 16) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.randn(rows, 4), torch.randint(0, 2, (rows,))


def test_saved_bytes_of_a_small_mlp_by_hand() -> None:
    """16 rows: the ReLU's output (8 features, kept once for ReLU and for the next layer), the log-softmax (2),
    and one number of the loss; input, labels and weights exist anyway."""
    model, x, y = small()
    with measure_saved_tensors([*model.parameters(), x, y]) as sizes:
        F.cross_entropy(model(x), y)
    assert sum(sizes) == 4 * (16 * 8 + 16 * 2 + 1)


def test_saved_bytes_shrink_with_a_frozen_front_by_hand() -> None:
    """Linear → Tanh → Linear → Tanh → Linear: with the first two frozen only the last boundary is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(10, 4)
    with measure_saved_tensors([*model.parameters(), x]) as full:
        model(x).sum()
    assert sum(full) == 4 * 10 * (8 + 6)
    for module in (model[0], model[2]):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    with measure_saved_tensors([*model.parameters(), x]) as frozen:
        model(x).sum()
    assert sum(frozen) == 4 * 10 * 6


def test_a_storage_is_counted_once() -> None:
    x = torch.ones(10, requires_grad=True)
    with measure_saved_tensors() as sizes:
        y = x.exp()
        _ = (y * y).sum() + (y[:5] * y[5:]).sum()
    assert sum(sizes) == 40


def test_measuring_changes_no_bit_of_a_step() -> None:
    results = []
    for measured in (False, True):
        model, x, y = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            if measured:
                with measure_saved_tensors([*model.parameters(), x, y]):
                    loss = F.cross_entropy(model(x), y)
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        results.append((loss.item(), [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_measuring_keeps_nothing_alive() -> None:
    """traps row 131."""
    leaf = torch.ones(1000, requires_grad=True)
    with measure_saved_tensors() as sizes:
        x = leaf.exp()
    storage = StorageWeakRef(x.untyped_storage())
    assert sum(sizes) == 4000
    del x  # without a backward pass, as after a loss that is not finite
    assert storage.expired()


# --- running totals --------------------------------------------------------------------------------------


def test_an_empty_book_claims_nothing() -> None:
    book = CostBook()
    assert book.flops_saved_fraction == 0
    assert book.time_saved_fraction is None
    assert book.monitor_fraction == 0


def test_fractions_by_hand() -> None:
    book = CostBook(executed_flops=75, full_flops=100, train_seconds=9, monitor_seconds=1)
    assert book.flops_saved_fraction == 0.25
    assert book.monitor_fraction == pytest.approx(0.1)


def test_time_saved_by_hand() -> None:
    """25 full steps and 20 frozen ones of 1 s; the median full step takes 2 s: 25 × 2 + 20 = 70 of 90 s.

    Slow first steps and one hiccup do not count, the median does.
    """
    book = CostBook(steps=WARM_UP_STEPS + 2 * LEAST_TIMES)
    for seconds in [50.0] * WARM_UP_STEPS + [2.0] * (LEAST_TIMES - 1) + [30.0]:
        book.note_time(seconds, frozen=False)
    for _ in range(LEAST_TIMES):
        book.note_time(1.0, frozen=True)
    assert (WARM_UP_STEPS, LEAST_TIMES) == (5, 20)  # what follows counts on them
    assert book.time_saved_fraction == pytest.approx(1 - 70 / 90)
    assert book.train_seconds == 250 + 38 + 30 + 20
    book.frozen_seconds = 3.0 * LEAST_TIMES
    saved = book.time_saved_fraction
    assert saved is not None
    assert saved < 0  # freezing cost time: said, not hidden


def test_too_few_full_steps_give_no_time() -> None:
    book = CostBook(steps=30, full_steps=9, full_step_seconds=[1.0] * (LEAST_TIMES - 1), frozen_seconds=10.0)
    assert book.time_saved_fraction is None
    book.note_time(1.0, frozen=False)
    assert book.time_saved_fraction is not None


def test_a_long_run_keeps_the_newest_times_only() -> None:
    book = CostBook()
    for step in range(3 * MOST_TIMES):
        book.note_time(float(step), frozen=False)
    assert book.full_steps == 3 * MOST_TIMES
    assert book.full_step_seconds == [float(step) for step in range(2 * MOST_TIMES, 3 * MOST_TIMES)]


def test_step_flops_add_up() -> None:
    assert StepFlops((1.0, 2.0), (3.0, 4.0)).total == 10.0
