"""Figures from constructed histories: what is drawn, what is not joined, what is said of nothing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import plotly.io as pio
import pytest
from fakes import FakeLayer, FakeSession, empty_session, told_session

from egeria_lab.dashboard.figure_style import THEMES
from egeria_lab.dashboard.figures import (
    learning_figure,
    plasticity_figure,
    savings_figure,
    savings_over_time_figure,
    style_plots,
    timeline_figure,
)
from egeria_lab.dashboard.series import X_AXES
from egeria_lab.errors import UnknownNameError
from egeria_lab.events import BootstrapFinished, LayerFrozen, SettingChanged
from egeria_lab.history import History


def all_figures(session: FakeSession, x: str = "steps") -> dict[str, go.Figure]:
    history, events, layers = session.history, session.events, session.layers
    return {
        "learning": learning_figure(history, events, x=x),
        "plasticity": plasticity_figure(history, events, layers, x=x),
        "timeline": timeline_figure(history, events, layers, x=x),
        "savings": savings_figure(session.savings().to_dict()),
        "over time": savings_over_time_figure(history, x=x),
    }


def traces(figure: go.Figure, name: str) -> list[go.Scatter]:
    return [trace for trace in figure.data if trace.name == name]


def small_history(values: list[list[float]], generations: list[int]) -> History:
    """One layer's readings in each inner list, every ten steps."""
    history = History([f"layers.{i}" for i in range(len(values))])
    for position, generation in enumerate(generations):
        step = 10 * (position + 1)
        history.steps.append(step=step, loss=1.0, accuracy=0.5, epoch=step / 100)
        for layer, series in enumerate(values):
            history.plasticity.append(
                step=step, layer=layer, value=series[position], smoothed=series[position],
                slope=1e-6, tolerance=2e-6, verdict=2, generation=generation,
            )  # fmt: skip
    return history


ROWS = [FakeLayer("layers.0", "stem"), FakeLayer("layers.1", "head")]


@pytest.mark.parametrize("num_layers", [3, 5, 12, 13, 60])
def test_every_trace_stays_small_and_none_needs_webgl(num_layers: int) -> None:
    session = told_session(num_layers, steps=3000, per_epoch=3)
    for figure in all_figures(session).values():
        assert figure.layout.title.text
        for trace in figure.data:
            assert trace.type in ("scatter", "bar", "heatmap")
            if trace.type == "heatmap":
                assert trace.z.shape[0] == num_layers
                assert trace.z.shape[1] <= 300
            else:
                assert len(trace.x) <= 1000


@pytest.mark.parametrize("x", X_AXES)
def test_every_x_axis_is_named_with_its_unit(x: str) -> None:
    figures = all_figures(told_session(3, steps=300, per_epoch=30), x)
    for name in ("learning", "plasticity", "timeline", "over time"):
        titles = [axis.title.text for axis in figures[name].select_xaxes()]
        assert X_AXES[x] in titles, name


def test_the_tolerance_is_drawn_where_ratio_is_one() -> None:
    history = small_history([[1e-4] * 4, [1e-5] * 4], [0] * 4)
    figure = plasticity_figure(history, [], ROWS)
    (line,) = traces(figure, "tolerance")
    assert list(line.y) == [1.0, 1.0]
    above, below = traces(figure, "layers.0 · stem")
    assert list(above.y) == [1e-4] * 4
    assert list(below.y) == pytest.approx([0.5] * 4)


def test_readings_of_two_references_are_not_joined() -> None:
    history = small_history([[1e-4, 2e-4, 3e-4, 4e-4]], [0, 0, 1, 1])
    above, _ = traces(plasticity_figure(history, [], ROWS[:1]), "layers.0 · stem")
    np.testing.assert_equal(np.array(above.y), [1e-4, 2e-4, np.nan, 3e-4, 4e-4])
    assert above.connectgaps is False


def test_a_reading_of_zero_is_drawn_at_the_clamp() -> None:
    history = small_history([[0.0, 1e-5]], [0, 0])
    figure = plasticity_figure(history, [], ROWS[:1])
    assert min(traces(figure, "layers.0 · stem")[0].y) == 1e-12
    assert min(10 ** axis.range[0] for axis in figure.select_yaxes()) > 1e-12


def test_a_reading_on_its_own_has_a_marker() -> None:
    history = small_history([[1e-4] * 25], [0] * 12 + [1] + [2] * 12)
    lone = [t for t in traces(plasticity_figure(history, [], ROWS[:1]), "layers.0 · stem") if t.mode == "markers"]
    assert [list(trace.x) for trace in lone] == [[130.0], [130.0]]


def test_a_moved_tolerance_is_marked() -> None:
    history = small_history([[1e-4] * 4], [0] * 4)
    moved = SettingChanged(step=20, by="dashboard", name="freeze.tolerance", old=0.2, new=0.35)
    (mark,) = traces(plasticity_figure(history, [moved], ROWS[:1]), "tolerance changed")
    assert list(mark.x) == [20.0]
    assert "0.2 → 0.35" in mark.text[0]


def test_before_the_tolerance_is_tuned_the_figure_says_so() -> None:
    history = History(["layers.0"])
    history.plasticity.append(step=10, layer=0, value=1e-4, smoothed=1e-4, verdict=0, generation=0)
    figure = plasticity_figure(history, [], ROWS[:1])
    assert "tolerance not tuned yet" in figure.layout.annotations[0].text


def test_no_two_of_twelve_layers_look_alike() -> None:
    history = small_history([[1e-4, 1e-4]] * 12, [0, 0])
    figure = plasticity_figure(history, [], [FakeLayer(f"layers.{i}", "") for i in range(12)])
    looks = {(t.line.color, t.line.dash) for t in figure.data if str(t.name).startswith("layers.")}
    shapes = {t.marker.symbol for t in figure.data if str(t.name).startswith("layers.")}
    assert len(looks) == len(shapes) == 12


def test_many_layers_become_a_heat_map_with_the_freezes_marked() -> None:
    session = told_session(60, steps=600)
    figure = plasticity_figure(session.history, session.events, session.layers)
    assert [trace.type for trace in figure.data].count("heatmap") == 2
    frozen = session.events.of(LayerFrozen)
    drawn = sum(len(t.x) for t in figure.data if t.name in ("frozen by the rule", "frozen by hand"))
    assert drawn == 2 * len(frozen)
    assert len(frozen) > 0


def test_the_timeline_shows_who_froze_from_when_to_when() -> None:
    session = told_session(5)
    figure = timeline_figure(session.history, session.events, session.layers)
    (hand,) = [t for t in figure.data if t.type == "bar" and t.name == "frozen by hand"]
    assert (list(hand.base), list(hand.x), list(hand.y)) == ([504], [1400 - 504], [2])
    assert hand.marker.pattern.shape == "/"
    (rule,) = [t for t in figure.data if t.type == "bar" and t.name == "frozen by the rule"]
    assert rule.marker.pattern.shape == ""
    assert sorted(rule.y) == [0, 0, 1]  # layer 0 was thawed and froze again
    (pin,) = [t for t in figure.data if t.type == "bar" and t.name.startswith("pinned")]
    assert (list(pin.y), list(pin.base)) == ([3], [350])
    (edge,) = traces(figure, "bootstrapping ends")
    assert edge.x[0] == session.events.of(BootstrapFinished)[0].step


def test_the_timeline_says_while_bootstrapping() -> None:
    history = small_history([[1e-4] * 3], [0] * 3)
    figure = timeline_figure(history, [], ROWS[:1])
    assert traces(figure, "still bootstrapping: no rule freezes yet")


def test_learning_marks_every_freeze_and_thaw() -> None:
    session = told_session(5)
    figure = learning_figure(session.history, session.events)
    by_rule = [e.step for e in session.events.of(LayerFrozen) if e.by == "rule"]
    (mark,) = traces(figure, "frozen by the rule")
    assert list(mark.x) == by_rule
    assert len(traces(figure, "thawed")[0].x) == 1
    assert mark.marker.symbol != traces(figure, "frozen by hand")[0].marker.symbol or (
        mark.marker.color != traces(figure, "frozen by hand")[0].marker.color
    )


def test_accuracy_is_in_per_cent() -> None:
    history = small_history([[1e-4] * 3], [0] * 3)
    figure = learning_figure(history, [])
    assert any(list(trace.y) == [50.0] * 3 for trace in figure.data)


def test_savings_show_theory_and_measurement_and_cost_to_the_left() -> None:
    ledger = {
        "flops": {"saved_fraction": 0.25, "why": ""},
        "time": {"predicted_saved_fraction": 0.2, "measured_saved_fraction": -0.1, "monitor_fraction": 0.03},
        "memory": {"saved_fraction": 0.0, "theoretical_saved_fraction": 0.5, "why": "they lie behind"},
    }
    theory, measured = savings_figure(ledger).data
    assert list(theory.x) == [25, 20, 50, None]
    assert list(measured.x) == [None, -10, 0, -3]
    assert "they lie behind" in measured.customdata[2]
    assert theory.marker.pattern.shape != measured.marker.pattern.shape


def test_savings_over_time_in_per_cent() -> None:
    history = History(["layers.0"])
    history.savings.append(step=10, flops_saved_fraction=0.25, saved_tensor_bytes=50, full_saved_tensor_bytes=200)
    lines = {line.name: list(line.y) for line in savings_over_time_figure(history).data}
    assert lines == {"computation, theoretical": [25.0], "memory for backward, measured": [75.0]}


def test_an_empty_history_says_what_it_waits_for() -> None:
    said = {name: f.layout.annotations[0].text for name, f in all_figures(empty_session()).items()}
    assert said.pop("plasticity") == "no reading yet: bootstrapping until the loss settles"
    assert all(sentence.startswith("no step yet") for sentence in said.values())


def test_a_hostile_layer_name_stays_text() -> None:
    history = History(["<b>x</b>"])
    history.plasticity.append(step=10, layer=0, value=1e-4, smoothed=1e-4, verdict=0, generation=0)
    figure = plasticity_figure(history, [], [FakeLayer("<b>x</b>", "")])
    assert "&lt;b&gt;x&lt;/b&gt;" in {trace.name for trace in figure.data}


@pytest.mark.parametrize("wrong", [{"x": "hours"}, {"theme": "pink"}])
def test_unknown_axis_and_theme_are_named(wrong: dict[str, str]) -> None:
    session = told_session(3, steps=200)
    with pytest.raises(UnknownNameError, match=r"Known: "):
        plasticity_figure(session.history, session.events, session.layers, **wrong)


def test_loss_that_is_not_a_number_leaves_the_rest_drawn() -> None:
    history = small_history([[1e-4] * 3], [0] * 3)
    history.steps.append(step=40, loss=float("nan"), accuracy=0.5)
    figure = learning_figure(history, [])
    assert any(list(trace.y) == [1.0] * 3 for trace in figure.data)


def test_figures_load_no_widget_library() -> None:
    code = "import sys, egeria_lab.dashboard.figures\n"
    code += "print([m for m in ('ipywidgets', 'anywidget') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_plots_of_ones_own_can_be_styled_for_a_light_and_a_dark_notebook(theme: str) -> None:
    before = pio.templates.default
    try:
        style_plots(theme)
        template = px.line(x=[1, 2], y=[1, 2]).layout.template.layout
    finally:
        pio.templates.default = before
    assert (template.paper_bgcolor, template.font.color) == (THEMES[theme]["paper"], THEMES[theme]["ink"])
    assert template.xaxis.gridcolor == THEMES[theme]["grid"]


def test_an_unknown_theme_changes_nothing() -> None:
    before = pio.templates.default
    with pytest.raises(UnknownNameError, match="theme"):
        style_plots("blue")
    assert pio.templates.default == before
