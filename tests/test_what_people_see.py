"""What a notebook prints of every object that a person meets, and what it completes after a dot."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.config import SettingList
from egeria_lab.events import LayerThawed, SamplesSieved

RULE = lab.Plasticity(interval_steps=1, window=3, patience=2, tolerance=5.0)


@pytest.fixture(scope="module")
def session() -> lab.Session:
    """A finished run with everything in it."""
    torch.set_num_threads(1)
    made = lab.Session(
        "mlp", "digits", epochs=3, freeze=RULE, sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1),
        sparsity=lab.SET(sparsity=0.8, interval_epochs=1), cache=lab.ActivationCache(),
    )  # fmt: skip
    made.step(12)
    made.freeze("layers.0")
    made.run(progress=False)
    return made


def html_of(thing: Any) -> str:
    """What a notebook shows of it."""
    shown: str = thing._repr_html_()
    return shown


def test_nothing_that_a_session_offers_prints_as_an_address(session: lab.Session) -> None:
    for name in dir(session):
        if name.startswith("_"):
            continue
        value = getattr(session, name)
        if callable(value) and not isinstance(value, nn.Module):
            continue
        assert " object at 0x" not in repr(value), name


def test_a_session_prints_its_layers(session: lab.Session) -> None:
    assert repr(session).startswith("Session(mlp on digits, finished, step 27 of 27, ")
    assert "\n" not in repr(session)
    assert str(session).splitlines()[0] == repr(session)
    assert "layers.0  dense 64→256       16,640  frozen" in str(session)
    assert html_of(session).count("<tr>") == 1 + len(session.layers)


def test_a_session_completes_what_a_person_calls_and_nothing_else(session: lab.Session) -> None:
    offered = {name for name in dir(session) if not name.startswith("_")}
    assert {"start", "pause", "override", "layers", "savings", "what_if", "dashboard", "undo", "sieve"} <= offered
    assert offered.isdisjoint({"advance", "trainer", "recorder", "land_commands", "settings_book", "finish_pass"})
    assert all(hasattr(session, name) for name in offered)
    assert session.trainer is not None  # left out of the list, not out of reach


def test_the_module_completes_what_it_exports() -> None:
    assert set(dir(lab)) == {*lab.__all__, "errors", "events"}
    assert set(dir(lab.data)) == {"ArrayDataset", "Data", "MapDataset", "describe", "load", "names"}
    assert set(dir(lab.presets)) == {"egeria", "everything", "fine_tuning", "settled", "spfde"}
    assert "Any" not in dir(lab.loggers)
    assert set(dir(lab.integrations)) == {"LoopFreezer", "lightning", "hugging_face", "loggers"}
    assert "registry" not in dir(lab.models)


def test_settings_print_as_a_table(session: lab.Session) -> None:
    settings = session.settings()
    assert isinstance(settings, SettingList)
    first = repr(settings).splitlines()[1]
    assert first.split()[:3] == ["freeze.tolerance", "5.0", "5.0"]
    assert "0.01 to 2 × first slopes" in first
    assert html_of(settings).count("<tr>") == 1 + len(settings)


def test_the_log_prints_sentences_and_shows_the_newest_in_a_table() -> None:
    log = lab.events.EventLog()
    assert html_of(log) == "<p>no events yet</p>"
    for step in range(60):
        log.append(LayerThawed(step=step, by="rule", layer="a<b", reason="the rate fell"))
    shown = html_of(log)
    assert shown.startswith("<p>10 earlier ones;")
    assert shown.count("<tr>") == 1 + 50
    assert "a&lt;b thawed by rule: the rate fell" in shown
    assert len(repr(log).splitlines()) == 60


def test_an_event_prints_as_a_sentence_and_its_repr_keeps_every_field() -> None:
    ids = tuple(range(1000))
    event = SamplesSieved(
        step=9, by="rule", removed=1000, returned=0, kept=5, waiting=1000, removed_ids=ids, returned_ids=(), reason="x"
    )
    assert str(event) == "step 9: Sieve: 1,000 samples out, 0 back in; 5 kept, 1,000 set aside (x)"
    assert "999" in repr(event)  # replays compare by it
    assert html_of(event).startswith("<p>step 9: Sieve: 1,000")


def test_history_lists_its_tables(session: lab.Session) -> None:
    shown = html_of(session.history)
    assert ">27<" in shown
    assert "smoothed, slope, tolerance" in shown
    assert ".frame(table)" in shown


def test_the_sieve_says_how_many_it_keeps(session: lab.Session) -> None:
    assert repr(session.sieve) == "CirculantSieve: 1,078 of 1,437 samples kept, 359 set aside, exchanged 2 times"
    assert repr(lab.Session("mlp", "digits").sieve) == "no sieve: all 1,437 samples are trained on"
    counts = session.sieve.counts()
    assert repr(counts).startswith("Counts of 1,437 samples: ")
    assert "never right; tensors: events, events_total, presentations" in repr(counts)
    alone = lab.Sieve(None, 10, batch_size=2, seed=0)
    alone.discard([3])
    assert repr(alone) == "ManualSieve: 9 of 10 samples kept, 0 set aside, 1 discarded by hand"
    assert repr(lab.KeptSampler(alone, seed=4)).endswith("1 discarded by hand; seed 4, next pass 0)")
    assert "plan_with" not in dir(session.sieve)
    assert "kept_ids" in dir(session.sieve)


def test_masks_say_how_many_weights_live(session: lab.Session) -> None:
    assert repr(session.sparse).startswith("SET: 20.0% of the maskable weights live (aim 20.0%), masks updated ")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    masks = lab.SparseTraining(model, lab.SET(sparsity=0.75))
    assert repr(masks) == "SET: 16 of 64 maskable weights live (25.0%) in 1 tensors"


def test_the_cache_says_how_far_it_reaches_and_what_it_served(session: lab.Session) -> None:
    said = repr(session.cache)
    assert said.startswith("Activation cache of the front up to layers.")
    served = session.cache.statistics.hits  # type: ignore[union-attr]
    assert f"{served:,} of " in said
    fresh = lab.Session("mlp", "digits", freeze=None, cache=lab.ActivationCache())
    assert repr(fresh.cache).startswith("Activation cache (the front is not frozen yet): 0 rows")


def test_freezing_by_hand_says_what_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freezer = lab.freeze_layers(model, ["0"], torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(freezer).endswith("frozen: 0)")
    freezer.close()
    assert repr(freezer).endswith("frozen: none)")


def test_a_data_set_says_its_size_and_shapes() -> None:
    pair = lab.ArrayDataset(torch.zeros(1200, 1, 8, 8), torch.zeros(1200).long())
    assert repr(pair) == "ArrayDataset(1,200 samples; inputs: 1 × 8 × 8, float32; targets: one number, int64)"
    assert "train=ArrayDataset(1,437 samples" in repr(lab.data.load("digits"))


def test_an_export_does_not_print_its_numbers(session: lab.Session) -> None:
    assert repr(session.export()) == (
        "Exported(model: Mlp in eval mode on the CPU, state_dict: 8 tensors, 58,442 numbers)"
    )


def test_the_cost_book_does_not_print_every_step(session: lab.Session) -> None:
    assert "full_step_seconds" not in repr(session.savings().book)
    assert len(session.savings().book.full_step_seconds) > 0


def test_undo_says_what_it_would_take_back() -> None:
    session = lab.Session("mlp", "digits", freeze=None)
    assert repr(session.undo_ring).startswith("UndoRing(nothing to undo: no command that did something is remembered;")
    session.freeze("layers.0")
    assert repr(session.undo_ring).startswith("UndoRing(can undo FreezeLayer(by='user', layer='layers.0');")


def test_a_logger_says_where_it_writes_and_whom_it_follows(tmp_path: Path) -> None:
    logger = lab.loggers.CSV(tmp_path / "logs")
    assert repr(logger) == f"CSV(to {tmp_path / 'logs'}, not following a session yet)"
    session = lab.Session("mlp", "digits")
    session.subscribe(logger)
    assert repr(logger).endswith(", follows mlp on digits)")
    logger.close()


def test_a_loop_freezer_says_how_far_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezer = lab.integrations.LoopFreezer(model, optimizer, example=batch, freeze=None)
    freezer.freeze("0")
    assert repr(freezer) == "LoopFreezer(Sequential, 0 updates, 1 of 2 layers frozen)"
    freezer.close()
    assert repr(freezer).endswith("closed)")


def test_one_thread_is_not_threads() -> None:
    said = lab.events.RunStarted(step=0, planned_steps=9, device="cpu", threads=1).sentence()
    assert said == "Training on cpu with 1 thread, up to step 9"


def test_the_docstring_of_session_says_every_argument() -> None:
    text = lab.Session.__doc__ or ""
    missing = [name for name in inspect.signature(lab.Session).parameters if name not in text]
    assert missing == []
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize(
    "settings",
    [
        lab.Plasticity(), lab.Schedule(), lab.GradientNorm(), lab.CirculantSieve(), lab.RandomSieve(),
        lab.OneShotSieve(), lab.LossSieve(), lab.MEST(), lab.SET(), lab.RigL(), lab.StaticSparsity(),
        lab.ActivationCache(), lab.Augment(),
    ],
    ids=lambda settings: type(settings).__name__,
)  # fmt: skip
def test_settings_show_what_differs_from_the_default(settings: Any) -> None:
    shown = html_of(settings)
    assert f">{type(settings).__name__}</th>" in shown
    assert shown.count("<tr>") == 1 + len(fields(settings))
    assert "<b>" not in shown


def test_a_changed_setting_is_bold() -> None:
    assert "tolerance</td><td><b>0.5</b></td><td>0.2</td>" in html_of(lab.Plasticity(tolerance=0.5))
