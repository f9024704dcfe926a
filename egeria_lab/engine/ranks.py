"""One session among those of the other ranks: rank 0 decides, all apply the same at the same step.

Every rank holds the whole session: model, optimizer, sieve, masks, history. What could differ between them is agreed
on: commands before the step, the loss before the update, what each sample showed and what the rule decided after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from egeria_lab import commands as c
from egeria_lab.algorithms.decision import Decision
from egeria_lab.data.loaders import Batch
from egeria_lab.distributed.gradients import GradientExchange, running_statistics, set_statistics
from egeria_lab.distributed.group import FollowingEndedError, Group
from egeria_lab.distributed.sharding import Share
from egeria_lab.engine.monitor import PlasticityMonitor
from egeria_lab.engine.rank_checks import check_same, receipts_for, some_unused, what_is_trained
from egeria_lab.engine.signals import SampleSignals
from egeria_lab.engine.trainer import StepResult
from egeria_lab.errors import InvalidSettingError, TrainingError

BEAT_SECONDS = 20.0
"""So often rank 0 says that it is still there while it stands still."""


class Ranks:
    """The ties of one session to those of the other ranks.

    Args:
        session: the session, with its sources and its trainer.
        group: the ranks.

    Attributes:
        exchange: averages gradients and counts their bytes.
        torn: a step was made here that is not written down: another rank was lost in the middle of it.

    Raises:
        InvalidSettingError: when the ranks were not asked for the same thing.
    """

    def __init__(self, session: Any, group: Group) -> None:
        self.group = group
        self._session = session
        self._share = Share(group.rank, group.size, always=True)
        self._voted = False
        self.torn = False
        trainer, source = session.trainer, session._train_source
        if source.accumulate > 1:
            raise InvalidSettingError(
                f"accumulate={source.accumulate} cannot be used with several ranks, which split the batch themselves; "
                f"give the global batch as batch_size={source.batch_size} and start as many ranks as it needs."
            )
        check_same(group, what_is_trained(session))
        source.share = self._share.of
        session._valid_source.share = Share(group.rank, group.size).of
        self.exchange = GradientExchange(
            trainer.model, trainer.run_to_train, group, trainer.device, some_unused(session)
        )
        trainer.ranks = self

    @property
    def number(self) -> int:
        """Which rank this is, from 0."""
        return self.group.rank

    # --- before a step ---------------------------------------------------------------------------------

    def landings(self, queue: c.CommandQueue, kind: str = "wait") -> Iterator[list[c.Receipt]]:
        """The commands of rank 0, to be carried out in this order; on others until rank 0 begins its step.

        Args:
            queue: commands that were put on this rank; on ranks other than 0 they only get their receipts.
            kind: ``"step"`` when a step follows, ``"rest"`` when all ranks land commands without one, ``"wait"`` when
                the others shall stay.

        Raises:
            FollowingEndedError: on the others, when rank 0 ended its run.
        """
        if self.group.is_first:
            receipts = queue.drain()
            self.group.from_first((kind, [r.command for r in receipts]), "commands")
            yield receipts
            return
        kind, commands = "wait", list[c.Command]()
        while kind == "wait":
            kind, commands = self.group.from_first(None, "the next step of rank 0")
            if kind == "stop":
                raise FollowingEndedError("rank 0 ended its run")
            yield receipts_for(commands, queue.drain())

    def ended(self, outcome: str) -> None:
        """Tell the others that rank 0's run is over before its planned end."""
        if self.group.is_first and outcome in ("stopped", "paused"):
            with suppress(TrainingError):  # nobody may be left to hear it
                self.group.from_first(("stop", []), "the end of the run")

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """A step that is made on all ranks or on none: a rank that cannot make it tells the others before they move."""
        self._voted = False
        try:
            yield
        except BaseException:
            self._tell_failure()
            raise

    # --- inside a step, called by the trainer ----------------------------------------------------------

    def run(self, batch: Batch, content: Any) -> Any:
        """The forward pass whose backward pass averages gradients."""
        return self.exchange(batch, content)

    def agree_on_loss(self, value: float, batch: Batch) -> float:
        """The mean loss of the global batch.

        Raises:
            TrainingError: when another rank could not make this step.
        """
        weight = self._weight(batch)
        self._voted = True
        total, failed = self.group.sum([value * weight if weight else 0.0, 0.0], "the loss")
        if failed:
            raise TrainingError(
                "another rank could not make this step, so it was not applied here; its error is there."
            )
        return total / self.group.size

    def weighted(self, loss: Tensor, batch: Batch) -> Tensor:
        """The loss, so that the mean of gradients over ranks is the gradient of the global batch's mean."""
        return loss * self._weight(batch)

    def backward(self, work: Callable[[], None]) -> None:
        """Run a backward pass."""
        self.exchange.guarded(work)

    def total(self, sums: Sequence[float]) -> list[float]:
        """Sums of an evaluation over all ranks."""
        return self.group.sum(sums, "an evaluation")

    # --- after a step ----------------------------------------------------------------------------------

    def whole(
        self, batch: Batch, result: StepResult, shares: Sequence[float] | None
    ) -> tuple[Batch, StepResult, list[float] | None]:
        """What the step was on all ranks: ids, accuracy and signals of the global batch, mean shares of forward work.

        Args:
            batch: this rank's rows.
            result: what this rank measured; its loss is agreed on already.
            shares: how much of each layer's forward pass ran here, or None.
        """
        session = self._session
        frozen = {m for layer in session.layer_modules if layer.name in session.layers.frozen for m in layer.modules}
        moved = running_statistics(session.model, frozen)
        weight = self._weight(batch)
        accuracy = 0.0 if result.accuracy is None else result.accuracy
        figures = torch.tensor(
            [accuracy * weight, weight * (result.accuracy is not None), *(shares or [])], dtype=torch.float64
        )
        table = self._table(batch, result.signals)
        # One message for everything: integers below 2**53 and float32 are exact in double precision.
        parts = [*(x.detach().flatten().cpu() for x in moved), figures, table.flatten()]
        flat = self.group.add(torch.cat([part.double() for part in parts]), "what a step showed")
        counts = [sum(x.numel() for x in moved), len(figures), table.numel()]
        statistics, sums, shown = torch.split(flat, counts)
        set_statistics(moved, statistics / self.group.size)
        known = float(sums[1]) > self.group.size - 1e-6
        whole = replace(
            result,
            accuracy=float(sums[0]) / self.group.size if known else None,
            signals=None if result.signals is None else _signals(shown.to(torch.int32).view_as(table), result.signals),
        )
        mean = None if shares is None else (sums[2:] / self.group.size).tolist()
        assert batch.whole is not None
        return Batch(batch.whole, None), whole, mean

    def probed(self, batch: Batch) -> Batch:
        """With the rows of a reading where one is due: the first of the global batch, for any number of ranks."""
        rule, source = self._session.rule, self._session._train_source
        if (
            not self.group.is_first
            or not isinstance(rule, PlasticityMonitor)
            or not rule.is_due(self._session.steps_done)
        ):
            return batch
        return Batch(batch.ids, source.fetch(batch.ids[: rule.policy.settings.probe_rows]).content)

    def agreed(self, decide: Callable[[], list[Decision]]) -> list[Decision]:
        """Decisions of rank 0, on every rank. Only it measures plasticity; rules that need not, run everywhere."""
        only_first = isinstance(self._session.rule, PlasticityMonitor)
        decisions: list[Decision] = []
        problem: Exception | None = None
        if self.group.is_first or not only_first:
            try:
                decisions = decide()
            except Exception as error:
                if not self.group.is_first:
                    raise
                problem = error
        failure, said = self.group.from_first((str(problem) if problem else "", decisions), "the rule")
        if problem is not None:
            raise problem
        if failure:
            raise TrainingError(f"the rule failed on rank 0: {failure}")
        return said

    def figures(self) -> dict[str, float]:
        """Bytes of gradients, for the ledger."""
        trainable = [p for layer in self._session.layer_modules for p in layer.parameters]
        others = [p for p in self._session.model.parameters() if p.requires_grad]
        every = {id(p): p.numel() * p.element_size() for p in [*trainable, *others]}
        return {
            "ranks": self.group.size,
            "step_bytes": self.exchange.step_bytes,
            "full_step_bytes": sum(every.values()),
            "bytes": self.exchange.bytes_sent,
            "full_bytes": sum(every.values()) * self._session.steps_done,
            "rewraps": self.exchange.rewraps,
            "rewrap_seconds": self.exchange.rewrap_seconds,
        }

    def close(self) -> None:
        """Take the wrapper off the model."""
        self.exchange.close()
        self._session.trainer.ranks = None

    # --- inside ----------------------------------------------------------------------------------------

    def _tell_failure(self) -> None:
        if not self._voted:  # otherwise they know, or are past it
            self._voted = True
            with suppress(TrainingError):
                self.group.sum([0.0, 1.0], "the loss")

    def _weight(self, batch: Batch) -> float:
        assert batch.whole is not None
        return self._share.weight(batch.whole)

    def _table(self, batch: Batch, signals: SampleSignals | None) -> Tensor:
        """This rank's signals in the places of its rows, zeros elsewhere: added up, no id or bit is rounded."""
        assert batch.whole is not None
        table = torch.zeros(4, len(batch.whole) if signals is not None else 0, dtype=torch.int32)
        if signals is None or not self._weight(batch):
            return table
        own = self._share.of(batch.whole)
        kinds = (signals.correct, signals.margin, signals.loss)
        table[0, own] = sum(bit << i for i, bit in enumerate(x is not None for x in kinds))
        for row, values in enumerate(kinds, start=1):
            if values is not None:
                table[row, own] = values.int() if row == 1 else values.float().view(torch.int32)
        return table


def _signals(table: Tensor, own: SampleSignals) -> SampleSignals:
    """The signals of the global batch, from the sum of the tables of all ranks."""
    has = int(table[0].min())
    return SampleSignals(
        correct=table[1].bool() if has & 1 else None,
        margin=table[2].view(torch.float32) if has & 2 else None,
        loss=table[3].view(torch.float32) if has & 4 else None,
        loss_shape=own.loss_shape,
    )
