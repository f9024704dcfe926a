"""A session that is closed by one thread while another one is just starting its background run."""

from __future__ import annotations

import threading
import time

import egeria_lab as lab
from egeria_lab.events import RunStarted


def test_closing_while_a_run_is_being_started_ends_its_thread() -> None:
    session = lab.Session("mlp", "digits", epochs=1000, freeze=None)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            session.close()
        except BaseException as error:
            errors.append(error)

    closing = threading.Thread(target=close)

    def on_start(_event: object) -> None:  # the run is announced before its thread starts
        closing.start()
        time.sleep(0.3)

    session.subscribe(on_start, RunStarted)
    session.start()
    closing.join(60)
    assert not closing.is_alive()
    assert errors == []
    assert session.state != "running"
