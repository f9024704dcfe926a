"""A session that sieves: what is trained on, when it changes, by rule and by hand, and what the ledger says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import egeria_lab as lab
from egeria_lab.events import CommandRejected, EpochFinished, Notice, SamplesDiscarded, SamplesRestored, SamplesSieved


class Seen(Dataset[Any]):
    """Two classes in four numbers; notes which ids it is asked for."""

    def __init__(self, size: int = 60) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, 4, generator=generator)
        self.targets = (self.inputs[:, 0] > 0).long()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        return self.inputs[index], self.targets[index]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make(data: Seen | None = None, **keywords: Any) -> tuple[lab.Session, Seen]:
    data = data or Seen()
    keywords = {"batch_size": 6, "epochs": 10, "freeze": None, "lr": 0.05, **keywords}
    session = lab.Session(net(), (data, Seen(12)), **keywords)
    data.asked.clear()
    return session, data


def ids_of_a_pass(session: lab.Session, data: Seen) -> list[int]:
    data.asked.clear()
    before = len(session.events.of(EpochFinished))
    while len(session.events.of(EpochFinished)) == before:
        session.step()
    return list(data.asked)


def test_only_kept_samples_are_trained_on_and_every_one_of_them_once() -> None:
    session, data = make(sieve=lab.CirculantSieve(fraction=0.2, interval_epochs=1))
    kept = session.sieve.kept_ids().tolist()
    assert session.steps_per_epoch == 8
    assert session.planned_steps == 80
    assert sorted(ids_of_a_pass(session, data)) == kept
    assert len(kept) == 48


def test_swaps_keep_the_size_and_every_sample_has_been_used_in_the_end() -> None:
    session, data = make(sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1))
    used: set[int] = set()
    for _ in range(9):
        seen = ids_of_a_pass(session, data)
        assert len(seen) == len(set(seen)) == 45
        used.update(seen)
    assert used == set(range(60))
    updates = [e for e in session.events if isinstance(e, SamplesSieved)]
    assert updates[0].step == 0
    assert len(updates) == 10
    for event in updates[1:]:
        assert event.removed == event.returned == len(event.removed_ids) == 11
        assert event.kept == 45
    frame = session.history.frame("sieve")
    assert frame["kept"].tolist() == [45] * 10
    assert frame["returned"].tolist() == [0] + [11] * 9


def test_a_swap_shows_in_the_very_next_pass() -> None:
    session, data = make(sieve=lab.RandomSieve(fraction=0.25, interval_epochs=1))
    ids_of_a_pass(session, data)
    event = session.events.of(SamplesSieved)[-1]
    assert isinstance(event, SamplesSieved)
    seen = set(ids_of_a_pass(session, data))
    assert not seen & set(event.removed_ids)
    assert set(event.returned_ids) <= seen


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_follow_the_sieve_and_train_on_the_same_ids(workers: int, persistent: bool) -> None:
    """Trap 79: a worker must not go on with an old state of the data set."""

    def losses(**loading: Any) -> tuple[list[float], list[int]]:
        data = Seen()
        loader: DataLoader[Any] = DataLoader(data, batch_size=6, shuffle=True, **loading)
        session = lab.Session(
            net(), (loader, Seen(12)), epochs=4, freeze=None, lr=0.05,
            sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1),
        )  # fmt: skip
        session.step(24)
        return [float(x) for x in session.history.steps["loss"]], session.sieve.kept_ids().tolist()

    assert losses(num_workers=workers, persistent_workers=persistent) == losses()


def test_the_same_seed_sieves_the_same_and_another_one_does_not() -> None:
    """Trap 75."""

    def kept(seed: int) -> list[int]:
        session, _ = make(sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1), seed=seed)
        session.step(40)
        return session.sieve.kept_ids().tolist()

    assert kept(1) == kept(1)
    assert kept(1) != kept(2)


def test_a_weighted_sampler_is_wrapped_and_filtered() -> None:
    """Trap 71."""
    data = Seen()
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 60).tolist(), 60)
    loader: DataLoader[Any] = DataLoader(data, batch_size=6, sampler=sampler)
    session = lab.Session(
        net(), (loader, Seen(12)), epochs=3, freeze=None, sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1)
    )
    kept = set(session.sieve.kept_ids().tolist())
    assert set(ids_of_a_pass(session, data)) <= kept


def test_discarded_samples_never_come_again_until_they_are_restored() -> None:
    session, data = make()
    session.step(3)
    gone = [i for i in range(60) if i not in data.asked][:4]
    data.asked.clear()
    receipt = session.discard(gone)
    assert receipt.state == "done"
    event = receipt.event
    assert isinstance(event, SamplesDiscarded)
    assert event.kept == 56
    session.step(7)
    assert not set(gone) & set(data.asked)
    assert session.epoch == 1
    assert not set(gone) & set(ids_of_a_pass(session, data))
    assert session.sieve.discarded_ids().tolist() == gone
    assert isinstance(session.restore(gone).event, SamplesRestored)
    ids_of_a_pass(session, data)
    assert set(gone) <= set(ids_of_a_pass(session, data))
    assert sorted(ids_of_a_pass(session, data)) == list(range(60))


def test_with_a_circulant_sieve_a_discarded_sample_is_replaced_from_the_queue() -> None:
    session, data = make(sieve=lab.CirculantSieve(fraction=0.2))
    first = session.sieve.removed_ids()[:2].tolist()
    victims = session.sieve.kept_ids()[:2].tolist()
    session.discard(victims)
    kept = session.sieve.kept_ids().tolist()
    assert len(kept) == 48
    assert set(first) <= set(kept)
    assert sorted(ids_of_a_pass(session, data)) == kept


def test_discarding_all_that_is_left_of_a_pass_ends_it() -> None:
    session, data = make()
    session.step(9)
    left = [i for i in range(60) if i not in data.asked]
    assert len(left) == 6
    session.discard(left)
    assert len(session.events.of(EpochFinished)) == 1
    assert session.epoch == 1.0
    assert session.step().epoch == pytest.approx(1 + 1 / 9)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([60], "60"),
        ([-1], "-1"),
        ([i for i in range(58) if i != 7], "fewer than one batch"),
        ([7], "discarded already"),
    ],
)
def test_what_cannot_be_discarded_is_rejected_and_changes_nothing(ids: list[int], reason: str) -> None:
    session, _ = make()
    session.discard([7])
    receipt = session.discard(ids)
    assert isinstance(receipt.event, CommandRejected)
    assert reason in receipt.event.reason
    assert session.sieve.kept_ids().tolist() == [i for i in range(60) if i != 7]


@pytest.mark.parametrize("ids", ["abc", [], [1.5], [True], None, 3.0])
def test_what_is_no_list_of_ids_is_one_sentence(ids: Any) -> None:
    session, _ = make()
    with pytest.raises(lab.DataError, match="list of sample ids"):
        session.discard(ids)


def test_restoring_what_is_not_discarded_is_rejected_with_the_reason() -> None:
    session, _ = make()
    event = session.restore([3]).event
    assert isinstance(event, CommandRejected)
    assert "not discarded" in event.reason


def test_a_sieve_that_counts_forgetting_refuses_outputs_without_classes() -> None:
    session = lab.Session(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), (Seen(), Seen(12)), batch_size=6, freeze=None,
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square(),
        forward=lambda model, batch: (model(batch[0])[:, :1], batch[1].float()), sieve=lab.CirculantSieve(),
    )  # fmt: skip
    before = session.model[0].weight.detach().clone()  # type: ignore[index]
    with pytest.raises(lab.InvalidSettingError, match="choose RandomSieve"):
        session.step()
    assert session.steps_done == 0
    assert torch.equal(before, session.model[0].weight)  # type: ignore[index]


def test_a_loss_sieve_refuses_a_reduced_loss() -> None:
    session, _ = make(loss=nn.CrossEntropyLoss(), sieve=lab.LossSieve())
    with pytest.raises(lab.InvalidSettingError, match="reduction='none'"):
        session.step()


def test_a_loss_sieve_leaves_easy_samples_out_and_weighs_their_likes() -> None:
    session, data = make(sieve=lab.LossSieve(fraction=0.3), epochs=6)
    assert sorted(ids_of_a_pass(session, data)) == list(range(60))
    seen = ids_of_a_pass(session, data)
    assert len(seen) == len(set(seen)) == 42
    weights = session.sieve.weights(session.sieve.kept_ids())
    assert weights is not None
    assert float(weights.sum()) == pytest.approx(60, rel=1e-5)


def test_weights_scale_gradients_and_leave_the_reported_loss_alone() -> None:
    def gradient(weight: float | None) -> tuple[Tensor, float]:
        session, _ = make(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), scheduler=None)
        before = session.model[0].weight.detach().clone()  # type: ignore[index]
        session.trainer.sample_weights = None if weight is None else lambda ids: torch.full((len(ids),), weight)
        loss = session.step().loss
        return before - session.model[0].weight.detach(), loss  # type: ignore[index]

    plain, loss = gradient(None)
    doubled, same_loss = gradient(2.0)
    assert torch.allclose(2 * plain, doubled, atol=1e-6)
    assert loss == same_loss


def test_planned_steps_give_as_many_passes_as_were_asked_for() -> None:
    for sieve in (lab.OneShotSieve(fraction=0.5, at=0.5), lab.LossSieve(fraction=0.5)):
        session, _ = make(sieve=sieve, epochs=10)
        session.run(progress=False)
        assert session.epoch == pytest.approx(10, abs=1.0)
        assert session.planned_steps < 100


def test_the_ledger_says_what_sieving_saved() -> None:
    session, _ = make(sieve=lab.CirculantSieve(fraction=0.25))
    session.run(progress=False)
    ledger = session.savings()
    assert ledger.run is not None
    assert ledger.run.saved_by_sieving == pytest.approx(0.25, abs=1e-9)
    assert ledger.to_dict()["sieve"]["kept"] == 45
    assert "CirculantSieve" in repr(ledger)
    assert lab.Session(net(), (Seen(), Seen(12)), batch_size=6).savings().to_dict()["sieve"] is None


def test_sieving_is_repeatable_in_pieces_and_not_disturbed_by_looking() -> None:
    """Traps 81 and 82."""

    def trace(looking: bool) -> list[float]:
        session, _ = make(sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1))
        for _ in range(30):
            session.step()
            if looking:
                torch.randn(3)
                session.evaluate()
                session.sieve.counts()
                session.sieve.histogram()
                session.savings()
        return [float(x) for x in session.history.steps["loss"]]

    assert trace(True) == trace(False)


@pytest.mark.parametrize("sieve", [0.2, "circulant", lab.MEST()])
def test_what_is_no_sieve_is_one_sentence(sieve: Any) -> None:
    with pytest.raises(lab.InvalidSettingError, match="CirculantSieve"):
        make(sieve=sieve)


def test_a_fraction_that_leaves_no_batch_gives_the_largest_allowed() -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"at most 0\.9"):
        make(sieve=lab.CirculantSieve(fraction=0.95))


def test_cache_and_sieve_work_together_bit_for_bit() -> None:
    def trace(cache: lab.ActivationCache | None) -> list[float]:
        session, _ = make(
            sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1),
            freeze=lab.Schedule(variant="fixed", layers=("0",), start=0.2), cache=cache, scheduler="constant",
        )  # fmt: skip
        session.run(progress=False)
        return [float(x) for x in session.history.steps["loss"]]

    assert trace(lab.ActivationCache()) == trace(None)


def test_the_fraction_can_be_overridden_mid_run_and_holds_from_the_next_exchange() -> None:
    session, _ = make(sieve=lab.CirculantSieve(fraction=0.2, interval_epochs=1))
    session.step(3)
    names = [setting.name for setting in session.settings()]
    assert "sieve.fraction" in names
    assert session.override("sieve.fraction", 0.4).state == "done"
    assert session.setting("sieve.fraction") == 0.4
    assert session.sieve.num_kept == 48
    session.step(5)
    assert session.sieve.num_kept == 36
    assert session.steps_per_epoch == 6
    session.step(6)
    assert session.epoch == 2.0
    assert session.reset("sieve.fraction").state == "done"
    session.step(6)
    assert session.sieve.num_kept == 48


def test_a_fraction_that_leaves_no_batch_is_rejected_mid_run() -> None:
    session, _ = make(sieve=lab.CirculantSieve(fraction=0.2))
    session.step()
    event = session.override("sieve.fraction", 0.95).event
    assert isinstance(event, CommandRejected)
    assert "at most" in event.reason
    assert session.setting("sieve.fraction") == 0.2
    with pytest.raises(lab.InvalidSettingError, match=r"CirculantSieve.fraction must be in \(0, 1\)"):
        session.override("sieve.fraction", 1.5)


def test_a_session_without_a_sieve_has_no_sieve_settings() -> None:
    session, _ = make()
    with pytest.raises(lab.InvalidSettingError, match="build it with sieve="):
        session.override("sieve.fraction", 0.3)


# --- how long a plan is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 2, 2.5, 4, 10])
@pytest.mark.parametrize("at", [0.1, 0.4, 0.9])
def test_epochs_are_passes_with_a_one_shot_sieve(epochs: float, at: float) -> None:
    session, _ = make(sieve=lab.OneShotSieve(fraction=0.8, at=at), epochs=epochs)
    session.run(progress=False)
    assert session.epoch == epochs
    acted = bool(session.events.of(SamplesSieved))
    assert acted != bool(session.events.of(Notice))
    assert acted == (session.planned_steps < 10 * epochs)


def test_a_small_share_sieves_at_the_first_end_of_a_pass() -> None:
    """It used to plan four steps, and nothing was sieved."""
    session = lab.Session("mlp", "digits", epochs=2, freeze=None, sieve=lab.OneShotSieve(fraction=0.8, at=0.1))
    session.run(progress=False)
    assert session.epoch == 2.0
    assert [event.step for event in session.events.of(SamplesSieved)] == [12]
    assert session.steps_done == 12 + 3


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 8, 13])
def test_epochs_are_passes_with_a_loss_sieve_as_near_as_can_be(epochs: int) -> None:
    session, _ = make(sieve=lab.LossSieve(fraction=0.2), epochs=epochs)
    session.run(progress=False)
    assert session.epoch == pytest.approx(epochs, abs=0.11)


@pytest.mark.parametrize(
    "sieve", [lab.OneShotSieve(fraction=0.8, at=0.5), lab.LossSieve(fraction=0.2, full_after=1.0), lab.CirculantSieve()]
)
@pytest.mark.parametrize("first", [0, 7, 13])
def test_extending_adds_passes(sieve: Any, first: int) -> None:
    session, _ = make(sieve=sieve, epochs=4)
    if first:
        session.step(first)
    session.extend(3)
    session.run(progress=False)
    assert session.epoch == 7
    session.extend(1.5)
    session.run(progress=False)
    assert session.epoch == 8.5


def test_a_run_of_so_many_passes_makes_them_also_without_a_plan() -> None:
    session, _ = make(sieve=lab.OneShotSieve(fraction=0.8, at=0.3), epochs=None)
    session.run(epochs=3, progress=False)
    assert (session.epoch, session.steps_done) == (3, 14)
    session.run(epochs=2, progress=False)
    assert (session.epoch, session.steps_done) == (5, 18)
    planned, _ = make(sieve=lab.OneShotSieve(fraction=0.8, at=0.3), epochs=6)
    total = planned.planned_steps
    planned.run(epochs=4, progress=False)
    assert (planned.epoch, planned.planned_steps) == (4, total)


def test_an_interval_longer_than_the_run_is_said_once_at_the_start() -> None:
    session, _ = make(sieve=lab.CirculantSieve(interval_epochs=100), epochs=2)
    session.run(progress=False)
    (notice,) = session.events.of(Notice)
    assert notice.step == 0
    assert "interval_epochs=100" in notice.sentence()
    assert "16 steps in 2 passes" in notice.sentence()
    late, _ = make(sieve=lab.CirculantSieve(interval_epochs=100), epochs=None)
    assert not late.events.of(Notice)
    late.run(epochs=2, progress=False)
    late.run(epochs=2, progress=False)
    assert [event.step for event in late.events.of(Notice)] == [0]
    stepped, _ = make(sieve=lab.RandomSieve(interval_epochs=100), epochs=None)
    stepped.step(20)
    assert len(stepped.events.of(Notice)) == 1
    fine, _ = make(sieve=lab.CirculantSieve(), epochs=4)
    fine.run(progress=False)
    assert not fine.events.of(Notice)


# --- what is not sieved -----------------------------------------------------------------------------------


class Wide(Dataset[Any]):
    """As many targets as outputs: to regress on, to rebuild, or several labels at once."""

    def __init__(self, targets: Tensor) -> None:
        self.targets_ = targets

    def __len__(self) -> int:
        return len(self.targets_)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index) / 60), self.targets_[index]


@pytest.mark.parametrize("targets", [torch.randn(60, 2), torch.ones(60, 2)])
@pytest.mark.parametrize("sieve", [lab.CirculantSieve(), lab.OneShotSieve()])
def test_float_targets_that_are_no_probabilities_are_refused(targets: Tensor, sieve: Any) -> None:
    session = lab.Session(
        net(), (Wide(targets), Wide(targets)), batch_size=6, freeze=None, sieve=sieve, loss=nn.MSELoss(reduction="none")
    )
    with pytest.raises(lab.InvalidSettingError, match="choose RandomSieve or LossSieve"):
        session.step()
    assert session.steps_done == 0


def test_probabilities_are_sieved() -> None:
    targets = torch.tensor([[0.9, 0.1]]).repeat(60, 1)
    session = lab.Session(net(), (Wide(targets), Wide(targets)), batch_size=6, freeze=None, sieve=lab.CirculantSieve())
    session.step()
    assert int(session.sieve.counts().presentations.sum()) == 6


def test_a_sampler_over_a_part_of_the_data_is_refused_and_others_are_not() -> None:
    def session(sampler: Any, **keywords: Any) -> lab.Session:
        data = Seen(256)
        loading: DataLoader[Any] = DataLoader(data, batch_size=6, sampler=sampler)
        return lab.Session(net(), (loading, Seen(12)), epochs=3, freeze=None, **keywords)

    sieve = lab.CirculantSieve(fraction=0.25, interval_epochs=1)
    with pytest.raises(lab.DataError, match=r"SubsetRandomSampler draws 100 of 256 samples.*Subset"):
        session(SubsetRandomSampler(range(100)), sieve=sieve)
    with pytest.raises(lab.DataError, match="WeightedRandomSampler draws 200 of 256 samples"):
        session(WeightedRandomSampler([1.0] * 200 + [0.0] * 56, 256), sieve=sieve)
    for sampler in (None, WeightedRandomSampler([1.0] * 256, 256), SubsetRandomSampler(range(256))):
        assert session(sampler, sieve=sieve).sieve.num_kept == 192
    alone = session(SubsetRandomSampler(range(100)))
    alone.step()
    before = alone.sieve.kept_ids().tolist()
    event = alone.discard(range(98)).event
    assert not isinstance(event, CommandRejected) or alone.sieve.kept_ids().tolist() == before


def test_a_discard_that_leaves_the_loader_nothing_to_draw_changes_nothing() -> None:
    loading: DataLoader[Any] = DataLoader(Seen(256), batch_size=6, sampler=SubsetRandomSampler(range(100)))
    session = lab.Session(net(), (loading, Seen(12)), epochs=3, freeze=None)
    assert isinstance(session.discard(range(100)).event, CommandRejected)
    assert session.sieve.num_kept == 256
    session.step(20)


# --- labels -----------------------------------------------------------------------------------------------


class Bare(Seen):
    """The same samples; nobody can see their labels from outside."""

    def __init__(self, size: int = 60) -> None:
        super().__init__(size)
        self._hidden = self.targets
        del self.targets

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.asked.append(index)
        return self.inputs[index], int(self._hidden[index])


def test_class_shares_look_through_subsets_and_read_other_data_once() -> None:
    sieve = lab.CirculantSieve(fraction=0.25, class_shares=True)
    sets = {
        "subset": Subset(Seen(120), list(range(60))), "concat": ConcatDataset([Seen(20), Seen(40)]), "bare": Bare(60),
    }  # fmt: skip
    for name, data in sets.items():
        session = lab.Session(net(), (data, Seen(12)), batch_size=6, epochs=4, freeze=None, sieve=sieve)
        notices = [event.sentence() for event in session.events.of(Notice)]
        assert len(notices) == (name == "bare")
        labels = torch.tensor([int(data[i][1]) for i in range(60)])
        shares = [int((labels[session.sieve.kept_ids()] == k).sum()) / int((labels == k).sum()) for k in (0, 1)]
        assert shares == pytest.approx([0.75, 0.75], abs=0.03)
    assert "all 60 were read once" in notices[0]
    plain = Bare(60)
    lab.Session(net(), (plain, Seen(12)), batch_size=6, freeze=None, sieve=lab.CirculantSieve())
    assert len(set(plain.asked)) < 60  # only an example is looked at
    nothing = Wide(torch.zeros(60, 2))
    with pytest.raises(lab.InvalidSettingError, match=r"attribute \.targets"):
        lab.Session(net(), (nothing, nothing), batch_size=6, freeze=None, sieve=sieve)


def test_a_sample_without_a_counted_label_is_never_counted_as_wrong() -> None:
    data = Seen(128)
    ignored = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:20]
    data.targets[ignored] = -100
    session = lab.Session(
        net(), (data, Seen(12)), batch_size=16, epochs=5, freeze=None, sieve=lab.CirculantSieve(interval_epochs=1)
    )
    session.step(7)
    counts = session.sieve.counts()
    wrong = counts.never_correct.nonzero().flatten()
    assert len(wrong) > 0
    assert not set(wrong.tolist()) & set(ignored.tolist())
    session.run(progress=False)
    assert not bool(session.sieve.counts(ignored).never_correct.any())
    assert int(session.sieve.counts(ignored).events_total.sum()) == 0


# --- losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(-1, 1), (-1, 3), (-1, 3, 2)])
def test_a_loss_of_several_values_a_sample_counts_as_its_mean(shape: tuple[int, ...]) -> None:
    def trace(loss: Any) -> list[float]:
        session, _ = make(loss=loss, sieve=lab.LossSieve(fraction=0.3), epochs=4)
        session.run(progress=False)
        assert session.sieve.updates > 1
        return [float(x) for x in session.history.steps["loss"]]

    def plain(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def spread(outputs: Tensor, targets: Tensor) -> Tensor:
        return plain(outputs, targets).reshape(-1, *[1] * (len(shape) - 1)).expand(*shape)

    assert trace(spread) == pytest.approx(trace(plain), rel=1e-4)


def test_a_loss_whose_rows_are_no_samples_is_refused_with_its_shape() -> None:
    session, _ = make(loss=lambda outputs, targets: outputs.square().flatten(), sieve=lab.LossSieve())
    with pytest.raises(lab.InvalidSettingError, match=r"shape \(12,\).*reduction='none'"):
        session.step()
    assert session.steps_done == 0
    weighted, _ = make(loss=lambda outputs, targets: outputs.square().flatten())
    weighted.trainer.sample_weights = lambda ids: torch.ones(len(ids))
    with pytest.raises(lab.InvalidSettingError, match=r"one loss for each of 6 samples.*shape \(12,\)"):
        weighted.step()


def test_the_ledger_of_a_loss_sieve_is_true_of_now_and_of_the_whole_run() -> None:
    session, _ = make(sieve=lab.LossSieve(fraction=0.5, full_after=0.5), epochs=6)
    session.run(progress=False)
    assert session.sieve.num_kept == 60
    text = repr(session.savings())
    assert session.savings().run.saved_by_sieving > 0  # type: ignore[union-attr]
    assert "now 60 of 60 samples a pass" in text
    assert "over the whole run, though none is set aside now" in text


# --- sentences --------------------------------------------------------------------------------------------


def test_a_rejected_discard_does_not_bury_its_reason() -> None:
    session, _ = make()
    for receipt in (session.discard(range(60)), session.restore(range(60))):
        event = receipt.event
        assert isinstance(event, CommandRejected)
        assert "0, 1, 2, 3, 4, … 60 in all" in event.command
        assert len(event.sentence()) < 260
    assert "(1, 2)" in session.restore([1, 2]).event.command  # type: ignore[union-attr]


def test_samples_that_do_not_exist_are_one_sentence() -> None:
    session, _ = make()
    for ids in ([999], [-1], [3, 60]):
        with pytest.raises(lab.DataError, match="there is no sample"):
            session.sieve.samples(ids)
    assert len(session.sieve.samples([3, 4])) == 2


def test_a_sieve_that_shrinks_the_epochs_mid_run_does_not_break_a_one_cycle_schedule() -> None:
    """Trap 43: progress is counted in steps, whose number is known beforehand."""
    plan, _ = make(sieve=lab.OneShotSieve(fraction=0.3, at=0.3), epochs=10)
    steps = plan.planned_steps

    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)

    session, _ = make(sieve=lab.OneShotSieve(fraction=0.3, at=0.3), epochs=10, scheduler=one_cycle)
    session.run(progress=False)
    assert session.steps_done == steps < 100
    assert session.steps_per_epoch == 7
    assert session.epoch == 10.0
    rates = session.history.steps["learning_rate"]
    assert rates.max() == pytest.approx(0.1, rel=0.02)
    assert rates[-1] < 0.001
