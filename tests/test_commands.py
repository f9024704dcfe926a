"""The queue: in order, from any thread, nothing lost; and the receipt that tells what became of a command."""

from __future__ import annotations

import threading
import time
from dataclasses import FrozenInstanceError

import pytest

from egeria_lab.commands import Command, CommandQueue, Extend, FreezeLayer, Override, Receipt, ThawLayer
from egeria_lab.events import CommandRejected, LayerFrozen


def test_first_in_first_out() -> None:
    queue = CommandQueue()
    commands: list[Command] = [
        FreezeLayer(layer="a"),
        Override(name="x", value=1),
        ThawLayer(layer="a"),
        Extend(epochs=2),
    ]
    receipts = [queue.put(command) for command in commands]
    assert queue.pending() == commands
    assert len(queue) == 4
    assert queue.drain() == receipts
    assert len(queue) == 0
    assert queue.drain() == []
    assert queue.pending() == []


def test_commands_are_frozen_plain_data() -> None:
    command = Override(name="freeze.tolerance", value=0.1)
    assert (command.by, command.layer) == ("user", None)
    with pytest.raises(FrozenInstanceError):
        command.value = 0.2  # type: ignore[misc]
    assert Override(name="a", value=1) == Override(name="a", value=1)
    with pytest.raises(TypeError):
        FreezeLayer("a")  # type: ignore[misc,call-arg]


def test_a_receipt_tells_what_became_of_it() -> None:
    receipt = CommandQueue().put(FreezeLayer(layer="a"))
    assert receipt.state == "pending"
    assert not receipt.wait(0)
    assert repr(receipt).startswith("pending: ")
    receipt.land(LayerFrozen(step=12, by="user", layer="a", reason="asked for"))
    assert receipt.state == "done"
    assert receipt.wait(0)
    assert repr(receipt) == "step 12: a frozen by user: asked for"
    rejected = Receipt(FreezeLayer(layer="a"))
    rejected.land(CommandRejected(step=3, command="x", reason="no"))
    assert rejected.state == "rejected"


def test_waiting_for_a_receipt_from_another_thread() -> None:
    receipt = CommandQueue().put(FreezeLayer(layer="a"))
    threading.Timer(0.05, lambda: receipt.land(LayerFrozen(step=1, layer="a"))).start()
    start = time.monotonic()
    assert receipt.wait(10)
    assert time.monotonic() - start < 5


def test_the_listener_is_told_after_the_command_is_in() -> None:
    queue = CommandQueue()
    lengths = []
    queue.on_put(lambda: lengths.append(len(queue)))
    queue.put(FreezeLayer(layer="a"))
    queue.put(FreezeLayer(layer="b"))
    assert lengths == [1, 2]


def test_many_threads_lose_nothing_and_keep_their_own_order() -> None:
    queue, taken = CommandQueue(), []
    done = threading.Event()

    def put(name: str) -> None:
        for number in range(500):
            queue.put(Override(name=name, value=number))

    def take() -> None:
        while not done.is_set() or len(queue):
            taken.extend(queue.drain())

    taker = threading.Thread(target=take)
    putters = [threading.Thread(target=put, args=(name,)) for name in "abcd"]
    taker.start()
    for thread in putters:
        thread.start()
    for thread in putters:
        thread.join()
    done.set()
    taker.join()
    assert len(taken) == 2000
    for name in "abcd":
        own = [receipt.command.value for receipt in taken if receipt.command.name == name]  # type: ignore[attr-defined]
        assert own == list(range(500))
