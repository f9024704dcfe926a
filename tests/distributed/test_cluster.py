"""A session on the engines of a real ipyparallel cluster, driven as from a notebook."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import egeria_lab as lab

ipyparallel = pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    cluster = ipyparallel.Cluster(n=2, log_level=40, engine_timeout=300)
    yield cluster.start_and_connect_sync(n=2)
    cluster.stop_cluster_sync()


def on_each(client: Any, what: str) -> list[Any]:
    """An expression about the session of each engine."""
    code = (
        "from egeria_lab.integrations.cluster_engine import session as _of\n"
        f"import hashlib\nanswer = (lambda session: {what})(_of())"
    )
    client[:].execute(code, block=True)
    return list(client[:].pull("answer", block=True))


DIGEST = "hashlib.sha256(b''.join(v.numpy().tobytes() for v in session.model.state_dict().values())).hexdigest()"


def test_commands_reach_both_ranks_at_the_same_step(client: Any, tmp_path: Path) -> None:
    session: Any = lab.Session(
        "mlp", "digits", epochs=4000, freeze=lab.Plasticity(interval_steps=3), device="cpu", cluster=client
    )
    try:
        session.step(3)
        assert session.save(str(tmp_path / "run.ckpt")).exists()  # at rest: nobody steps, nobody waits
        with pytest.raises(lab.InvalidSettingError, match=r"got -1"):
            session.override("freeze.tolerance", -1)
        with pytest.raises(lab.InvalidSettingError, match=r"^fork\(\) works in a single process"):
            session.fork()
        pinned = session.pin("layers.2")
        assert pinned.state == "done"
        assert on_each(client, "session.layers.pinned") == [("layers.2",)] * 2
        assert (session.steps_done, len(session.history.steps)) == (3, 3)
        session.start()
        moved = session.override("freeze.tolerance", 0.7)
        frozen = session.freeze("layers.0")
        assert moved.wait(60)
        assert frozen.wait(60)
        session.pause()
        by_hand = (
            "[(e.step, type(e).__name__) for e in session.events if e.by == 'user' and not 'Run' in type(e).__name__]"
        )
        first, second = on_each(client, by_hand)
        assert first[-2:] == second[-2:] == [(moved.event.step, "SettingChanged"), (frozen.event.step, "LayerFrozen")]
        assert session.layers["layers.0"].state == "frozen"
        assert session.setting("freeze.tolerance") == 0.7
        thawed = session.thaw("layers.0")
        assert thawed.wait(60)
        assert thawed.event is not None
        session.resume()
        undone = session.undo()
        assert undone.wait(60)
        session.stop()
        assert session.wait(60)
        first, second = on_each(client, DIGEST)
        assert first == second
        assert session.state == "stopped"
        assert len(session.history.steps) == session.steps_done
        assert [e.to_dict() for e in session.events] == on_each(client, "[e.to_dict() for e in session.events]")[0]
        assert session.savings().to_dict()["exchange"]["ranks"] == 2
        assert session.evaluate()["accuracy"] > 0.5
    finally:
        session.close()


def test_the_dashboard_shows_and_steers_it(client: Any) -> None:
    session: Any = lab.Session("mlp", "digits", epochs=2, freeze=None, device="cpu", cluster=client)
    try:
        dashboard = session.dashboard()
        session.step(2)
        assert "step 2 of 24" in dashboard._publisher._feed.state()["status"]["text"]
        dashboard._publisher._controls.handle({"do": "freeze", "layer": "layers.1", "number": "1"})
        session.step(1)
        assert session.layers["layers.1"].state == "frozen"
        assert on_each(client, "session.layers['layers.1'].by") == ["dashboard", "dashboard"]
        dashboard.close()
    finally:
        session.close()


def test_errors_of_an_engine_arrive_in_one_sentence(client: Any) -> None:
    with pytest.raises(lab.UnknownNameError, match=r"'mpl'\. Did you mean 'mlp'"):
        lab.Session("mpl", "digits", cluster=client)
    with pytest.raises(lab.InvalidSettingError, match=r"cluster must be an ipyparallel\.Cluster or Client, got int"):
        lab.Session("mlp", "digits", cluster=3)


def test_an_engine_that_dies_is_reported_and_the_others_go_on_from_the_checkpoint(client: Any, tmp_path: Path) -> None:
    session: Any = lab.Session(
        "mlp", "digits", epochs=4000, freeze=None, device="cpu", cluster=client,
        run_dir=str(tmp_path / "run"), save_every_steps=10,
    )  # fmt: skip
    session.step(25)
    session.start()
    os.kill(client[1].apply_sync(os.getpid), signal.SIGKILL)
    with pytest.raises(lab.TrainingError, match=r"rank 1 died|another rank died"):
        session.wait(120)
    assert session.state == "failed"
    with pytest.raises(lab.TrainingError, match=r"rank 1 died|another rank died"):
        session.freeze("layers.0")
    session.close()
    again: Any = lab.Session.load(tmp_path / "run", cluster=client)
    try:
        assert again.steps_done >= 20
        assert len(again.history.steps) == again.steps_done
        again.step(2)
        assert "1 rank" in repr(again)
    finally:
        again.close()
