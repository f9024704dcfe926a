"""Circulant data sieving: count forgetting, drop easy samples, bring dropped ones back; and the controls beside it.

A `Sieve` only says which samples are kept; the sampler (`egeria_lab.data.loaders`) follows it. The settings live
in `settings.py`, what each rule moves in `rules.py`, the counts in `forgetting.py`, who is where in
`membership.py`.

Source: SpFDE (NeurIPS 2022, arXiv 2209.11204), section 3.3. The file is one piece because it is the face of all sieves:
most of it is signatures and what they promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from egeria_lab.algorithms.sieving.forgetting import Counts, ForgettingLog
from egeria_lab.algorithms.sieving.ids import Ids, check_named, checked_ids, classes_of, number_of_samples, some
from egeria_lab.algorithms.sieving.losses import LossPruning
from egeria_lab.algorithms.sieving.membership import DISCARDED_KEPT, KEPT, Membership
from egeria_lab.algorithms.sieving.rules import CIRCULATING, Move, count_leaving, histogram, one_shot, redraw, swap
from egeria_lab.algorithms.sieving.settings import (
    LossSieve,
    ManualSieve,
    OneShotSieve,
    SieveSettings,
    check_batches,
    is_due,
)
from egeria_lab.algorithms.sieving.update import SieveUpdate
from egeria_lab.errors import DataError, InvalidSettingError, is_whole, require

_WHOLE = "a whole number >= 1"
_NO_SCORES = "it counts what a classifier forgets, so the model has to give class scores; use RandomSieve or LossSieve"
_WHY = {
    "correct": _NO_SCORES,
    "margin": _NO_SCORES,
    "loss": "the loss has to give one value a sample (reduction='none'); use RandomSieve otherwise",
}


class Sieve:
    """Which samples are trained on, as training goes.

    All state lies in flat CPU arrays: 23 bytes a sample for the counts, up to 18 for the membership, 8 more with
    labels, 5 more with `LossSieve`; ten million samples take about half a gigabyte. Every draw comes from a generator
    of its own.

    Args:
        settings: which rule; None for nothing but `discard` and `restore` by hand.
        num_samples: samples in the training set; ids lie in ``[0, num_samples)``.
        batch_size: the kept set never gets smaller than this.
        seed: decides every draw.
        labels: class of each sample, whole numbers, shape ``(num_samples,)``; needed for class shares, and for class
            compositions in the records; None when not known.

    Attributes:
        settings: as given, `ManualSieve` for None.
        first_update: the record of what was left out at the start; None when nothing was.

    Raises:
        InvalidSettingError: for sizes below 1, when the fraction leaves no batch, or class shares lack labels.
        DataError: when the labels do not fit.

    Example:
        >>> from egeria_lab.algorithms.sieving.settings import CirculantSieve
        >>> sieve = Sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100, batch_size=10, seed=0)
        >>> len(sieve.kept_ids()), len(sieve.removed_ids())
        (80, 20)
        >>> for ids in sieve.kept_ids().split(10):               # one pass of training
        ...     sieve.observe(ids, correct=ids % 2 == 0, margin=torch.randn(len(ids)))
        >>> update = sieve.after_pass(steps_done=8, planned_steps=80)
        >>> update.reason
        '16 easiest of 80 kept samples exchanged for the 16 that waited longest'
    """

    def __init__(
        self,
        settings: SieveSettings | None,
        num_samples: int,
        *,
        batch_size: int,
        seed: int,
        labels: Ids | None = None,
    ) -> None:
        kinds = get_args(SieveSettings)
        require(settings is None or isinstance(settings, kinds), "Sieve", "settings", settings, "a sieve's, or None")
        require(is_whole(num_samples) and num_samples >= 1, "Sieve", "num_samples", num_samples, _WHOLE)
        require(is_whole(batch_size) and batch_size >= 1, "Sieve", "batch_size", batch_size, _WHOLE)
        self.settings: SieveSettings = ManualSieve() if settings is None else settings
        self.num_samples = num_samples
        self.batch_size = batch_size
        removed = check_batches(self.settings, num_samples, batch_size)
        self._classes, self._class_of = classes_of(labels, num_samples)
        self._generator = torch.Generator().manual_seed(seed)
        self.log = ForgettingLog(num_samples)
        self.losses = LossPruning(num_samples) if isinstance(self.settings, LossSieve) else None
        self.members = Membership(
            num_samples, self._generator, self._groups(self.settings), isinstance(self.settings, CIRCULATING)
        )
        self._passes = 0
        self._steps_at_swap = 0
        self._done = False  # the one shot was fired
        self.first_update: SieveUpdate | None = None
        if isinstance(self.settings, CIRCULATING):
            left_out = self.members.remove_at_random(removed)
            reason = f"{removed} of {num_samples} samples left out at random to begin with"
            self.first_update = self._record(Move("start", reason, left_out, left_out[:0], {}))

    def __repr__(self) -> str:
        kept, out, gone = self.members.num_kept, len(self.removed_ids()), len(self.discarded_ids())
        by_hand = f", {gone:,} discarded by hand" if gone else ""
        name = type(self.settings).__name__
        return f"{name}: {kept:,} of {self.num_samples:,} samples kept, {out:,} set aside{by_hand}"

    # --- what holds now ----------------------------------------------------------------------------------

    @property
    def needs(self) -> tuple[str, ...]:
        """What `observe` must be told: of ``"correct"``, ``"margin"`` and ``"loss"``; see `class_signals`."""
        return self.settings.needs

    def kept_ids(self) -> Tensor:
        """Ids that are trained on, int64, ascending."""
        return self.members.kept_ids().clone()

    def removed_ids(self) -> Tensor:
        """Ids that the rule leaves out, int64, in the order in which they would come back."""
        return self.members.queue.clone()

    def discarded_ids(self) -> Tensor:
        """Ids discarded by hand, int64, ascending."""
        return self.members.discarded_ids()

    def counts(self, ids: Ids | None = None) -> Counts:
        """Forgetting events, presentations and margins, of some samples or of all in order of their ids.

        Raises:
            DataError: for ids that do not exist.
        """
        return self.log.counts(torch.arange(self.num_samples) if ids is None else checked_ids(ids, self.num_samples))

    def histogram(self) -> dict[str, int]:
        """Number of kept samples by forgetting events in the present interval, as in `SieveUpdate.forgetting`."""
        return histogram(self.settings, self.members, self.log)

    def weights(self, ids: Tensor) -> Tensor | None:
        """Loss weight of each sample, float32, shape ``(b,)``, mean 1 or more; None when all are 1.

        Multiply the losses of a batch with them before taking the mean. Over a pass they sum up to the number of all
        samples: fewer steps, each as much larger.
        """
        return None if self.losses is None else self.losses.weights(ids)

    def subset(self, dataset: Dataset[Any]) -> Subset[Any]:
        """The kept samples as a data set of their own.

        Raises:
            DataError: when the data set has another length.
        """
        length = len(dataset)  # type: ignore[arg-type]
        if length != self.num_samples:
            raise DataError(f"the sieve is over {self.num_samples} samples, the data set has {length}.")
        return Subset(dataset, self.kept_ids().tolist())

    # --- training ----------------------------------------------------------------------------------------

    def observe(
        self,
        ids: Tensor,
        *,
        correct: Tensor | None = None,
        margin: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Take in what one training step showed, on the training view, so that it costs nothing extra.

        Args:
            ids: int64 sample ids, shape ``(b,)``.
            correct: whether each sample was classified rightly, bool, shape ``(b,)``, any device.
            margin: score of the right class minus the largest other, shape ``(b,)``, any device and precision.
            loss: of each sample, before any weight, shape ``(b,)``, any device and precision.

        Raises:
            DataError: for ids of another type or that do not exist, or when something is missing, has another shape,
                or is not what it should be: truth values, margins that are numbers, finite losses.
        """
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            kind = f"{ids.dim()}-d {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise DataError(f"sample ids must be a one-dimensional int64 tensor, so that none is rounded; got {kind}.")
        for name, value in (("correct", correct), ("margin", margin), ("loss", loss)):
            if value is None and name in self.needs:
                raise DataError(
                    f"{type(self.settings).__name__} needs `{name}` of each sample, got None: {_WHY[name]}."
                )
            if value is not None and value.shape != ids.shape:
                shapes = f"{tuple(value.shape)} for ids of shape {tuple(ids.shape)}"
                raise DataError(f"`{name}` must have one value a sample, got shape {shapes}.")
        ids = checked_ids(ids, self.num_samples)
        _check_observed(ids, correct, margin, loss)
        self.log.observe(ids, *(None if x is None else x.detach().cpu() for x in (correct, margin)))
        if self.losses is not None and loss is not None:
            self.losses.observe(ids, loss.detach().cpu())

    def after_pass(self, *, steps_done: int, planned_steps: int) -> SieveUpdate | None:
        """Note the end of a pass over the kept samples, and change the kept set when it is time.

        Args:
            steps_done: finished training steps.
            planned_steps: steps of the whole training, as planned now.

        Returns:
            The record of the change, or None.

        Raises:
            InvalidSettingError: for steps that are no whole numbers, or a plan without any.
        """
        require(is_whole(steps_done) and steps_done >= 0, "Sieve", "steps_done", steps_done, "a whole number >= 0")
        require(is_whole(planned_steps) and planned_steps >= 1, "Sieve", "planned_steps", planned_steps, _WHOLE)
        self._passes += 1
        settings, progress = self.settings, steps_done / planned_steps
        if progress >= 1:
            return None  # nothing would be trained on the new set; a longer plan gets it after its next pass
        if isinstance(settings, OneShotSieve):
            if self._done or progress < settings.at:
                return None
            self._done = True
            return self._record(one_shot(settings, self.members, self.log, self.batch_size))
        if isinstance(settings, LossSieve):
            assert self.losses is not None
            redrawn = redraw(settings, self.members, self.losses, self.batch_size, progress)
            return None if redrawn is None else self._record(redrawn)
        if isinstance(settings, ManualSieve) or progress >= settings.stop_fraction:
            return None
        since = steps_done - self._steps_at_swap
        if not is_due(settings, passes=self._passes, steps=since, planned_steps=planned_steps):
            return None
        self._passes, self._steps_at_swap = 0, steps_done
        swapped = swap(settings, self.members, self.log)
        return None if swapped is None else self._record(swapped)

    def change(self, settings: SieveSettings) -> None:
        """Exchange the settings for others of the same kind; a new fraction holds from the next update on.

        Raises:
            InvalidSettingError: for another kind, a fraction that leaves no batch, or class shares without labels.
        """
        if type(settings) is not type(self.settings):
            raise InvalidSettingError(
                f"a {type(self.settings).__name__} cannot become a {type(settings).__name__} during training; build a "
                "new session for another rule."
            )
        removed = check_batches(settings, self.num_samples, self.batch_size)
        self.members.use_groups(self._groups(settings))
        if isinstance(settings, CIRCULATING):
            self.members.target = self.num_samples - removed
        self.settings = settings

    def standing(self, *, steps_done: int) -> dict[str, Any]:
        """What a plan of coming passes has to know: see `egeria_lab.algorithms.sieving.planning`.

        Returns:
            Samples of a pass over everything and of one under the rule, and what has happened since the last exchange.
        """
        members = self.members
        everything = members.num_kept + members.num_removed
        kept = members.num_kept
        if isinstance(self.settings, LossSieve) or (isinstance(self.settings, OneShotSieve) and not self._done):
            kept = everything - count_leaving(self.settings.fraction, everything, self.batch_size)
        since = steps_done - self._steps_at_swap
        return {
            "full": everything, "short": kept, "fired": self._done, "passes_since": self._passes, "steps_since": since,
        }  # fmt: skip

    # --- by hand -----------------------------------------------------------------------------------------

    def discard(self, ids: Ids) -> SieveUpdate:
        """Never train on these samples again until they are restored.

        With a circulating sieve the head of the queue takes their places, so that the size stays; otherwise, and when
        the queue is empty, the kept set gets smaller.

        Raises:
            DataError: for no ids, ids that do not exist or are discarded already, or when less than one batch would be
                kept; then nothing is changed.
        """
        wanted = checked_ids(ids, self.num_samples).unique()  # type: ignore[no-untyped-call]
        check_named("discard", wanted, self.members.status[wanted] >= DISCARDED_KEPT, "are discarded already")
        leaving = int((self.members.status[wanted] == KEPT).sum())
        size = self.members.num_kept - leaving + self.members.fillers(wanted)
        if size < self.batch_size:
            raise DataError(
                f"discarding {len(wanted)} samples would leave {size} to train on, fewer than one batch of "
                f"{self.batch_size}; discard fewer, or lower the batch size."
            )
        removed, returned = self.members.discard(wanted)
        reason = f"{number_of_samples(len(wanted))} discarded by hand"
        if len(returned):
            reason += f", {len(returned)} from the head of the queue took their place"
        return self._record(Move("discard", reason, removed, returned, {}), wanted)

    def restore(self, ids: Ids) -> SieveUpdate:
        """Train on discarded samples again.

        With a circulating sieve those that took their places (or else random kept samples) go back to the head of the
        queue, so that the size stays; a sample that was in the queue when it was discarded goes to the head of it.

        Raises:
            DataError: for no ids, or ids that do not exist or are not discarded; then nothing is changed.
        """
        wanted = checked_ids(ids, self.num_samples).unique()  # type: ignore[no-untyped-call]
        check_named("restore", wanted, self.members.status[wanted] < DISCARDED_KEPT, "are not discarded")
        removed, returned = self.members.restore(wanted)
        reason = f"{number_of_samples(len(wanted))} restored by hand"
        if len(returned) < len(wanted):
            reason += f", {len(wanted) - len(returned)} of them to the samples that the rule leaves out"
        if len(removed):
            reason += f"; {len(removed)} made room and wait at the head of the queue"
        return self._record(Move("restore", reason, removed, returned, {}), wanted)

    # --- inside ------------------------------------------------------------------------------------------

    def _groups(self, settings: SieveSettings) -> Tensor | None:
        if not getattr(settings, "class_shares", False):
            return None
        if self._class_of is None:
            raise InvalidSettingError(
                f"{type(settings).__name__}.class_shares=True needs the label of every training sample, and they are "
                "not known; give the data set an attribute .targets with one whole number a sample, or "
                "class_shares=False."
            )
        return self._class_of

    def _record(self, move: Move, by_hand: Tensor | None = None) -> SieveUpdate:
        members = self.members
        return SieveUpdate(
            kind=move.kind,
            reason=move.reason,
            removed=move.removed,
            returned=move.returned,
            by_hand=move.removed[:0] if by_hand is None else by_hand,
            num_kept=members.num_kept,
            num_removed=members.num_removed,
            num_discarded=members.num_discarded,
            forgetting=move.forgetting,
            classes=self._composition(members.kept_ids()),
            removed_classes=self._composition(move.removed),
            returned_classes=self._composition(move.returned),
        )

    def _composition(self, ids: Tensor) -> dict[int, int]:
        if self._class_of is None:
            return {}
        numbers = torch.bincount(self._class_of[ids], minlength=len(self._classes)).tolist()
        return {label: number for label, number in zip(self._classes, numbers, strict=True) if number}

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as tensors and plain values; the settings are not in it."""
        return {
            "kind": type(self.settings).__name__,
            "num_samples": self.num_samples,
            "passes": self._passes,
            "steps_at_swap": self._steps_at_swap,
            "done": self._done,
            "generator": self._generator.get_state(),
            "log": self.log.state_dict(),
            "members": self.members.state_dict(),
            "losses": None if self.losses is None else self.losses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly from a saved state.

        Raises:
            DataError: when it is no state, or of another kind of sieve or another number of samples.
        """
        parts = ("kind", "num_samples", "passes", "steps_at_swap", "done", "generator", "log", "members", "losses")
        missing = [name for name in parts if not isinstance(state, Mapping) or name not in state]
        if missing:
            raise DataError(f"this is no state of a sieve: {', '.join(missing)} missing; give what state_dict() gave.")
        saved, own = (state["kind"], state["num_samples"]), (type(self.settings).__name__, self.num_samples)
        if saved != own:
            raise DataError(
                f"the saved state is of a {saved[0]} over {saved[1]} samples, this is a {own[0]} over {own[1]}; build "
                "the sieve as it was."
            )
        self._passes, self._steps_at_swap = int(state["passes"]), int(state["steps_at_swap"])
        self._done = bool(state["done"])
        self._generator.set_state(state["generator"])
        self.log.load_state_dict(state["log"])
        self.members.load_state_dict(state["members"])
        if self.losses is not None:
            self.losses.load_state_dict(state["losses"])


def _check_observed(ids: Tensor, correct: Tensor | None, margin: Tensor | None, loss: Tensor | None) -> None:
    if correct is not None and correct.dtype != torch.bool:
        raise DataError(f"`correct` must be truth values (torch.bool), got {correct.dtype}; compare labels with ==.")
    for name, value, wrong in (
        ("margin", margin, None if margin is None else margin.isnan()),
        ("loss", loss, None if loss is None else ~loss.isfinite()),
    ):
        if value is not None and wrong is not None and bool(wrong.any()):
            raise DataError(
                f"`{name}` of sample {some(ids[wrong.cpu()])} is no finite number; nothing of this batch was counted, "
                "check the model's outputs."
            )
