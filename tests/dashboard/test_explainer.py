"""The attribution panel's answers: what the session's own call says, only at rest, off the talking thread."""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from pages import Clock, Outlet, Page, told

import egeria_lab as lab
from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.explainer import METHODS, MOST_RECORDS, MOST_SAMPLES, RUNNING, Explainer
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.heat import AGAINST, FOR, MOST_BARS, bars, heat_over
from egeria_lab.dashboard.panels import describe
from egeria_lab.dashboard.publisher import Publisher
from egeria_lab.interpret import METHODS as KNOWN


def made(**how: Any) -> lab.Session:
    torch.set_num_threads(1)
    return lab.Session("mlp", "digits", **{"epochs": 400, "lr": 0.05, "seed": 0, "freeze": None, **how})


@pytest.fixture(scope="module")
def stepped() -> lab.Session:
    session = made()
    session.step(5)
    session.freeze("layers.0")
    session.step(5)
    return session


def pixels(address: str) -> np.ndarray:
    """RGB of a picture in an address."""
    data = base64.b64decode(address.partition(",")[2])
    size = [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)]
    start = data.index(b"IDAT") + 4
    raw = np.frombuffer(zlib.decompress(data[start : data.index(b"IEND") - 8]), np.uint8)
    return raw.reshape(size[1], -1)[:, 1:].reshape(size[1], size[0], 3)


def test_the_page_offers_the_methods_that_there_are() -> None:
    assert METHODS == KNOWN
    assert next(row for row in describe() if row["key"] == "attribution")["choices"] == list(KNOWN)


def test_the_layers_are_those_of_the_session_s_own_call(stepped: lab.Session) -> None:
    answer = Explainer(stepped).answer({"ids": [3, 17], "method": "saliency"})
    found = stepped.attribute([3, 17], method="saliency")
    assert [(row["name"], row["state"]) for row in answer["layers"]] == [(r.name, r.state) for r in found.layers]
    assert [row["mean_abs"] for row in answer["layers"]] == pytest.approx([r.mean_abs for r in found.layers], rel=1e-3)
    assert [row["since"] for row in answer["layers"]] == [5, None, None, None]
    assert [item["class"] for item in answer["items"]] == [str(int(t)) for t in found.targets]
    assert answer["step"] == stepped.steps_done
    assert len(json.dumps(answer)) < 60_000


def test_the_greatest_attribution_is_where_the_colour_is(stepped: lab.Session) -> None:
    answer = Explainer(stepped).answer({"ids": [3], "method": "integrated_gradients"})
    plane = stepped.attribute([3], method="integrated_gradients").maps[0, 0].numpy()
    heat, plain = (pixels(answer["items"][0][name]).astype(int) for name in ("heat", "picture"))
    assert (np.ptp(plain, axis=2) == 0).all()  # the picture itself is grey
    colour = np.ptp(heat, axis=2)
    assert np.unravel_index(colour.argmax(), colour.shape) == np.unravel_index(np.abs(plane).argmax(), plane.shape)
    strongest = np.unravel_index(np.abs(plane).argmax(), plane.shape)
    wanted = np.array(FOR if plane[strongest] > 0 else AGAINST)
    assert np.abs(heat[strongest] - wanted).max() < 25


def test_heat_keeps_place_and_sign() -> None:
    values = np.array([[1, 0], [0, -1]], np.float32)
    found = pixels(heat_over(np.zeros((8, 8), np.float32), values)).astype(int)
    assert found[0, 0, 0] > found[0, 0, 2]  # orange
    assert found[7, 7, 2] > found[7, 7, 0]  # blue
    assert np.ptp(found[0, 7]) == 0
    assert len(bars(np.arange(50, dtype=np.float32), [str(i) for i in range(50)])) == MOST_BARS


def test_a_layer_s_output_and_tables_are_bars(stepped: lab.Session) -> None:
    answer = Explainer(stepped).answer({"ids": [3], "method": "layer_conductance", "layer": "layers.1"})
    values = stepped.attribute([3], method="layer_conductance", layer="layers.1").maps[0].reshape(-1)
    name, greatest = answer["items"][0]["bars"][0]
    assert name == f"unit {int(values.abs().argmax())}"
    assert greatest == pytest.approx(float(values[values.abs().argmax()]), rel=1e-3)
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 5), torch.arange(40) % 2
    table = torch.utils.data.TensorDataset(inputs, labels)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    session = lab.Session(model, (table, table), epochs=1, batch_size=8, freeze=None)
    session.step()
    shown = Explainer(session).answer({"ids": [0], "method": "input_x_gradient"})["items"][0]["bars"]
    assert [name for name, _ in shown] == [f"feature {i}" for i in range(5)]


def test_tokens_are_named() -> None:
    session = lab.Session("transformer", "python-docs", epochs=0.01, freeze=None)
    names = session.layers.names
    explainer = Explainer(session)
    wish = {"ids": [1], "method": "integrated_gradients", "layer": names[0]}
    shown = explainer.answer(wish)["items"][0]["bars"]
    ids, _ = session.sieve.batch([1])
    assert all(word == f"{int(word.split(':')[0])}: {session.data.tokens[int(ids[0, int(word.split(':')[0])])]!r}"
               for word, _ in shown)  # fmt: skip
    assert "say layer=" in explainer.answer({**wish, "layer": None})["problem"]


def test_drift_since_the_first_look_and_an_undo_forgets_what_was_never_made() -> None:
    session = made()
    session.step(4)
    explainer, wish = Explainer(session), {"ids": [3], "method": "saliency"}
    assert explainer.answer(wish)["drift"] is None
    before = session.attribute([3], method="saliency")
    session.pin("layers.0")
    session.step(4)
    drift = explainer.answer(wish)["drift"]
    rows = session.attribute([3], method="saliency").drift_since(before).rows
    assert (drift["since"], drift["why"]) == (4, "")
    assert drift["maps"]["relative_l2"] == pytest.approx(rows[0].relative_l2, rel=1e-3)
    assert {n: row["cosine"] for n, row in drift["layers"].items()} == pytest.approx(
        {row.name: row.cosine for row in rows[1:]}, rel=1e-3
    )
    late = {"ids": [4], "method": "saliency"}
    explainer.answer(late)  # at step 8
    session.undo()
    assert session.steps_done == 4
    session.step(5)
    assert explainer.answer(late)["drift"] is None
    assert explainer.answer(wish)["drift"]["since"] == 4
    for i in range(2 * MOST_RECORDS):
        explainer.answer({"ids": [i], "method": "saliency"})
    assert len(explainer._records) == MOST_RECORDS


def test_drift_since_the_last_freeze_also_of_samples_that_nobody_looked_at_then() -> None:
    session, twin = made(), made()
    explainer, wish = Explainer(session), {"ids": [3], "method": "saliency"}
    for one in (session, twin):
        one.step(3)
        one.freeze("layers.0")
        one.step(2)
        one.freeze("layers.1")
    before = session.attribute([3], method="saliency")  # at step 5, where the second one freezes
    for one in (session, twin):
        one.step(4)
    drift = explainer.answer(wish)["drift"]
    assert (drift["since"], drift["why"]) == (5, "layers.1 froze")
    rows = session.attribute([3], method="saliency").drift_since(before).rows
    assert drift["maps"]["relative_l2"] == pytest.approx(rows[0].relative_l2, rel=1e-3) != 0
    weights, others = session.export().state_dict, twin.export().state_dict
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert session.step(3).loss == twin.step(3).loss
    session.undo()
    session.step(1)
    assert explainer.answer(wish)["drift"]["why"] == "layers.0 froze"
    with pytest.raises(lab.InvalidSettingError, match=r"not one of this model: .*size mismatch"):
        session.attribute([3], method="saliency", state={n: torch.zeros(1) for n in weights})
    assert session.step(1).loss == session.history.steps["loss"][-1]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"ids": [], "method": "saliency"}, f"1 to {MOST_SAMPLES} sample ids"),
        ({"ids": [0.5], "method": "saliency"}, "whole numbers"),
        ({"ids": [None], "method": "saliency"}, "whole numbers"),
        ({"ids": list(range(9)), "method": "saliency"}, "1 to 8"),
        ({"ids": [10**6], "method": "saliency"}, "no sample 1000000"),
        ({"ids": [1], "method": "magic"}, "Unknown attribution method 'magic'"),
        ({"ids": [1], "method": "layer_gradcam", "layer": "layers.1"}, "needs a layer that puts out images"),
        ({"ids": [1], "method": "saliency", "layer": "nowhere"}, "Unknown layer"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(stepped: lab.Session, wish: dict[str, Any], words: str) -> None:
    answer = Explainer(stepped).answer(wish)
    assert list(answer) == ["problem"]
    assert words in answer["problem"]
    assert "\n" not in answer["problem"]


def test_a_fault_in_the_user_s_model_is_told() -> None:
    session = made()
    session.attribute = lambda *_, **__: 1 / 0
    assert "ZeroDivisionError" in Explainer(session).answer({"ids": [1], "method": "saliency"})["problem"]
    assert "cannot be asked" in Explainer(told()).answer({"ids": [1], "method": "saliency"})["problem"]


def test_while_the_run_trains_it_refuses_and_at_rest_it_answers() -> None:
    session = made()
    explainer, wish = Explainer(session), {"ids": [1], "method": "saliency"}
    session.start()
    assert explainer.answer(wish) == {"problem": RUNNING}
    session.pause()
    while session.state != "paused":
        time.sleep(0.01)
    assert "items" in explainer.answer(wish)
    session.close()


def test_explaining_changes_nothing_in_the_run() -> None:
    plain, seen = made(), made()
    plain.step(12)
    explainer = Explainer(seen)
    for _ in range(3):
        seen.step(4)
        assert "items" in explainer.answer({"ids": [1, 2], "method": "gradient_shap"})
    assert plain.history.steps["loss"].tolist() == seen.history.steps["loss"].tolist()


def test_it_works_beside_the_talking_thread_and_answers_through_it() -> None:
    session = made()
    session.step(3)
    gate, threads = threading.Event(), []
    own = session.attribute

    def slow(*given: Any, **how: Any) -> Any:
        threads.append(threading.current_thread())
        assert gate.wait(20)
        return own(*given, **how)

    session.attribute = slow
    outlet, clock = Outlet(), Clock()
    publisher = Publisher(Feed(session), Controls(session), outlet, clock=clock)
    page = Page(publisher.receive)
    page.say("hello")
    page.say("attribute", number="7", ids=[3], method="saliency", layer=None)
    publisher.tick()
    assert len(outlet.frames) == 1  # the page gets its frame while the model is looked at
    page.say("attribute", number="8", ids=[4], method="saliency", layer=None)
    page.say("attribute", number="9", ids=[5], method="saliency", layer=None)
    publisher.tick()
    assert outlet.other == []
    gate.set()
    end = time.monotonic() + 20
    while len(outlet.other) < 2 and time.monotonic() < end:
        publisher.tick()
        time.sleep(0.01)
    told_ = [content for content, _ in outlet.other]
    assert [(c["kind"], c["view"], c["number"]) for c in told_] == [
        ("explained", "page", "7"),
        ("explained", "page", "9"),
    ]
    assert told_[0]["answer"]["items"][0]["id"] == 3
    assert threading.current_thread() not in threads
    publisher.close()
