"""Samples, sparsity, savings of everything together and what-if: what a page, a report and a figure are told."""

from __future__ import annotations

import base64
import json
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import empty_session, told_session
from pages import Clock, Outlet, Page, live, told
from plotly.offline import get_plotlyjs

import egeria_lab as lab
from egeria_lab.algorithms.sieving.settings import CirculantSieve, LossSieve, RandomSieve
from egeria_lab.commands import Discard, Extend, Override, Restore
from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.figures import savings_figure, sieve_figure, sparsity_figure
from egeria_lab.dashboard.publisher import Publisher
from egeria_lab.dashboard.report import render_report
from egeria_lab.dashboard.saving_rows import saving_rows, watching_costs
from egeria_lab.dashboard.sieve_sheet import MOST_IN_A_GROUP, SHEET_SECONDS, SieveSheet, sheet_table
from egeria_lab.dashboard.static_view import static_html
from egeria_lab.dashboard.summary import headlines
from egeria_lab.dashboard.thumbnails import MOST_PIXELS, image_of, png, thumbnail
from egeria_lab.dashboard.tuner import MOST_SPANS, Tuner
from egeria_lab.events import LayerFrozen, RunPaused, RunResumed, SamplesSieved


def small(**how):
    torch.set_num_threads(1)
    return lab.Session("mlp", "digits", **{"epochs": 12, "batch_size": 64, "seed": 0, **how})


@pytest.fixture(scope="module")
def all_on():
    """A run with a sieve that has exchanged samples, and with masks."""
    session = small(
        freeze=lab.Plasticity(interval_steps=2, window=6, patience=5, tolerance=0, reference="fp32"),
        sieve=CirculantSieve(fraction=0.25, interval_epochs=1), sparsity=lab.MEST(sparsity=0.8),
    )  # fmt: skip
    session.step(120)
    return session


# -- pictures -------------------------------------------------------------------------------------------


def pixels_of(data):
    """Width, height and raw bytes of a PNG file without filters, checked chunk by chunk."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, found = 8, {}
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(data[place + 8 + length : place + 12 + length], "big")
        found[kind], place = body, place + 12 + length
    width, height = (int.from_bytes(found[b"IHDR"][i : i + 4], "big") for i in (0, 4))
    return width, height, zlib.decompress(found[b"IDAT"])


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_a_png_holds_exactly_the_pixels(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    width, height, raw = pixels_of(png(pixels))
    rows = np.frombuffer(raw, np.uint8).reshape(height, -1)
    assert (width, height) == (7, 5)
    assert (rows[:, 0] == 0).all()
    np.testing.assert_array_equal(rows[:, 1:].reshape(shape), pixels)


@pytest.mark.parametrize(
    ("shape", "found"),
    [((1, 8, 8), (8, 8)), ((3, 8, 9), (8, 9, 3)), ((8, 9, 3), (8, 9, 3)), ((8, 8), (8, 8)), ((64,), None),
     ((2, 8, 8), None), ((3, 2, 2), None), ((1, 3, 8, 8), None)],
)  # fmt: skip
def test_what_is_an_image_and_what_is_not(shape, found):
    image = image_of((torch.zeros(shape), 1))
    assert (None if image is None else image.shape) == found


def test_a_thumbnail_is_small_whatever_the_image_and_survives_missing_numbers():
    image = np.random.default_rng(0).normal(size=(500, 300)).astype(np.float32)
    image[0, 0] = np.nan
    data = thumbnail(image, -1.0, 1.0)
    width, height, _ = pixels_of(base64.b64decode(data.partition(",")[2]))
    assert max(width, height) <= MOST_PIXELS
    assert len(data) < 4000


# -- the sieve's sheet ----------------------------------------------------------------------------------


def test_numbers_histogram_and_classes_add_up(all_on):
    state = SieveSheet(all_on).state()
    assert state["kept"] == all_on.sieve.num_kept == len(all_on.sieve.kept_ids())
    assert state["kept"] + state["waiting"] + state["discarded"] == state["total"] == 1437
    assert sum(number for _, number in state["histogram"]) == state["kept"]
    assert sum(row["kept"] for row in state["classes"]) == state["kept"]
    assert [row["name"] for row in state["classes"]] == [str(i) for i in range(10)]
    counted = all_on.sieve.histogram()
    assert dict(state["histogram"])["0"] == counted["0"]
    json.dumps(state)


def test_the_sheet_shows_hardest_easiest_and_just_returned(all_on):
    sheet = SieveSheet(all_on)
    groups = {group["key"]: group["items"] for group in sheet.state()["groups"]}
    assert list(groups) == ["hardest", "easiest", "returned"]
    assert all(len(items) <= MOST_IN_A_GROUP for items in groups.values())
    counts = all_on.sieve.counts()
    hardest = [item["id"] for item in groups["hardest"]]
    kept = all_on.sieve.kept_ids()
    seen = kept[counts.presentations[kept] > 0]
    assert counts.never_correct[hardest[0]] or counts.events[hardest[0]] == counts.events[seen].max()
    easiest = groups["easiest"][0]["id"]
    right = seen[(counts.events[seen] == 0) & ~counts.never_correct[seen]]
    assert counts.mean_margin[easiest] == counts.mean_margin[right].max()
    newest = all_on.events.of(SamplesSieved)[-1]
    assert {item["id"] for item in groups["returned"]} <= set(newest.returned_ids)
    assert set(sheet.pictures()) == {str(item["id"]) for items in groups.values() for item in items}
    assert sum(map(len, sheet.pictures().values())) < 40_000


def test_looking_changes_nothing(all_on):
    before = all_on.sieve.state_dict()
    sheet = SieveSheet(all_on)
    drawn = torch.random.get_rng_state()
    for _ in range(3):
        sheet.state()
    after = all_on.sieve.state_dict()
    assert torch.equal(torch.random.get_rng_state(), drawn)
    for part in ("log", "members"):
        for name, value in before["sieve"][part].items():
            same = torch.equal if torch.is_tensor(value) else dict.__eq__ if isinstance(value, dict) else int.__eq__
            assert same(value, after["sieve"][part][name])


def test_the_sheet_rests_while_training_runs_and_is_new_after_a_discard():
    session = small(sieve=CirculantSieve(fraction=0.25, interval_epochs=1))
    clock = Clock()
    sheet = SieveSheet(session, clock)
    session.step(5)
    session._runner.state = "running"
    first = sheet.state()["groups"]
    session.step(3)
    assert sheet.state()["groups"] is first
    clock.now += SHEET_SECONDS
    second = sheet.state()["groups"]
    assert second is not first
    session.discard([second[0]["items"][0]["id"]])
    session.step()
    assert sheet.moved
    discarded = sheet.state()["groups"][-1]
    assert (discarded["key"], discarded["items"][0]["where"]) == ("discarded", "discarded")
    assert not sheet.moved


def test_without_a_sieve_there_is_nothing_until_a_sample_is_discarded():
    session = small()
    sheet = SieveSheet(session)
    session.step(3)
    assert sheet.state() == {}
    assert sheet.pictures() == {}
    assert session.sieve.figures() is None  # looking has made none
    session.discard([7, 9])
    state = sheet.state()
    assert (state["method"], state["discarded"]) == ("discarding by hand", 2)
    assert state["groups"][-1]["key"] == "discarded"
    assert len(session.history.sieve) == 1


@pytest.mark.parametrize("settings", [RandomSieve(fraction=0.25), LossSieve(fraction=0.25)])
def test_sieves_that_count_no_forgetting_say_so(settings):
    session = small(sieve=settings)
    session.step(30)
    state = SieveSheet(session).state()
    assert state["histogram"] == []
    assert type(settings).__name__ in state["why_no_histogram"]
    keys = [group["key"] for group in state["groups"]]
    assert ("hardest" in keys) == isinstance(settings, LossSieve)


def test_of_data_that_are_no_pictures_the_sheet_is_a_table():
    inputs, labels = torch.randn(200, 5), torch.randint(0, 3, (200,))
    pair = torch.utils.data.TensorDataset(inputs, labels)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    session = lab.Session(model, (pair, pair), epochs=4, batch_size=20, sieve=CirculantSieve(fraction=0.2))
    session.step(20)
    sheet = SieveSheet(session)
    state = sheet.state()
    assert sheet.pictures() == {}
    head, body = sheet_table(state["groups"])
    assert len(body) == sum(len(group["items"]) for group in state["groups"]) > 0
    assert len(head) == len(body[0])


class Unlooked(torch.utils.data.Dataset):
    """Data whose samples must not be read by a watcher: reading one may draw random numbers."""

    targets = tuple(i % 3 for i in range(60))
    watched = False

    def __len__(self):
        return 60

    def __getitem__(self, i):
        assert not self.watched, "a watcher read a sample"
        return torch.randn(1, 8, 8), self.targets[i]


def test_samples_of_data_that_do_not_lie_in_memory_are_not_read():
    data = Unlooked()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    session = lab.Session(model, (data, data), epochs=2, batch_size=20, sieve=CirculantSieve(fraction=0.2))
    session.step(2)
    data.watched = True
    sheet = SieveSheet(session)
    assert sheet.state()["groups"]
    assert sheet.pictures() == {}


# -- wire -----------------------------------------------------------------------------------------------


def test_curves_of_samples_and_masks_reach_the_page(all_on):
    parts = {part.table: part for part in Feed(all_on).full()}
    assert parts["sieve"].columns["kept"].tolist() == all_on.history.sieve["kept"].tolist()
    assert len(parts["sparsity"].x) == len(all_on.history.sparsity)
    flops = parts["steps"].columns["flops"]
    assert flops[-1] == pytest.approx(all_on.history.steps["train_flops"].sum())


def test_flops_go_on_where_the_last_delta_ended():
    session = told(steps=200, per_epoch=50)
    feed = Feed(session)
    feed.full()
    for step in range(201, 211):
        session.history.steps.append(step=step, loss=1.0, train_flops=2e9)
    (delta,) = feed.delta()
    whole = np.cumsum(session.history.steps["train_flops"])
    assert delta.columns["flops"] == pytest.approx(whole[-10:])
    (full,) = [part for part in feed.full() if part.table == "steps"]
    assert full.columns["flops"] == pytest.approx(whole)


def test_the_state_stays_small(all_on):
    feed = Feed(all_on)
    state = feed.sieve()
    assert len(json.dumps(state["sieve"])) < 8_000
    assert len(json.dumps(state["pictures"])) < 40_000


# -- savings --------------------------------------------------------------------------------------------


def test_savings_of_each_technique_stand_beside_each_other_with_reasons(all_on):
    ledger = all_on.savings().to_dict()
    rows = {row.quantity: row for row in saving_rows(ledger)}
    sieving, sparsity = rows["Computation by sieving (FLOPs)"], rows["Computation by sparsity (FLOPs)"]
    whole, memory = rows["Computation, all together (FLOPs)"], rows["Memory as the papers count it"]
    assert sieving.theoretical == ledger["run"]["saved_by_sieving"] > 0.2
    assert sparsity.theoretical == ledger["run"]["saved_by_sparsity"] > 0.5
    assert 1 - whole.theoretical == pytest.approx((1 - sieving.theoretical) * (1 - sparsity.theoretical))
    assert (sparsity.measured, sparsity.unmeasured, memory.unmeasured) == (None, "on paper only", "on paper only")
    assert sieving.unmeasured == "counted, not timed"
    assert all(row.why for row in rows.values())
    assert list(rows)[-1] == "Cost of monitoring"
    assert [cost.split()[0] for cost in watching_costs(ledger)] == ["sieve", "masks"]
    cards = {card.label: card.value for card in headlines(all_on, ledger)}
    assert cards["Computation saved"] == f"{100 * whole.theoretical:.1f} %"
    assert "masks" in Feed(all_on).ledger(0.01)["watching"]
    assert len(savings_figure(ledger).data[0].y) == 9


def test_where_weights_are_masked_freezing_has_a_row_of_its_own_with_theory_and_measurement_apart():
    session = small(freeze=None, sparsity=lab.MEST(sparsity=0.8))
    session.step(10)
    session.freeze("layers.0")
    session.step(20)
    ledger = session.savings().to_dict()
    row = {row.quantity: row for row in saving_rows(ledger)}["Computation by freezing (FLOPs)"]
    run = ledger["run"]
    assert (
        row.theoretical == run["saved_by_freezing"] == pytest.approx(1 - run["after_freezing"] / run["after_sparsity"])
    )
    assert row.measured == ledger["flops"]["saved_fraction"] > 0
    assert row.measured != pytest.approx(row.theoretical, abs=1e-4)  # live weights are not what ran
    whole = {row.quantity: row for row in saving_rows(ledger)}["Computation, all together (FLOPs)"]
    assert 1 - whole.theoretical == pytest.approx((1 - run["saved_by_sparsity"]) * (1 - row.theoretical))


def test_a_plain_run_has_the_rows_of_freezing_only():
    assert [row.quantity for row in saving_rows(small().savings().to_dict())] == [
        "Computation (FLOPs)", "Training time", "Memory for backward (saved tensors)", "Cost of monitoring",
    ]  # fmt: skip


# -- figures and report ---------------------------------------------------------------------------------


@pytest.mark.parametrize("x", ["steps", "epochs", "samples", "flops", "seconds"])
def test_figures_hold_what_history_holds(all_on, x):
    sieve, sparsity = sieve_figure(all_on.history, x=x), sparsity_figure(all_on.history, all_on.layers, x=x)
    kept = next(trace for trace in sieve.data if trace.name == "trained on")
    assert kept.y[-1] == all_on.sieve.num_kept
    assert len(kept.x) == len(kept.y)
    moved = next(trace for trace in sieve.data if trace.name == "samples exchanged")
    assert len(moved.x) == len(all_on.history.sieve)
    masked = np.unique(all_on.history.sparsity["layer"])
    assert len(sparsity.data) == 2 * len(masked)
    assert sparsity.data[0].y[-1] == all_on.history.sparsity["density"][-len(masked)]


@pytest.mark.parametrize("num_layers", [3, 60])
def test_figures_stay_small_and_dense_models_are_drawn_as_pictures(num_layers):
    session = empty_session(num_layers)
    for step in range(1, 3001):
        session.history.steps.append(step=step, epoch=step / 100, loss=1.0)
        session.history.sieve.append(step=step, kept=80 + step % 7, waiting=20, discarded=0, removed=3, returned=3)
        for layer in range(num_layers):
            session.history.sparsity.append(step=step, layer=layer, density=0.2, churn=0.01 * (step % 5))
    for figure in (sieve_figure(session.history), sparsity_figure(session.history, session.layers)):
        for trace in figure.data:
            assert (trace.z.size if trace.type == "heatmap" else len(trace.x)) <= max(1000, 200 * num_layers)
    kinds = {trace.type for trace in sparsity_figure(session.history, session.layers).data}
    assert kinds == ({"heatmap"} if num_layers == 60 else {"scatter"})


def test_empty_figures_say_why():
    history = empty_session().history
    assert "sieve=" in sieve_figure(history).layout.annotations[0].text
    assert "sparsity=" in sparsity_figure(history, []).layout.annotations[0].text


def test_the_report_shows_samples_and_masks_only_where_they_are(all_on):
    page = render_report(all_on).replace(get_plotlyjs(), "")
    assert page.count('id="figure-sieve"') == page.count('id="figure-sparsity"') == 1
    assert page.count("<img ") == 3 * MOST_IN_A_GROUP
    assert "hardest of those trained on" in page
    assert "on paper only" in page
    plain = render_report(told_session(3, steps=200))
    assert 'id="figure-sieve"' not in plain
    assert 'id="figure-sparsity"' not in plain


# -- what if --------------------------------------------------------------------------------------------


def test_the_tuner_answers_as_the_replay_does_and_touches_nothing(all_on):
    answer = Tuner(all_on).answer({"tolerance": 0.4, "window": 6.0, "patience": 5})
    assert answer["spans"], answer
    layer, start, end, reason = answer["spans"][0]
    assert (layer, end) == (0, None)
    assert "tolerance" in reason
    assert answer["exact_until"] == start  # exact up to the first freeze that the run did not make
    assert answer["saved"] > answer["recorded"] == 0
    assert answer["why"]
    assert answer["kept_snapshots"] == 22
    assert all_on.setting("freeze.tolerance") == 0
    assert not all_on.events.of(LayerFrozen)
    json.dumps(answer)
    assert Tuner(all_on).answer({})["spans"] == []


def test_longer_exact_with_the_recorded_snapshots(all_on):
    answer = Tuner(all_on).answer({"tolerance": 0.0, "patience": 3})
    assert answer["exact_until"] is None


@pytest.mark.parametrize("wish", [{"tolerance": -1}, {"window": 0}])
def test_a_wish_out_of_range_is_answered_in_one_sentence(all_on, wish):
    assert "must be" in Tuner(all_on).answer(wish)["problem"]


def test_runs_without_plasticity_say_so():
    assert "no plasticity" in Tuner(small(freeze=None)).answer({})["problem"]
    assert "no plasticity" in Tuner(told()).answer({})["problem"]
    on_a_cluster = SimpleNamespace(what_if=lambda **_: None)
    assert "kept by rank 0: ask it with session.what_if(" in Tuner(on_a_cluster).answer({})["problem"]


def test_an_answer_is_bounded():
    assert MOST_SPANS <= 1000


def test_a_page_gets_its_own_newest_answer(all_on):
    outlet, clock = Outlet(), Clock()
    publisher = Publisher(Feed(all_on), Controls(all_on), outlet, clock=clock)
    one, two = Page(publisher.receive, "one"), Page(publisher.receive, "two")
    for tolerance in (0.1, 0.2, 0.4):
        one.say("whatif", number=f"a{tolerance}", tolerance=tolerance)
    two.say("whatif", number="b", tolerance=0.0)
    publisher.tick()
    said = {header["view"]: header for header, _ in outlet.other}
    assert [header["kind"] for header, _ in outlet.other] == ["answer", "answer"]  # the last wish counts
    assert said["one"]["number"] == "a0.4"
    assert said["one"]["answer"]["spans"]
    assert said["two"]["answer"]["spans"] == []


# -- controls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        ({"do": "discard", "ids": [3, 5]}, Discard(ids=(3, 5), by="dashboard")),
        ({"do": "restore", "ids": [3]}, Restore(ids=(3,), by="dashboard")),
        ({"do": "extend", "epochs": 1}, Extend(epochs=1.0, by="dashboard")),
    ],
)
def test_each_new_control_puts_exactly_one_command(request_, command):
    session = told()
    Controls(session).handle({**request_, "number": "1"})
    assert session.commands.pending() == [command]
    assert session.called == []


@pytest.mark.parametrize("ids", [[], [1.5], "3", [True], list(range(10_001)), None])
def test_ids_that_make_no_sense_are_rejected(ids):
    session = told()
    controls = Controls(session)
    controls.handle({"do": "discard", "ids": ids, "number": "1"})
    assert len(session.commands) == 0
    assert "whole numbers" in controls.report()["landed"][0]["why"]


def test_halving_twice_before_the_next_step_is_a_quarter():
    session = small(lr=0.08)
    session._runner._looping = True  # as while a run is under way: commands wait
    controls = Controls(session)
    controls.handle({"do": "halve_rate", "number": "1"})
    controls.handle({"do": "halve_rate", "number": "2"})
    assert session.commands.pending() == [
        Override(name="optimizer.lr", value=0.04, by="dashboard"),
        Override(name="optimizer.lr", value=0.02, by="dashboard"),
    ]  # fmt: skip
    session._runner._looping = False


def test_a_run_goes_on_to_the_end_of_a_longer_plan():
    session = small(epochs=1)
    session.start()
    session.wait(20)
    controls = Controls(session)
    controls.handle({"do": "extend", "epochs": 1, "number": "1"})
    assert controls.report()["landed"][-1]["as"] == "done"
    session.wait(20)
    assert session.steps_done == session.planned_steps == 2 * session.steps_per_epoch


def test_a_paused_run_stays_paused_when_the_plan_gets_longer():
    session = live(told())
    session.state = "paused"
    controls = Controls(session)
    controls.handle({"do": "extend", "epochs": 1, "number": "1"})
    (receipt,) = session.commands.drain()
    receipt.land(lab.events.SettingChanged(step=1, name="planned_steps", old=1, new=2))
    controls.report()
    assert session.called == []
    controls.handle({"do": "play", "number": "2"})
    assert session.called == ["start"]  # to the new end; resume would stop at the old one


def test_step_makes_exactly_one_step_and_pauses_again():
    session = small(epochs=400)
    session.start()
    session.pause()
    controls = Controls(session)
    _until(lambda: session.state == "paused")
    before = session.steps_done
    for made in (1, 2, 3):
        controls.handle({"do": "step", "number": str(made)})
        _until(lambda made=made: session.steps_done == before + made and session.state == "paused")
    assert session.steps_done == before + 3
    assert len(session.events.of(RunResumed)) == 3
    assert len(session.events.of(RunPaused)) == 4
    session.stop()
    session.wait(10)
    controls.handle({"do": "step", "number": "9"})
    assert "while a run is paused" in controls.report()["landed"][-1]["why"]


def _until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_the_still_picture_shows_samples_and_live_weights(all_on):
    picture = static_html(all_on)
    assert len(picture) < 150_000
    assert 'aria-label="samples over training steps"' in picture
    assert 'aria-label="live weights over training steps"' in picture
    assert "samples over training steps" not in static_html(told())


@pytest.mark.parametrize("num_layers", [3, 60])
def test_the_still_picture_stays_small(num_layers):
    session = told(num_layers)
    for step in range(1401):
        session.history.sieve.append(step=step, kept=80 + step % 7, waiting=20, discarded=0)
        for layer in range(num_layers):
            session.history.sparsity.append(step=step, layer=layer, density=0.2 + 0.01 * (step % 5))
    assert len(static_html(session)) < 150_000


def test_a_watched_run_with_everything_on_is_the_same_training():
    """Sheets, pictures, what-if answers and frames are made from another thread while it trains."""

    def make():
        return small(
            epochs=6, freeze=lab.Plasticity(interval_steps=2, window=6, patience=5, tolerance=0.3, reference="fp32"),
            sieve=CirculantSieve(fraction=0.25, interval_epochs=1), sparsity=lab.MEST(sparsity=0.8),
        )  # fmt: skip

    plain, watched = make(), make()
    outlet = Outlet()
    publisher = Publisher(Feed(watched), Controls(watched), outlet, rate_hz=4)
    page = Page(publisher.receive)
    publisher.start()
    page.say("hello")
    watched.start()
    asked = 0
    while watched.state == "running":
        page.say("whatif", number=str(asked), tolerance=0.1 + 0.01 * (asked % 20))
        asked += 1
        if outlet.frames:
            page.acknowledge(outlet.frames[-1][0]["seq"])
        SieveSheet(watched).state()
        time.sleep(0.01)
    watched.wait(20)
    _until(lambda: any("spans" in header["answer"] for header, _ in outlet.other))
    publisher.close()
    plain.run(progress=False)
    assert asked > 5
    assert outlet.traits["sieve"]["kept"] > 0
    for table, column in (
        ("steps", "loss"),
        ("plasticity", "value"),
        ("sieve", "forgetting_events"),
        ("sparsity", "churn"),
    ):
        np.testing.assert_array_equal(plain.history[table][column], watched.history[table][column])
    assert torch.equal(plain.sieve.kept_ids(), watched.sieve.kept_ids())
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
