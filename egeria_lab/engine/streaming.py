"""A session whose data are a stream: what it cannot have, how long its plan is, and what is said about it.

Freezing, sparsity, evaluation, ledger and dashboard ask for no sample by its id and work as ever. Undo, fork, replay
and resuming work by reading the stream again from its start up to the place: to the bit where the data come again as
they came, and with a `Notice` where a fingerprint shows that they do not. They are not refused, since refusing would
take them from all the streams that do repeat, and whether one does can only be seen by reading it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.data.loaders import BatchSource
from egeria_lab.data.stream_source import StreamSource, source_for
from egeria_lab.data.streams import is_stream, length_of
from egeria_lab.distributed.group import wanted
from egeria_lab.engine.budget import Budget
from egeria_lab.errors import InvalidSettingError, is_whole, require
from egeria_lab.events import EventLog, Notice

NEEDS_IDS = {
    "sieve": "leaves samples out by their ids",
    "cache": "finds the outputs of a sample by its id",
}
COUNTS_EPOCHS = ("freeze", "sparsity")
"""Arguments whose settings may have an `interval_epochs`."""


def check_length(steps: Any, epochs: Any, steps_per_epoch: Any) -> None:
    """Raise for lengths that are none.

    Raises:
        InvalidSettingError: with what to give.
    """
    for name, value in (("steps", steps), ("steps_per_epoch", steps_per_epoch)):
        require(
            value is None or (is_whole(value) and value >= 1), "Session", name, value, "a whole number >= 1 or None"
        )
    if steps is not None and epochs is not None:
        raise InvalidSettingError(f"give steps or epochs, not both: got {steps=} and {epochs=}.")


def make_sources(train: Any, valid: Any, **arguments: Any) -> tuple[BatchSource, BatchSource]:
    """The batches to train and to evaluate on.

    Args:
        train: map-style data, a loader or a stream.
        valid: the same.
        arguments: those of `Session`.

    Raises:
        DataError, InvalidSettingError: when the data cannot be trained on, or not with these arguments.
    """
    batch_size, seed = arguments["batch_size"], arguments["seed"]
    check_length(arguments["steps"], arguments["epochs"], arguments["steps_per_epoch"])
    for role, data in (("training", train), ("validation", valid)):
        if is_stream(data) and wanted(arguments["distributed"]):
            raise InvalidSettingError(
                f"several ranks share out the samples of a batch by their ids, and the {role} data are a stream, whose "
                "samples have none: give a map-style data set (with __len__ and __getitem__), or train in one process."
            )
    shared: dict[str, Any] = {"seed": seed, "augment": arguments["augment"], "accumulate": arguments["accumulate"]}
    if not is_stream(train):
        _check_no_cut(arguments["steps_per_epoch"])
        return BatchSource(train, batch_size, **shared), source_for(valid, max(256, batch_size), seed=seed)
    _check_can_stream(train, arguments)
    cut, planned = arguments["steps_per_epoch"], arguments["steps"]
    source = StreamSource(train, batch_size, **shared, steps_per_epoch=cut, planned=planned)
    return source, source_for(valid, max(256, batch_size), seed=seed)


def follow(source: BatchSource, budget: Budget, events: EventLog, freeze: Any, steps_done: Callable[[], int]) -> None:
    """Tie a stream to the session that reads it; of other data nothing is done.

    Args:
        source: the training data.
        budget: the plan; epochs are counted in passes as long as the newest.
        events: where is said what a user should know.
        freeze: the settings of the freezing rule.
        steps_done: tells the finished steps.
    """
    if not isinstance(source, StreamSource):
        return
    budget.planner = StreamPlanner(source, steps_done)
    source.tell = lambda message: events.append(Notice(step=steps_done(), message=message))
    if source.knows_length:
        return
    waits = isinstance(freeze, Plasticity) and freeze.bootstrap_epochs > 0
    rule = f", and Plasticity(bootstrap_epochs={freeze.bootstrap_epochs:g}) freezes nothing" if waits else ""
    if isinstance(freeze, Plasticity) and freeze.settle_epochs:
        rule += f"; settle_epochs={freeze.settle_epochs:g} counts by the planned steps"
    source.tell(
        f"The training stream does not tell its length: a pass ends when it does, and until then nothing is "
        f"evaluated{rule}. For data without an end, give steps_per_epoch=."
    )


class StreamPlanner:
    """Turns passes over a stream into steps, once it is known how many steps a pass has.

    Example:
        >>> source = StreamSource(lambda: iter([]), 1, seed=0, role="validation", steps_per_epoch=5)
        >>> StreamPlanner(source, lambda: 7).steps_for(2)
        17
    """

    def __init__(self, source: BatchSource, steps_done: Callable[[], int]) -> None:
        self._source = source
        self._steps_done = steps_done

    def stop_after(self, epochs: float, total_steps: int) -> int | None:
        """The step after so many passes from here, or None when the plan holds fewer."""
        target = self.steps_for(epochs)
        return target if target <= total_steps else None

    def steps_for(self, epochs: float, total_steps: int | None = None) -> int:
        """The plan that makes so many passes from here, or more than one of `total_steps` makes.

        Raises:
            InvalidSettingError: while nobody knows how long a pass is.
        """
        if not self._source.knows_length:
            raise InvalidSettingError(
                f"epochs={epochs:g} cannot be counted: the training stream does not tell its length and no pass over "
                "it has ended yet; give steps= to run() or start(), which lengthens the plan."
            )
        start = self._steps_done() if total_steps is None else total_steps
        return start + max(1, round(epochs * self._source.steps_per_epoch))


def _check_no_cut(steps_per_epoch: int | None) -> None:
    if steps_per_epoch is not None:
        raise InvalidSettingError(
            f"steps_per_epoch={steps_per_epoch} is for data that come as a stream, and these are map-style, with a "
            "length of their own: leave it out."
        )


def _check_can_stream(train: Any, arguments: dict[str, Any]) -> None:
    for name, what in NEEDS_IDS.items():
        if arguments[name] is not None:
            raise InvalidSettingError(
                f"{name}= {what}, and the training data are a stream, whose samples have none: give a map-style data "
                f"set (with __len__ and __getitem__), or {name}=None."
            )
    if arguments["steps_per_epoch"] is not None or length_of(train) is not None:
        return
    if arguments["steps"] is None:
        given = "the default number of epochs" if arguments["epochs"] is None else f"epochs={arguments['epochs']:g}"
        raise InvalidSettingError(
            f"{given} cannot be counted: the training data are a stream that does not tell its length; give steps=, "
            "the steps of the whole plan, or steps_per_epoch=."
        )
    for name in COUNTS_EPOCHS:
        interval = getattr(arguments[name], "interval_epochs", None)
        if interval is not None:
            raise InvalidSettingError(
                f"{name}= has interval_epochs={interval:g}, and the training stream does not tell how many steps an "
                "epoch has; give interval_steps=, or steps_per_epoch= to the session."
            )
