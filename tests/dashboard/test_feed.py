"""Frames, the feed and the publisher: what is sent, when, and what is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pages import Clock, Outlet, Page, told

from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.cost_meter import CostMeter
from egeria_lab.dashboard.feed import Feed, Lanes, status_line
from egeria_lab.dashboard.frames import MOST_ROWS, Part, bounded, pack, stretch_length, thin
from egeria_lab.dashboard.panels import PANELS, columns_needed
from egeria_lab.dashboard.plotly_bundle import packed_plotly
from egeria_lab.dashboard.publisher import GONE_SECONDS, HELLO_SECONDS, PLOTLY_AT, Publisher
from egeria_lab.events import (
    EpochFinished,
    FreezeBlocked,
    LayerFrozen,
    LayerThawed,
    RunPaused,
    SettingChanged,
)


def watched(session, **how):
    """A publisher with a clock that stands still, its outlet, and one page that has said nothing yet."""
    clock, outlet = Clock(), Outlet()
    publisher = Publisher(Feed(session), Controls(session), outlet, clock=clock, **how)
    return publisher, outlet, clock, Page(publisher.receive)


def greeted(session, **how):
    """The same after hello and its answer."""
    publisher, outlet, clock, page = watched(session, **how)
    page.say("hello")
    publisher.tick()
    page.take(*outlet.frames[-1])
    page.acknowledge(outlet.frames[-1][0]["seq"])
    return publisher, outlet, clock, page


def more_steps(session, count):
    for _ in range(count):
        step = session.steps_done + 1
        session.history.steps.append(step=step, loss=1.0 / step, accuracy=0.5, epoch=step / 10)


# -- thinning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "most", "length"), [(0, 1, 1), (99, 100, 1), (100, 100, 2), (100_000, 200, 512)])
def test_stretches_are_powers_of_two(last, most, length):
    assert stretch_length(last, most) == length


def test_thinning_twice_is_thinning_once():
    random = np.random.default_rng(1)
    step, key = np.arange(1.0, 20_001), random.normal(size=20_000)
    group = np.arange(20_000) % 3
    fine = thin(step, key, group, 1024)
    twice = fine[thin(step[fine], key[fine], group[fine], 200)]
    assert twice.tolist() == thin(step, key, group, 200).tolist()


def test_thinning_keeps_extremes_ends_and_every_group():
    step, key, group = np.arange(1000.0), np.zeros(1000), np.repeat([0.0, 1.0], 500)
    key[123], key[777] = 5.0, -5.0
    kept = set(thin(step, key, group, 8).tolist())
    assert {123, 777, 0, 499, 500, 999} <= kept
    assert len(kept) <= 2 * 2 * 8 + 4


def test_thinning_survives_missing_numbers():
    step, key = np.arange(100.0), np.full(100, np.nan)
    assert len(thin(step, key, np.zeros(100), 4))
    key[50] = 1.0
    assert 50 in thin(step, key, np.zeros(100), 4)
    assert len(thin(step[:0], key[:0], np.zeros(0), 4)) == 0


@pytest.mark.parametrize("table", MOST_ROWS)
def test_a_part_is_bounded_whatever_the_history(table):
    count = 4 * MOST_ROWS[table]
    columns = {name: np.arange(float(count)) for name in columns_needed()[table]}
    if "layer" in columns and table != "lanes":
        columns["layer"] = np.arange(count) % 60.0
    part = bounded(Part(table, 0, count, np.arange(float(count)), columns))
    assert len(part.x) <= MOST_ROWS[table] + 120
    assert part.count == count


def test_the_wire_carries_float64_steps_and_float32_columns_and_no_lists_of_numbers():
    header, buffers = pack([Part("steps", 0, 3, np.arange(3), {"loss": np.arange(3), "accuracy": np.ones(3)})], 1)
    assert [len(buffer) for buffer in buffers] == [3 * 8, 2 * 3 * 4]
    assert all(isinstance(buffer, bytes) for buffer in buffers)
    assert not any(isinstance(value, list) and any(isinstance(x, (int, float)) for x in value)
                   for part in header["parts"] for value in part.values())  # fmt: skip
    assert json.loads(json.dumps(header)) == header


# -- feed -----------------------------------------------------------------------------------------------


def test_every_panel_names_columns_that_the_feed_can_send():
    parts = {part.table: part for part in Feed(told()).full()}
    for panel in PANELS:
        for table, columns in panel.needs.items():
            assert set(columns) <= set(parts[table].columns)


def test_deltas_hold_exactly_what_is_new():
    session = told()
    feed = Feed(session)
    feed.full()
    assert feed.delta() == []
    more_steps(session, 3)
    session.events.append(LayerThawed(step=1, by="user", layer="layers.0", reason="asked for"))
    lanes, steps = sorted(feed.delta(), key=lambda part: part.table)
    assert (steps.start, steps.count, len(steps.x)) == (1400, 1403, 3)
    assert lanes.notes == ["asked for"]
    assert feed.delta() == []


def test_means_are_the_same_in_a_delta_and_in_a_full_frame():
    session = told()
    feed = Feed(session)
    feed.full()
    more_steps(session, 70)
    (delta,) = feed.delta()
    (full,) = [part for part in Feed(session).full() if part.table == "steps"]
    assert delta.columns["loss_mean"] == pytest.approx(full.columns["loss_mean"][-70:])
    assert delta.columns["loss_mean"][-1] == pytest.approx(np.mean(session.history.steps["loss"][-20:]))


def test_lanes_tell_rule_from_hand_and_layers_from_the_run():
    lanes = Lanes(["a", "b"])
    lanes.take([
        LayerFrozen(step=1, by="rule", layer="b", slope=1e-9, tolerance=2e-9, reason="slope < tolerance"),
        LayerFrozen(step=2, by="dashboard", layer="a", reason="asked for"),
        SettingChanged(step=3, by="user", name="freeze.tolerance", old=0.2, new=0.3),
        EpochFinished(step=4, epoch=1, train_loss=1, train_accuracy=1, valid_loss=1, valid_accuracy=1),
    ])  # fmt: skip
    rows = lanes.table.rows()
    assert rows["layer"].tolist() == [1, 0, -1]
    assert rows["by"].tolist() == [0, 1, 1]
    assert rows["slope"][0] == 1e-9
    assert lanes.notes[2] == "freeze.tolerance: 0.2 → 0.3 (by user)"


def test_the_last_events_are_told_in_words_without_epochs_and_without_repeats():
    session = told()
    for step in range(20):
        session.events.append(FreezeBlocked(step=step, by="rule", layer="layers.3", reason="it is pinned"))
        session.events.append(
            EpochFinished(step=step, epoch=1, train_loss=1, train_accuracy=1, valid_loss=1, valid_accuracy=1)
        )
    words = Feed(session).state()["words"]
    assert len(words) == 8
    assert [word["kind"] for word in words].count("FreezeBlocked") == 1
    assert words[-1]["text"] == "layers.3 would freeze, but it is pinned"


def test_the_line_of_state():
    session = told(steps=420, per_epoch=78)
    session.planned_steps = 1560
    line = status_line(session, 2, 5)
    assert line.startswith("step 420 of 1,560, epoch 5.4, loss ")
    assert line.endswith(", 2 of 5 layers frozen")


def test_savings_say_what_watching_costs():
    ledger = Feed(told()).ledger(0.004)
    assert ledger["watching"].startswith("monitoring ")
    assert ledger["watching"].endswith("%, dashboard 0.4 %")
    assert len(ledger["rows"]) == 3
    assert all({"theoretical", "measured", "why"} <= set(row) for row in ledger["rows"])


# -- publisher ------------------------------------------------------------------------------------------


def test_nothing_is_sent_before_somebody_looks():
    session = told()
    publisher, outlet, clock, _ = watched(session)
    for _ in range(50):
        more_steps(session, 10)
        clock.now += 1
        delay = publisher.tick()
    assert outlet.frames == []
    assert delay is None  # asleep until woken


def test_hello_is_answered_by_one_full_frame_and_then_deltas():
    session = told()
    publisher, outlet, clock, page = greeted(session)
    assert outlet.frames[-1][0]["full"]
    assert page.count == {"steps": 1400, "epochs": 10, "plasticity": len(session.history.plasticity),
                          "lanes": len(page.step["lanes"]), "sieve": 0, "sparsity": 0}  # fmt: skip
    more_steps(session, 5)
    clock.now += 0.6
    publisher.tick()
    header, buffers = outlet.frames[-1]
    assert not header["full"]
    assert sum(map(len, buffers)) == 5 * (8 + 7 * 4)
    assert page.take(header, buffers)
    assert page.count["steps"] == 1405


def test_a_late_view_and_one_that_followed_hold_the_same():
    session = told()
    publisher, outlet, clock, first = greeted(session)
    for _ in range(20):
        more_steps(session, 7)
        clock.now += 1
        publisher.tick()
        first.take(*outlet.frames[-1])
        first.acknowledge(outlet.frames[-1][0]["seq"])
    second = Page(publisher.receive, "second")
    second.say("hello")
    publisher.tick()
    second.take(*outlet.frames[-1])
    for table, step in first.step.items():
        np.testing.assert_array_equal(step, second.step[table])
        for name, column in first.columns[table].items():
            np.testing.assert_allclose(column, second.columns[table][name], rtol=1e-6)


def test_after_an_undo_the_page_holds_what_a_fresh_one_would():
    session = told()
    publisher, outlet, clock, page = greeted(session)
    tables, events = session.history.state_dict(), session.events.state_dict()

    def look():
        clock.now += 1
        publisher.tick()
        page.take(*outlet.frames[-1])
        page.acknowledge(outlet.frames[-1][0]["seq"])

    more_steps(session, 30)
    session.events.append(LayerFrozen(step=1, by="user", layer="layers.0", reason="asked for"))
    look()
    session.history.load_state_dict(tables)
    session.events.load_state_dict(events)
    more_steps(session, 5)
    look()
    late = greeted(session)[3]
    assert page.count == late.count
    for table, step in page.step.items():
        np.testing.assert_array_equal(step, late.step[table])
    more_steps(session, 2)
    look()
    assert page.count["steps"] == late.count["steps"] + 2


def test_a_page_that_missed_a_frame_asks_and_is_made_whole():
    session = told()
    publisher, outlet, clock, page = greeted(session)
    for _ in range(2):
        more_steps(session, 4)
        clock.now += 1
        publisher.tick()
        page.acknowledge(outlet.frames[-1][0]["seq"])
    assert not page.take(*outlet.frames[-1])  # the one before was lost
    publisher.tick()
    assert page.take(*outlet.frames[-1])
    assert page.count["steps"] == 1408


def test_never_more_than_one_unanswered_frame_and_what_came_meanwhile_is_merged():
    session = told()
    publisher, outlet, clock, page = greeted(session)
    before = len(outlet.frames)
    for _ in range(15):  # 1.5 s without an answer
        more_steps(session, 2)
        clock.now += 0.1
        publisher.tick()
    assert len(outlet.frames) == before + 1
    page.acknowledge(outlet.frames[-1][0]["seq"])
    clock.now += 0.5
    publisher.tick()
    assert len(outlet.frames) == before + 2
    assert outlet.frames[-1][0]["parts"][0]["count"] == session.steps_done


def test_a_slow_page_gets_fewer_frames():
    session = told()
    publisher, outlet, clock, page = greeted(session)
    page.acknowledge(outlet.frames[-1][0]["seq"], draw_ms=500)
    before = len(outlet.frames)
    for _ in range(60):  # 6 s
        more_steps(session, 1)
        clock.now += 0.1
        publisher.tick()
        page.acknowledge(outlet.frames[-1][0]["seq"], draw_ms=500)
    assert 2 <= len(outlet.frames) - before <= 3


def test_a_page_that_draws_slowly_still_hears_at_once_what_happened():
    session = told()
    publisher, outlet, clock, page = greeted(session)

    def seconds_to_the_next_frame(event):
        page.acknowledge(outlet.frames[-1][0]["seq"], draw_ms=62)
        clock.now += 0.05
        publisher.tick()  # hears the answer
        before, start = len(outlet.frames), clock.now
        if event is not None:
            session.events.append(event)
        while len(outlet.frames) == before:
            more_steps(session, 1)
            clock.now += 0.05
            publisher.tick()
        return clock.now - start

    seconds_to_the_next_frame(None)
    assert seconds_to_the_next_frame(None) > 0.9
    assert seconds_to_the_next_frame(LayerFrozen(step=1, by="rule", layer="layers.0", reason="stable")) < 0.35
    assert seconds_to_the_next_frame(None) > 0.9
    assert (
        seconds_to_the_next_frame(SettingChanged(step=2, by="user", name="freeze.tolerance", old=0.2, new=0.3)) < 0.35
    )


@pytest.mark.parametrize("leave", ["hide", "bye", "vanish"])
def test_silence_when_all_are_hidden_or_gone(leave):
    session = told()
    publisher, outlet, clock, page = greeted(session)
    if leave != "vanish":
        page.say("view" if leave == "hide" else "bye", visible=False)
    for _ in range(int(3 * GONE_SECONDS)):
        more_steps(session, 1)
        clock.now += 1
        publisher.tick()
    sent = len(outlet.frames)
    assert sent <= (1 if leave != "vanish" else GONE_SECONDS + 3)
    for _ in range(30):
        more_steps(session, 1)
        clock.now += 1
        assert publisher.tick() is None
    assert len(outlet.frames) == sent
    page.say("view", visible=True)
    publisher.tick()
    assert len(outlet.frames) == sent + 1
    counts = {part["table"]: part["count"] for part in outlet.frames[-1][0]["parts"]}
    assert counts["steps"] == session.steps_done


def test_a_long_absence_is_caught_up_by_one_bounded_frame():
    session = told()
    publisher, outlet, clock, page = greeted(session)
    page.say("view", visible=False)
    publisher.tick()
    more_steps(session, 30_000)
    page.say("view", visible=True)
    clock.now += 1
    publisher.tick()
    assert sum(map(len, outlet.frames[-1][1])) < 110_000
    assert page.take(*outlet.frames[-1])
    assert page.count["steps"] == 31_400


def test_a_page_that_loses_buffers_gets_the_same_as_text():
    session = told()
    publisher, outlet, _, page = watched(session)
    page.say("hello", as_text=True)
    publisher.tick()
    header, buffers = outlet.frames[-1]
    assert buffers == []
    json.dumps(header)
    assert page.take(header, buffers)
    np.testing.assert_allclose(page.columns["steps"]["loss"], session.history.steps["loss"], rtol=1e-6)


def test_plotly_is_sent_once_asked_for_and_is_gzip():
    publisher, outlet, _, page = watched(told())
    publisher.tick()
    assert outlet.other == []
    page.say("plotly")
    publisher.tick()
    ((header, (blob,)),) = outlet.other
    assert header == {"kind": "plotly"}
    assert blob == packed_plotly()
    assert blob[:2] == b"\x1f\x8b"
    assert len(blob) < 2_000_000


def test_a_pause_leaves_a_picture_even_when_nobody_looks():
    session = told()
    session.state = "running"
    publisher, outlet, clock, _ = watched(session)
    publisher.tick()
    assert outlet.rested == []
    session.state = "paused"
    session.events.append(RunPaused(step=1400, by="user"))
    clock.now += 0.3
    publisher.tick()
    assert outlet.rested == ["paused"]
    assert outlet.traits["status"]["state"] == "paused"
    clock.now += 0.3
    publisher.tick()
    assert outlet.rested == ["paused"]  # once a rest


def test_events_wake_nobody_while_nobody_looks():
    session = told()
    publisher, _, _, page = watched(session)
    session.events.append(LayerThawed(step=1, by="user", layer="layers.0"))
    assert not publisher._wake.is_set()
    page.say("hello")
    publisher.tick()
    publisher._wake.clear()
    session.events.append(LayerThawed(step=1, by="user", layer="layers.0"))
    assert publisher._wake.is_set()


def test_cost_counts_only_while_training_runs():
    meter = CostMeter()
    meter.note(False)
    meter.note(False)
    assert meter.fraction is None
    meter.note(True)
    sum(i * i for i in range(200_000))
    meter.note(True)
    assert 0 < meter.fraction <= 1.5


def test_a_view_that_cannot_say_hello_is_talked_to_all_the_same():
    """As after "Run all cells" with a cell that waits for the training: what a page says is heard only at its end."""
    session = told()
    publisher, outlet, clock, page = watched(session)
    publisher.shown()
    publisher.tick()
    assert outlet.frames == []  # it may still say hello
    clock.now += HELLO_SECONDS + 0.1
    for _ in range(80):  # twenty seconds
        more_steps(session, 1)
        publisher.tick()
        clock.now += 0.25
    assert 15 <= len(outlet.frames) <= 21
    assert all(header["full"] for header, _ in outlet.frames)
    assert [header["kind"] for header, _ in outlet.other].count("plotly") == len(PLOTLY_AT)
    assert page.take(*outlet.frames[-1])  # whichever comes first is whole
    page.say("hello")
    publisher.tick()
    page.take(*outlet.frames[-1])
    page.acknowledge(outlet.frames[-1][0]["seq"])
    before = len(outlet.frames)
    for _ in range(8):
        more_steps(session, 1)
        clock.now += 0.5
        publisher.tick()
        page.acknowledge(outlet.frames[-1][0]["seq"])
    assert len(outlet.frames) > before
    assert not any(header["full"] for header, _ in outlet.frames[before:])


def test_a_view_that_never_speaks_is_given_up():
    session = told()
    publisher, outlet, clock, _ = watched(session)
    publisher.shown()
    clock.now += HELLO_SECONDS + GONE_SECONDS + 0.1
    publisher.tick()
    assert outlet.frames == []
    assert publisher.tick() is None
