"""What ranks agree on before they train together, and whose commands count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from egeria_lab import commands as c
from egeria_lab.algorithms.tracing import undisturbed
from egeria_lab.distributed.group import Group
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import CommandRejected


def check_same(group: Group, facts: dict[str, Any]) -> None:
    """Raise unless all ranks were asked for the same thing.

    Raises:
        InvalidSettingError: on every rank, with the first fact that differs.
    """
    everybody = group.everybodys(facts)
    for name in facts:
        values = [theirs.get(name) for theirs in everybody]
        if any(value != values[0] for value in values):
            rank = next(i for i, value in enumerate(values) if value != values[0])
            raise InvalidSettingError(
                f"the ranks were not asked for the same thing: {name} is {values[0]!r} on rank 0 and {values[rank]!r} "
                f"on rank {rank}. Give every rank the same arguments."
            )


def some_unused(session: Any) -> bool:
    """True when a batch leaves some parameters without a gradient; found out on the example batch, without a trace."""
    trainer = session.trainer
    content = trainer.to_device(session.recorder.example.content)
    wanted = [p for p in trainer.model.parameters() if p.requires_grad]
    with undisturbed(trainer.model), trainer.private_draws("count", 0), torch.enable_grad():
        outputs, _ = trainer.run_model(trainer.model, content)
        found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        gradients = torch.autograd.grad([x.float().sum() for x in found], wanted, allow_unused=True)
    return any(gradient is None for gradient in gradients)


def what_is_trained(session: Any) -> dict[str, Any]:
    source, arguments = session._train_source, session._arguments
    shapes = "".join(f"{name}{tuple(p.shape)}" for name, p in session.model.named_parameters())
    return {
        "samples": source.num_samples,
        "batch_size": source.batch_size,
        "seed": session.seed,
        "epochs": arguments["epochs"],
        "lr": arguments["lr"],
        "number of parameters": sum(p.numel() for p in session.model.parameters()),
        "names and shapes of parameters": shapes,
        "freeze": repr(arguments["freeze"]),
        "sieve": repr(arguments["sieve"]),
        "sparsity": repr(arguments["sparsity"]),
    }


def receipts_for(commands: list[c.Command], mine: list[c.Receipt]) -> list[c.Receipt]:
    """Receipts for the commands of rank 0; what was put here only counts where rank 0 has the same."""
    receipts = []
    for command in commands:
        same = next((receipt for receipt in mine if receipt.command == command), None)
        if same is not None:
            mine.remove(same)
        receipts.append(same if same is not None else c.Receipt(command))
    for receipt in mine:
        reason = "commands are taken from rank 0; this rank follows"
        receipt.land(CommandRejected(step=0, by=receipt.command.by, command=str(receipt.command), reason=reason))
    return receipts
