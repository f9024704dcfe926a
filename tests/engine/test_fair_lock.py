"""Whoever waits longest comes next, also against a thread that takes the lock again at once."""

from __future__ import annotations

import threading

import pytest

from egeria_lab.engine.fair_lock import FairLock


def test_those_who_wait_come_in_order_before_the_one_who_had_it() -> None:
    lock, order, waiting = FairLock(), [], threading.Semaphore(0)

    def wait(name: str) -> None:
        waiting.release()
        with lock:
            order.append(name)

    threads = [threading.Thread(target=wait, args=(name,)) for name in "abc"]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            waiting.acquire()
            while len(lock._waiting) <= number:
                pass
    with lock:  # taken again at once
        order.append("again")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "again"]


def test_it_is_re_entrant_and_exclusive() -> None:
    lock, count, inside = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(300):
            with lock, lock:
                inside[0] += 1
                assert inside[0] == 1
                count[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [1200]
    with lock:
        answers: list[bool] = []
        other = threading.Thread(target=lambda: answers.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        assert answers == [False]


def test_only_who_holds_it_gives_it_back() -> None:
    with pytest.raises(RuntimeError, match="by the thread that holds it"):
        FairLock().release()


def test_an_interrupt_while_it_waits_leaves_the_queue_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __init__(self) -> None:
            self.calls = 0

        def acquire(self) -> bool:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return True

        def release(self) -> None:
            pass

    lock = FairLock()
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    monkeypatch.setattr("egeria_lab.engine.fair_lock.threading.Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    monkeypatch.undo()
    assert not lock._waiting
    free.set()
    holder.join()
    assert lock.acquire(blocking=False)
