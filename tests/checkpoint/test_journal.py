"""The journal has every row and event that was flushed, through kills, damage, undo and resuming."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from egeria_lab.checkpoint.journal import NAME, Journal, recover
from egeria_lab.errors import CheckpointError
from egeria_lab.events import EventLog, LayerFrozen, SamplesDiscarded
from egeria_lab.history import History


def same(history: History, other: History) -> bool:
    return all(
        repr(history[name][column].tolist()) == repr(other[name][column].tolist())
        for name in history
        for column in history[name].columns
    )


def fill(history: History, events: EventLog, steps: range) -> None:
    for step in steps:
        history.steps.append(step=step, loss=1 / (step + 1), accuracy=None)
        if step % 3 == 0:
            history.plasticity.append(step=step, layer=1, value=1e-9 * step, verdict=2)
        if step % 5 == 0:
            events.append(SamplesDiscarded(step=step, by="user", ids=(step, 2), kept=3))


def test_rows_and_events_come_back(tmp_path: Path) -> None:
    history, events = History(["a", "b"]), EventLog()
    fill(history, events, range(4))  # there before the journal
    journal = Journal(tmp_path / NAME, history, events)
    for step in range(4, 700):
        fill(history, events, range(step, step + 1))
        journal.note()
    journal.close()
    found, happened = recover(tmp_path / NAME)
    assert same(found, history)
    assert happened == list(events)
    assert found.layer_names == ("a", "b")


def test_a_torn_last_line_is_left_out_at_any_byte(tmp_path: Path) -> None:
    history, events = History(["a"]), EventLog()
    journal = Journal(tmp_path / NAME, history, events)
    fill(history, events, range(6))
    journal.close()
    content = (tmp_path / NAME).read_bytes()
    rows = []
    for length in range(content.index(b"\n", 5) + 1, len(content) + 1):
        (tmp_path / NAME).write_bytes(content[:length])
        found, happened = recover(tmp_path / NAME)
        rows.append(len(found.steps) + len(found.plasticity) + len(happened))
    assert rows == sorted(rows)
    assert (rows[0], rows[-1]) == (0, 6 + 2 + 2)


def test_a_damaged_line_ends_what_is_believed_up_to_the_next_beginning(tmp_path: Path) -> None:
    history, events = History(["a"]), EventLog()
    journal = Journal(tmp_path / NAME, history, events)
    fill(history, events, range(10))
    journal.close()
    lines = (tmp_path / NAME).read_text().splitlines(keepends=True)
    lines[6] = lines[6].replace("0.", "1.", 1)
    (tmp_path / NAME).write_text("".join(lines))
    assert 0 < len(recover(tmp_path / NAME)[0].steps) < 10
    again = Journal(tmp_path / NAME, history, events)  # the next process repeats what it knows
    fill(history, events, range(10, 12))
    again.close()
    assert same(recover(tmp_path / NAME)[0], history)


def test_undo_and_redo_are_told(tmp_path: Path) -> None:
    history, events = History(["a"]), EventLog()
    journal = Journal(tmp_path / NAME, history, events)
    fill(history, events, range(10))
    journal.note()
    early = history.state_dict(), events.state_dict()
    fill(history, events, range(10, 20))
    journal.note()
    late = history.state_dict(), events.state_dict()
    history.load_state_dict(early[0])
    events.load_state_dict(early[1])
    fill(history, events, range(110, 115))  # another course
    events.append(LayerFrozen(step=9, layer="a", slope=float("nan")))
    journal.flush()
    between = recover(tmp_path / NAME)
    assert same(between[0], history)
    assert repr(between[1]) == repr(list(events))
    history.load_state_dict(late[0])
    events.load_state_dict(late[1])
    journal.note()
    fill(history, events, range(20, 22))
    journal.close()
    found, happened = recover(tmp_path / NAME)
    assert same(found, history)
    assert happened == list(events)
    assert len((tmp_path / NAME).read_text().splitlines()) < 90  # what holds is not written again


def test_a_full_disk_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, events = History(["a"]), EventLog()
    journal = Journal(tmp_path / NAME, history, events)
    fill(history, events, range(5))

    def full(_text: str) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_line", full)
        with pytest.raises(CheckpointError, match="No space left"):
            journal.note()
        journal.note()  # not again at once
    fill(history, events, range(5, 8))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    journal.note()
    journal.close()
    assert same(recover(tmp_path / NAME)[0], history)


KILLED = """
import sys
from egeria_lab.checkpoint.journal import Journal
from egeria_lab.events import EventLog
from egeria_lab.history import History
from pathlib import Path
import egeria_lab.checkpoint.journal as j
j.FLUSH_SECONDS = 0.0
history, events = History(["a"]), EventLog()
journal = Journal(Path(sys.argv[1]), history, events)
print("go", flush=True)
for step in range(10**7):
    history.steps.append(step=step, loss=step / 7)
    journal.note()
"""


def test_kills(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(4):
        path = tmp_path / f"{number}.jsonl"
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + draw.random() * 0.3)
        process.kill()
        process.wait()
        found, _ = recover(path)
        assert len(found.steps) > 0
        assert found.steps["loss"].tolist() == [step / 7 for step in range(len(found.steps))]


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\x80\x04pickle", b"{}\n", b"00000000 {}\n", b"[" * 100_000 + b"\n"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="is no journal of egeria_lab"):
        recover(tmp_path / NAME)


def test_random_damage_is_an_error_of_ours_or_less_rows(tmp_path: Path) -> None:
    history, events = History(["a"]), EventLog()
    journal = Journal(tmp_path / NAME, history, events)
    fill(history, events, range(8))
    journal.close()
    original, draw = (tmp_path / NAME).read_bytes(), random.Random(2)
    for _ in range(300):
        content = bytearray(original)
        for _ in range(draw.randrange(1, 5)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        (tmp_path / NAME).write_bytes(content)
        try:
            found, _ = recover(tmp_path / NAME)
        except CheckpointError:
            continue
        assert found.steps["step"].tolist() == list(range(len(found.steps)))


def test_no_journal(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no journal"):
        recover(tmp_path / NAME)
    missing: Any = tmp_path / "file" / NAME
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be"):
        recover(missing)
