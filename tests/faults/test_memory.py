"""Too little memory for a step: the step is undone, and the error says what to lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.engine.session_state import capture
from egeria_lab.errors import OutOfMemoryError

Make = Callable[..., lab.Session]
Losses = Callable[[lab.Session], list[float]]


class Allocator:
    """Raises what an allocator raises, once it is armed."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.armed = error, False

    def __call__(self) -> None:
        if self.armed:
            self.armed = False
            raise self.error


ERRORS: dict[str, BaseException] = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    "python": MemoryError(),
}


class Refusing(nn.Module):
    def __init__(self, inner: nn.Module, allocator: Allocator, where: str) -> None:
        super().__init__()
        self.inner, self.allocator, self.where = inner, allocator, where
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.dropout(x))
        if self.training and self.where == "forward":
            self.allocator()
        if self.training and self.where == "backward" and out.requires_grad:
            out.register_hook(lambda _grad: self.allocator())
        return out


def refusing_optimizer(kind: type[Any], allocator: Allocator, where: str) -> Callable[..., Any]:
    """An optimizer that gives up after it has changed half of the weights."""

    class Half(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            if where != "optimizer" or not allocator.armed:
                return super().step(closure)
            groups = [(group, group["params"]) for group in self.param_groups]
            for group, parameters in groups:
                group["params"] = parameters[: len(parameters) // 2]
            try:
                super().step(closure)
            finally:
                for group, parameters in groups:
                    group["params"] = parameters
            return allocator()

    return lambda parameters: Half(parameters, lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))


MEASURED = ("measured", "full_saved_by_layer", "boundary_bytes")
"""Bytes of activations: what the forward pass measured is true although the step was not made."""


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Places where two states differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        kept = [key for key in a if key not in MEASURED]
        return [place for key in kept for place in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [place for i, x in enumerate(a) for place in differences(x, b[i], f"{path}/{i}")]
    same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else repr(a) == repr(b)
    return [] if same else [path]


@pytest.mark.parametrize(
    ("where", "error"), [("forward", "gpu"), ("backward", "cpu"), ("loss", "windows"), ("data", "python")]
)
def test_nothing_has_changed_and_the_batch_comes_again(
    make_session: Make, losses: Losses, where: str, error: str
) -> None:
    def build(allocator: Allocator) -> lab.Session:
        class Samples(torch.utils.data.Dataset[Any]):
            def __init__(self) -> None:
                self.inner = lab.data.load("synthetic", num_samples=64, num_valid=8, shape=(6,), num_classes=3).train

            def __len__(self) -> int:
                return 64

            def __getitem__(self, i: int) -> Any:
                if where == "data":
                    allocator()
                return self.inner[i]

        def loss(scores: Tensor, targets: Tensor) -> Tensor:
            if where == "loss":
                allocator()
            return nn.functional.cross_entropy(scores, targets, reduction="none")

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        valid = lab.data.load("synthetic", num_samples=64, num_valid=8, shape=(6,), num_classes=3).valid
        return make_session(
            model=Refusing(net, allocator, where), data=(Samples(), valid), loss=loss, optimizer="adamw", lr=1e-2
        )

    calm, short = Allocator(ERRORS[error]), Allocator(ERRORS[error])
    plain, session = build(calm), build(short)
    plain.step(12)
    for step in (0, 1, 7):  # before the optimizer has any state, right after, and in the middle of a later pass
        session.step(step) if step else None
        session.land_commands()  # notes the plan
        before = capture(session)
        generators = torch.get_rng_state()
        short.armed = True
        with pytest.raises(OutOfMemoryError, match=r"The step was undone: .* its batch comes again") as found:
            session.step()
        assert not differences(capture(session).tree, before.tree)
        assert torch.equal(torch.get_rng_state(), generators)
        assert all(p.grad is None for p in session.model.parameters())
        assert found.value.__cause__ is ERRORS[error]
    session.step(4)
    assert losses(session) == losses(plain)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_makes_its_state_is_undone(make_session: Make, losses: Losses, kind: type[Any]) -> None:
    short = Allocator(ERRORS["gpu"])
    plain = make_session(optimizer=refusing_optimizer(kind, Allocator(ERRORS["gpu"]), "optimizer"))
    session = make_session(optimizer=refusing_optimizer(kind, short, "optimizer"))
    plain.step(6)
    session.land_commands()
    before = capture(session)
    short.armed = True
    with pytest.raises(OutOfMemoryError, match=r"2\.50 GiB more were asked for\). The step was undone"):
        session.step()
    assert not differences(capture(session).tree, before.tree)
    session.step(6)
    assert losses(session) == losses(plain)
    # Later on the update of half of the weights can be seen, not undone: it is not claimed to be.
    short.armed = True
    with pytest.raises(OutOfMemoryError, match=r"in the middle of its update, which cannot be undone: go back"):
        session.step()


def test_a_real_allocation_that_is_too_big(make_session: Make, losses: Losses) -> None:
    greedy = [False]

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        if greedy[0]:
            torch.empty(1 << 46, dtype=torch.uint8)
        return nn.functional.cross_entropy(scores, targets)

    plain, session = make_session(loss=nn.CrossEntropyLoss()), make_session(loss=loss)
    plain.step(4)
    session.step(2)
    greedy[0] = True
    with pytest.raises(OutOfMemoryError, match=r"for step 3 \(70368744177664 bytes more were asked for\)"):
        session.step()
    greedy[0] = False
    session.step(2)
    assert losses(session) == losses(plain)


def test_the_message_names_all_there_is_to_lower() -> None:
    greedy = [False]

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        if greedy[0]:
            raise MemoryError
        return nn.functional.cross_entropy(scores, targets)

    session = lab.Session(
        "mlp", "digits", batch_size=96, loss=loss, cache=lab.ActivationCache(max_bytes=10_000_000),
        undo_bytes=1_000_000,
    )  # fmt: skip
    session.step()
    session.pin("layers.0")
    greedy[0] = True
    with pytest.raises(OutOfMemoryError) as found:
        session.step()
    words = str(found.value)
    assert "memory is too small for step 2 (MemoryError)" in words
    activations = session.savings().book.saved_bytes
    assert activations
    assert f"batch_size (now 96, whose activations take {activations:,} bytes)" in words
    ring = session.undo_ring.num_bytes
    assert ring
    assert f"undo_bytes (now 1,000,000, of which {ring:,} are in use)" in words
    assert "max_bytes of the activation cache (now 10,000,000, of which 0 are in use)" in words
    numbers = sum(p.numel() for p in session.model.parameters())
    assert f"the reference model (Plasticity(reference='auto'), about {4 * numbers:,} bytes" in words
    session.close()


def test_a_background_run_fails_with_it_and_goes_on(make_session: Make, losses: Losses) -> None:
    greedy = [True]

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        if greedy[0]:
            greedy[0] = False
            raise MemoryError
        return nn.functional.cross_entropy(scores, targets)

    plain, session = make_session(loss=nn.CrossEntropyLoss()), make_session(loss=loss)
    plain.step(8)
    session.start(steps=8)
    with pytest.raises(OutOfMemoryError):
        session.wait()
    assert session.state == "failed"
    session.run(8, progress=False)
    assert losses(session) == losses(plain)


def test_an_optimizer_without_state_is_not_copied_each_step(
    make_session: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr("egeria_lab.engine.memory_guard._copy", lambda x: copies.append(1) or x.detach().clone())
    session = make_session(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    session.step(10)
    assert 0 < len(copies) <= len(list(session.model.parameters()))
    assert torch.Tensor.copy_ is copy
