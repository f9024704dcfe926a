"""Append-only columns: complete rows for readers of any thread, NaN for what is missing, names where they belong."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from egeria_lab.errors import UnknownNameError
from egeria_lab.history import EPOCH_COLUMNS, PLASTICITY_COLUMNS, STEP_COLUMNS, VERDICTS, History, Table


def test_rows_and_columns() -> None:
    table = Table(["a", "b"])
    assert len(table) == 0
    assert table.last() == {}
    assert table["a"].shape == (0,)
    table.append(a=1, b=2.5)
    table.append(b=3)
    table.append(a=None, b=4)
    assert len(table) == 3
    assert table["b"].tolist() == [2.5, 3, 4]
    assert np.isnan(table["a"]).tolist() == [False, True, True]
    assert table.last()["b"] == 4
    assert {k: v.tolist() for k, v in table.rows(2).items()}["b"] == [4]
    assert table.rows(3)["a"].shape == (0,)
    assert table.frame()["b"].tolist() == [2.5, 3, 4]


def test_growing_keeps_every_row() -> None:
    table = Table(["x", "y"], capacity=2)
    for number in range(1000):
        table.append(x=number, y=-number)
    assert table["x"].tolist() == list(range(1000))
    assert table["y"].tolist() == [-number for number in range(1000)]


def test_views_are_read_only_and_do_not_change_later() -> None:
    table = Table(["x"], capacity=2)
    table.append(x=1)
    view = table["x"]
    with pytest.raises(ValueError, match=r"read-only"):
        view[0] = 5
    for number in range(10):
        table.append(x=number)
    assert view.tolist() == [1]


def test_an_unknown_column_is_refused_and_nothing_is_stored() -> None:
    table = Table(["x"])
    with pytest.raises(KeyError, match=r"no column.*y.*columns: x"):
        table.append(x=1, y=2)
    assert len(table) == 0


def test_a_frame_is_a_copy() -> None:
    table = Table(["x"])
    table.append(x=1)
    frame = table.frame()
    frame.loc[0, "x"] = 9
    assert table["x"].tolist() == [1]


def test_readers_see_complete_rows_while_a_writer_writes() -> None:
    table, stop, wrong = Table(["a", "b", "c"], capacity=4), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            rows = table.rows()
            lengths = {len(column) for column in rows.values()}
            complete = np.array_equal(rows["a"] * 2, rows["b"]) and np.array_equal(rows["a"] * 3, rows["c"])
            if len(lengths) != 1 or not complete:
                wrong.append(lengths)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(20_000):
        table.append(a=number, b=2 * number, c=3 * number)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert table["a"].tolist() == list(range(20_000))


def test_history_has_its_tables() -> None:
    history = History(["front", "head"])
    assert list(history) == ["steps", "plasticity", "epochs", "savings", "rates", "sieve", "sparsity"]
    assert len(history) == 7
    assert history["steps"] is history.steps
    assert {"step", "loss", "learning_rate", "accuracy"} <= set(STEP_COLUMNS)
    assert {"step", "layer", "value", "smoothed", "slope", "tolerance", "verdict"} <= set(PLASTICITY_COLUMNS)
    assert {"epoch", "valid_accuracy"} <= set(EPOCH_COLUMNS)
    assert "plasticity: 0 rows" in repr(history)
    with pytest.raises(UnknownNameError, match=r"Unknown history table 'plastic'. Did you mean 'plasticity'"):
        history.frame("plastic")


def test_frames_spell_names_and_whole_numbers_out() -> None:
    history = History(["front", "head"])
    for position, verdict in enumerate(VERDICTS):
        history.plasticity.append(
            step=10 * position, layer=position % 2, value=1e-6, verdict=VERDICTS.index(verdict), stable=2
        )
    frame = history.frame("plasticity")
    assert frame["verdict"].tolist() == list(VERDICTS)
    assert frame["layer"].tolist() == ["front", "head"] * 3
    assert frame["step"].dtype == np.int64
    assert frame["stable"].tolist() == [2] * 6
    assert frame["slope"].isna().all()
    history.steps.append(step=1, epoch=0.25, loss=2.0, num_frozen=0, samples=8)
    steps = history.frame()
    assert steps["epoch"].tolist() == [0.25]  # a share of a pass
    assert steps["step"].tolist() == [1]
    history.epochs.append(epoch=1, step=8, train_loss=0.5)
    assert history.frame("epochs")["epoch"].dtype == np.int64


def test_empty_frames_have_their_columns() -> None:
    history = History(["front"])
    for name in history:
        assert len(history.frame(name)) == 0
        assert list(history.frame(name).columns) == list(history[name].columns)
