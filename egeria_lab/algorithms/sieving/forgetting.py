"""Count what a model forgets: per sample, how often a right prediction turned wrong at the next presentation.

Source: Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning", ICLR 2019.
Sample ids are int64 from end to end: a float32 holds whole numbers up to 2**24 only, a float16 up to 2**11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egeria_lab.errors import DataError

NEVER_CORRECT_RANK = 2**30
"""Hardness of a sample that was never right; more than any count of events."""
NOT_PRESENTED_RANK = 2**30 + 1
"""Hardness of a sample that was not presented in the interval: nothing says that it is easy, so it stays."""
_IGNORED_LABEL = -100  # what torch's cross-entropy skips by default
_LARGEST_MARGIN = 1e6
_OFF_ONE, _OFF_ONE_IN_HALF = 1e-3, 1e-2  # how far the probabilities of a sample may sum up to something else
_ARRAYS = ("last", "ever", "in_interval", "events", "events_total", "presented", "presented_total", "margin_sum")


class ClassSignals(NamedTuple):
    """What a forgetting count wants to know about each sample of a batch.

    Attributes:
        correct: bool, shape ``(b,)``.
        margin: score of the right class minus the largest other score, float32, shape ``(b,)``.
    """

    correct: Tensor
    margin: Tensor


def class_signals(outputs: Any, targets: Any) -> ClassSignals:
    """Right or wrong, and by how much, for each sample of a batch.

    Args:
        outputs: class scores ``(b, classes)``, or with one more dimension (tokens, pixels) before or after it.
        targets: int labels ``(b,)`` or ``(b, …)``, or class probabilities ``(b, classes)``, which are
            >= 0 and sum up to 1. Labels of −100 are
            skipped. A sample of several labels is right when all of them are, and has their mean margin; one
            without any label counts as right, with margin 0: there is nothing to learn from it.

    Raises:
        DataError: when the outputs are no class scores.

    Example:
        >>> class_signals(torch.tensor([[2.0, 0.5], [1.0, 3.0]]), torch.tensor([0, 0]))
        ClassSignals(correct=tensor([ True, False]), margin=tensor([ 1.5000, -2.0000]))
    """
    scores, labels = _scores_and_labels(outputs, targets)
    counted = labels != _IGNORED_LABEL
    place = labels.clamp(min=0).unsqueeze(1)
    others = scores.scatter(1, place, -torch.inf).amax(1)
    margin = (scores.gather(1, place).squeeze(1) - others).float().masked_fill(~counted, 0.0)
    correct = (scores.argmax(1) == labels) | ~counted
    if labels.dim() > 1:
        number = counted.flatten(1).sum(1).clamp(min=1)
        return ClassSignals(correct.flatten(1).all(1), margin.flatten(1).sum(1) / number)
    return ClassSignals(correct, margin)


def _scores_and_labels(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Scores with the classes in dimension 1, and int64 labels of the same shape without that dimension."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim() >= 2:
        scores = outputs.detach()
        if targets.is_floating_point() and targets.shape == outputs.shape and _are_probabilities(targets):
            labels = targets.argmax(1)
        elif outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
            scores, labels = scores.movedim(-1, 1), targets
        else:
            labels = targets
        fits = labels.shape == scores.shape[:1] + scores.shape[2:] and not labels.is_floating_point()
        if fits and scores.shape[1] >= 2 and scores.is_floating_point():
            return scores, labels.detach().long()
    given = [str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in (outputs, targets)]
    raise DataError(
        "a sieve that counts forgetting needs class scores of shape (samples, classes) and their labels to tell "
        f"right from wrong, got outputs {given[0]} and targets {given[1]}; use RandomSieve or LossSieve for this task."
    )


def _are_probabilities(targets: Tensor) -> bool:
    """Whether dimension 1 holds class probabilities: numbers to regress on and several labels at once do not."""
    tolerance = _OFF_ONE if targets.element_size() >= 4 else _OFF_ONE_IN_HALF
    known = targets.detach().float()
    return bool((known >= 0).all()) and bool(((known.sum(1) - 1).abs() <= tolerance).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts:
    """What was counted, one value a sample, in the order of the ids that were asked for.

    Attributes:
        events: forgetting events in the present interval, int32.
        events_total: forgetting events since the start, int32.
        presentations: presentations in the present interval, int32.
        presentations_total: presentations since the start, int32.
        never_correct: presented, and wrong each time so far, bool.
        mean_margin: over the present interval, float32; NaN where nothing was presented.
    """

    events: Tensor
    events_total: Tensor
    presentations: Tensor
    presentations_total: Tensor
    never_correct: Tensor
    mean_margin: Tensor

    def __repr__(self) -> str:
        seen, forgotten = int((self.presentations_total > 0).sum()), int((self.events_total > 0).sum())
        names = ", ".join(field.name for field in fields(self))
        return (
            f"Counts of {len(self.events):,} samples: {seen:,} seen, {forgotten:,} forgotten at least once, "
            f"{int(self.never_correct.sum()):,} never right; tensors: {names}"
        )


class ForgettingLog:
    """Forgetting events of every sample, 23 bytes a sample (0.23 GB for ten million), in flat arrays on the CPU.

    Args:
        num_samples: samples in the training set; ids lie in ``[0, num_samples)``.

    Example:
        >>> log = ForgettingLog(4)
        >>> for correct in (True, False, True, False):
        ...     log.observe(torch.tensor([2]), torch.tensor([correct]), torch.tensor([0.5]))
        >>> log.counts(torch.tensor([2])).events
        tensor([2], dtype=torch.int32)
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        # -1 not known, 0 wrong, 1 right: at the last presentation; at any so far; at any in the interval
        self.last, self.ever, self.in_interval = (torch.full((num_samples,), -1, dtype=torch.int8) for _ in range(3))
        self.events, self.events_total, self.presented, self.presented_total = (
            torch.zeros(num_samples, dtype=torch.int32) for _ in range(4)
        )
        self.margin_sum = torch.zeros(num_samples)

    def observe(self, ids: Tensor, correct: Tensor | None = None, margin: Tensor | None = None) -> None:
        """Take in one batch. A sample that comes twice in it was presented twice, in the order of the batch.

        Args:
            ids: int64, shape ``(b,)``, on the CPU.
            correct: bool, shape ``(b,)``, or None when not known.
            margin: shape ``(b,)``, or None when not known.
        """
        right = None if correct is None else correct.to(torch.int8)
        size = None if margin is None else margin.float().nan_to_num(0.0).clamp(-_LARGEST_MARGIN, _LARGEST_MARGIN)
        for part in _without_repeats(ids):
            where = ids if part is None else ids[part]
            self.presented[where] += 1
            self.presented_total[where] += 1
            self.margin_sum[where] += torch.nan if size is None else (size if part is None else size[part])
            if right is not None:
                self._judge(where, right if part is None else right[part])

    def _judge(self, ids: Tensor, right: Tensor) -> None:
        forgot = (self.last[ids] == 1) & (right == 0)
        self.events[ids] += forgot
        self.events_total[ids] += forgot
        self.last[ids] = right
        self.ever[ids] = torch.maximum(self.ever[ids], right)
        self.in_interval[ids] = torch.maximum(self.in_interval[ids], right)

    def next_interval(self, across_borders: bool = True) -> None:
        """Begin a new interval; with `across_borders` the last prediction of the old one is remembered."""
        for array in (self.events, self.presented, self.margin_sum):
            array.zero_()
        self.in_interval.fill_(-1)
        if not across_borders:
            self.last.fill_(-1)

    def hardness(self, ids: Tensor, never_correct: str = "ever", total: bool = False) -> Tensor:
        """How hard each sample is, int32: events, or one of the two ranks above them.

        Args:
            ids: int64, shape ``(n,)``.
            never_correct: ``"ever"``, ``"interval"`` or ``"ignored"``, as `CirculantSieve` has it.
            total: count since the start, not in the present interval.
        """
        rank = (self.events_total if total else self.events)[ids]
        if never_correct != "ignored":
            right = (self.ever if never_correct == "ever" or total else self.in_interval)[ids]
            rank = rank.masked_fill(right == 0, NEVER_CORRECT_RANK)
        return rank.masked_fill((self.presented_total if total else self.presented)[ids] == 0, NOT_PRESENTED_RANK)

    def mean_margin(self, ids: Tensor) -> Tensor:
        """Mean margin of the present interval, float32; NaN where nothing was presented or observed."""
        return self.margin_sum[ids] / self.presented[ids]

    def histogram(self, ids: Tensor, never_correct: str = "ever", total: bool = False) -> dict[str, int]:
        """How many samples have 0, 1, 2, … events, were ``"never correct"``, or ``"not presented"``.

        Example:
            >>> ForgettingLog(3).histogram(torch.arange(3))
            {'not presented': 3}
        """
        hardness = self.hardness(ids, never_correct, total)
        names = {NEVER_CORRECT_RANK: "never correct", NOT_PRESENTED_RANK: "not presented"}
        values, numbers = torch.unique(hardness, return_counts=True)
        return {names.get(v, str(v)): n for v, n in zip(values.tolist(), numbers.tolist(), strict=True)}

    def counts(self, ids: Tensor) -> Counts:
        """What was counted for some samples."""
        return Counts(
            events=self.events[ids],
            events_total=self.events_total[ids],
            presentations=self.presented[ids],
            presentations_total=self.presented_total[ids],
            never_correct=self.ever[ids] == 0,
            mean_margin=self.mean_margin(ids),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors of its own."""
        return {name: getattr(self, name).clone() for name in _ARRAYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name in _ARRAYS:
            getattr(self, name).copy_(state[name])


def _without_repeats(ids: Tensor) -> Iterator[Tensor | None]:
    """Parts of a batch, as positions, in which no id comes twice; None is the whole batch."""
    ordered, order = ids.sort(stable=True)
    if not bool((ordered[1:] == ordered[:-1]).any()):
        yield None
        return
    _, lengths = torch.unique_consecutive(ordered, return_counts=True)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    turn = torch.arange(len(ids)) - starts
    for number in range(int(lengths.max())):
        yield order[turn == number]
