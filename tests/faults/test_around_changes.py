"""Save at every step around a freeze, a thaw, a mask update and a sieve update; load beside a filled cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import egeria_lab as lab
from egeria_lab.checkpoint.file import read
from egeria_lab.engine.session_state import SessionState, restore
from egeria_lab.events import CacheNotice, CheckpointLoaded, LayerFrozen, LayerThawed, MaskUpdated, SamplesSieved

EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "reference": "fp32",
}  # fmt: skip


def everything(**options: Any) -> lab.Session:
    settings: dict[str, Any] = {
        "batch_size": 128, "epochs": 8, "lr": 0.05, "scheduler": "step", "seed": 1, "freeze": lab.Plasticity(**EAGER),
        "sieve": lab.CirculantSieve(fraction=0.25, interval_epochs=1),
        "sparsity": lab.MEST(sparsity=0.6, interval_steps=6),
    }  # fmt: skip
    return lab.Session("mlp", "digits", **{**settings, **options})


def losses(session: lab.Session) -> list[float]:
    return [float(x) for x in session.history["steps"]["loss"]]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_of_every_step_goes_on_to_the_bit(tmp_path: Path) -> None:
    last, ahead = 40, 4
    whole = everything()
    thawed, weights = False, {}
    for step in range(last + ahead):
        if step <= last:
            whole.save(tmp_path / f"{step}.ckpt")
        if whole.layers.frozen and not thawed and step > 25:
            whole.thaw(whole.layers.frozen[0])
            thawed = True
        whole.step()
        weights[whole.steps_done] = {name: x.clone() for name, x in whole.model.state_dict().items()}
    around = {type(event): event.step for event in whole.events}
    assert {LayerFrozen, LayerThawed, MaskUpdated, SamplesSieved} <= set(around)
    thaw = next(event for event in whole.events if isinstance(event, LayerThawed))
    again: lab.Session | None = None
    for step in range(last + 1):
        if again is None or step % 8 == 0:
            if again is not None:
                again.close()
            again = lab.Session.load(tmp_path / f"{step}.ckpt")  # through the file
        else:
            restore(again, SessionState(step, read(tmp_path / f"{step}.ckpt")["state"]))
        while again.steps_done < min(step + ahead, last + ahead):
            if again.steps_done == thaw.step and again.layers[thaw.layer].frozen:
                again.thaw(thaw.layer)
            again.step()
        assert losses(again) == losses(whole)[: again.steps_done]
        assert same(weights[again.steps_done], again.model.state_dict())
    assert again is not None
    again.close()
    whole.close()


def test_a_cache_is_filled_again_after_a_load_and_changes_no_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "cache": lab.ActivationCache(self_profiling=False), "freeze": None, "sieve": None, "sparsity": None,
    }  # fmt: skip
    plain = everything(**{**options, "cache": None})
    session = everything(**options)
    for each in (plain, session):
        each.step(3)
        each.freeze("layers.0")
        each.step(30)
    assert session.cache is not None
    rows, hits = session.cache.statistics.rows, session.cache.statistics.hits
    assert rows == len(session.data.train)
    again = lab.Session.load(session.save(tmp_path / "a.ckpt"))
    (loaded,) = again.events.of(CheckpointLoaded)
    assert loaded.notes == (f"The activation cache's {rows:,} rows are in no checkpoint: they are computed again.",)
    assert again.cache is not None
    assert again.cache.statistics.rows == 0
    for each in (plain, session, again):
        each.step(30)
    assert losses(again) == losses(session) == losses(plain)
    assert same(again.model.state_dict(), session.model.state_dict())
    assert again.cache.statistics.rows == rows
    assert again.cache.statistics.hits > hits  # the count goes on, and rows are served again in the second pass
    assert not [e for e in again.events.of(CacheNotice) if e.kind == "refused"]
    empty = everything(**options)
    empty.step(2)
    nothing = lab.Session.load(empty.save(tmp_path / "b.ckpt"))
    assert nothing.events.of(CheckpointLoaded)[0].notes == ()  # no rows: nothing to say
    for each in (plain, session, again, empty, nothing):
        each.close()
