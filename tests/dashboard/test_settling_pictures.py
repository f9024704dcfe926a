"""Still pictures draw a layer that settles: a narrow bar up to where it freezes, or is trained as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import egeria_lab as lab
from egeria_lab.dashboard.compare_table import measures
from egeria_lab.dashboard.figures import timeline_figure
from egeria_lab.dashboard.series import spans
from egeria_lab.dashboard.static_view import static_html
from egeria_lab.events import LayerFrozen, LayerSettling, LayerThawed, SettlingEnded


@pytest.fixture(scope="module")
def settled() -> Iterator[lab.Session]:
    torch.set_num_threads(1)
    rule = lab.Plasticity(
        interval_steps=2, window=3, patience=2, tolerance=5.0, bootstrap_change=0.5, monitor_budget=1.0,
        reference="fp32", settle_epochs=2.0, freeze_together=True,
    )  # fmt: skip
    session = lab.Session("mlp", "digits", epochs=6, batch_size=64, lr=0.05, scheduler="constant", freeze=rule)
    while not session.layers.frozen:
        session.step()
    session.step(5)
    yield session
    session.close()


def test_a_settling_stretch_ends_where_the_layer_freezes_thaws_or_trains_on() -> None:
    log = [
        LayerSettling(step=3, by="rule", layer="a", epochs=2.0, reason="quiet"),
        LayerSettling(step=4, by="rule", layer="b", epochs=2.0),
        LayerFrozen(step=6, by="rule", layer="a", reason="settled"),
        SettlingEnded(step=7, by="rule", layer="b"),
        LayerSettling(step=8, by="rule", layer="c", epochs=2.0),
        LayerThawed(step=9, by="user", layer="a"),
    ]
    found = [(s.layer, s.start, s.end, s.kind, s.is_frozen) for s in spans(log, 12)]
    assert found == [
        ("a", 3, 6, "settling", False),
        ("b", 4, 7, "settling", False),
        ("a", 6, 9, "rule", True),
        ("c", 8, 12, "settling", False),
    ]


def test_the_plotly_timeline_draws_it_up_to_the_freeze(settled: lab.Session) -> None:
    figure = timeline_figure(settled.history, settled.events, settled.layers)
    (settling,) = [trace for trace in figure.data if trace.name == "settling: trained less and less"]
    (frozen,) = [trace for trace in figure.data if trace.type == "bar" and trace.name == "frozen by the rule"]
    assert settling.base[0] == settled.events.of(LayerSettling)[0].step
    assert settling.base[0] + settling.x[0] == frozen.base[0]
    assert settling.width < frozen.width


def test_pages_without_script_draw_it_and_say_so(settled: lab.Session) -> None:
    assert static_html(settled).count("settling (narrow)") == 1
    plain = lab.Session("mlp", "digits", epochs=1, freeze=None)
    plain.step(3)
    assert "settling" not in static_html(plain)
    both = lab.compare(settled=settled, plain=plain)
    assert "settling (narrow)" in both._repr_html_()
    assert any(trace.name == "settling: trained less and less" for trace in both.figure().data)
    assert "settling" not in lab.compare(plain)._repr_html_()
    plain.close()


def test_what_settles_is_not_counted_as_frozen(settled: lab.Session) -> None:
    begun = [event for event in settled.events if event.step <= settled.events.of(LayerSettling)[-1].step]
    (run,) = lab.compare(settled).runs
    assert measures(run).frozen == len(settled.layers.frozen)
    assert [span.is_frozen for span in spans(begun, 10_000)] == [False] * len(settled.layers.frozen)
