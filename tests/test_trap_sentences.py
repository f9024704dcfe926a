"""What other tools' users had to ask, and find answered here: a sentence of the documentation for each question.

The number is that of the question in our list of traps; the sentence is looked for in the page, spaces aside. That it
is *true* is what the tests of the parts prove; here it may not disappear.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import egeria_lab as lab

ROOT = Path(__file__).parent.parent
RELY = "docs/rely_on.md"
README = "README.md"

SENTENCES: dict[int, tuple[str, str]] = {
    2: (RELY, "| weight decay | no |"),
    5: (RELY, "## What touches a frozen tensor"),
    6: (RELY, "| gradient norm and clipping | left out |"),
    11: (RELY, "`\"drop\"` gives it up, and the ledger claims no memory for state that is kept."),
    12: (RELY, "The trained floor is named"),
    13: (RELY, "no parameter group is added"),
    15: (RELY, "A command lands at a step boundary, once, in the order of the calls"),
    17: (RELY, "The last layer that is trained cannot be frozen"),
    19: (RELY, "is a table of every layer: state, since which step, why, and by whom"),
    20: (RELY, "leaves one event that names the layer and what blocked it"),
    21: (RELY, "| batch-norm statistics | stand still;"),
    23: (RELY, "a part that you had set to eval mode stays so"),
    24: (RELY, "stored statistics are used in train and eval mode alike"),
    25: (RELY, "frozen layers stay in eval mode"),
    28: (RELY, "| dropout | off: the same input gives the same output |"),
    34: (RELY, "The checkpoint's freeze state wins over that of the model it is loaded into"),
    37: (RELY, "`accumulate=` makes a step of the whole window"),
    38: (RELY, "masks, sieve, thresholds, the freeze state, generators, the plan, the event log and the tables"),
    39: (RELY, "`session.export()` gives plain dense weights under their usual names"),
    42: (RELY, "each jump of a layer's rate has its reason in the events"),
    43: (RELY, "progress is counted in steps and the learning-rate schedule knows the new number beforehand"),
    44: (RELY, "every rank freezes and thaws at the same step, bit for bit alike"),
    46: (RELY, "because the exchange is set up anew at each change of the frozen set"),
    47: (RELY, "`DistributedDataParallel` and FSDP wrappers are refused with the reason"),
    48: (RELY, "A compiled model is compiled anew when the frozen set changes"),
    50: (RELY, "each time with an event; readings go on"),
    51: (RELY, "an optimizer whose parameters are all frozen is left out of the step"),
    52: (RELY, "a sentence advises `use_reentrant=False`"),
    57: (RELY, "batch-norm statistics are those of the model unless `ema_buffers=\"average\"` is given"),
    64: (RELY, "Theoretical FLOPs and measured time stand apart in the ledger, each with its label"),
    66: (RELY, "| masks of sparse training | mask *and* values stand still |"),
    69: (RELY, "Freezing a layer in the *middle* frees no memory"),
    70: (RELY, "tied weights are reported and counted with the layer that needs them"),
    71: (RELY, "Your own sampler, workers and collate function are kept"),
    72: (RELY, "`session.sieve.kept_ids()`, `subset()` and `export_csv(path)`"),
    73: (RELY, "Sample ids are int64 from end to end"),
    75: (RELY, "the same seed gives the same ids"),
    76: (RELY, "the random sieve of equal size is there to compare with"),
    78: (RELY, "A *step* is one optimizer update, whatever the sieve left out."),
    79: (RELY, "stop appearing in persistent workers too"),
    81: (RELY, "Watching changes nothing: evaluations, readings, attributions, other loaders"),
    82: (RELY, "`run(5)` again and again is the same as one long run"),
    86: (RELY, "an augmentation that cannot be replayed is refused by name, with the fix"),
    88: (RELY, "training goes on by computing, with one warning"),
    90: (RELY, "The cache is exact: with it the loss trace is bit-equal"),
    92: (RELY, "`run()` keeps the kernel busy, so that controls answer when it returns"),
    93: (RELY, "nothing polls the kernel"),
    102: (RELY, "After `close()` nothing of ours is held"),
    103: (RELY, "stands in `session.error`, and is raised by `wait()`"),
    116: (RELY, "What watching costs, the dashboard's share included, stands beside the savings"),
    122: (RELY, "the output holds a still picture and a table of the run"),
    124: (RELY, "Where no widget can be shown"),
    130: (RELY, "There is no extra port, no server and no request to anybody"),
    133: (RELY, "`monitor_budget` bounds the counted work of readings"),
    135: (RELY, "No hooks run before or after your cells"),
    137: (RELY, "`stop()` ends cleanly at a step, as if so many steps had been asked for"),
    139: (RELY, "The learning rate can be halved with one click"),
    140: (RELY, "`extend(epochs=…)` lengthens the plan"),
    141: (RELY, "`pause()` keeps everything and `resume()` goes on; `stop()` ends cleanly"),
    143: (RELY, "Every control in the dashboard says when a change applies"),
    145: (RELY, "An override never resets weights, masks, optimizer state or counters"),
    146: (RELY, "Freezing is a set and not a toggle: the same call twice is once"),
    1: (README, "no optimizer step, weight decay or momentum"),
}  # fmt: skip


def text_of(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("row", SENTENCES)
def test_the_answer_stands_in_the_documentation(row: int) -> None:
    name, sentence = SENTENCES[row]
    assert " ".join(sentence.split()) in text_of(name)


def test_every_answer_of_the_page_belongs_to_a_question() -> None:
    """A line without a question behind it is an opinion: the page holds none."""
    page = text_of(RELY)
    lines = [line for line in (ROOT / RELY).read_text(encoding="utf-8").splitlines() if line.startswith(("- ", "| "))]
    asked = [" ".join(sentence.split()) for name, sentence in SENTENCES.values() if name == RELY]
    assert all(sentence in page for sentence in asked)
    unasked = [line for line in lines if not any(part in " ".join(line.split()) for part in asked)]
    heads = ("| | frozen by", "| --- |", "| optimizer step", "| momentum", "| running average", "| exchange")
    assert [line for line in unasked if not line.startswith(heads)] == []


def test_names_in_the_page_exist() -> None:
    page = (ROOT / RELY).read_text(encoding="utf-8")
    named = set(re.findall(r"`session\.(\w+)", page)) | {"pause", "resume", "stop", "save", "run", "start", "extend"}
    assert [call for call in named if not hasattr(lab.Session, call) and call not in {"layers", "sieve"}] == []
    assert "halve rate" in (ROOT / "egeria_lab/dashboard/static/controls.js").read_text(encoding="utf-8")
