"""One, two and four processes train the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ranks, start

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    folder = tmp_path_factory.mktemp("everything")
    return {size: ranks("everything", size, folder / str(size)) for size in (1, 2, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_losses_are_those_of_one_process_up_to_the_order_of_sums(everything: dict[int, Seen], size: int) -> None:
    one, many = everything[1][0]["losses"], everything[size][0]["losses"]
    assert len(one) == 100
    assert many == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_every_event_comes_at_the_same_step_on_every_rank(everything: dict[int, Seen], size: int) -> None:
    kinds = (
        "LayerFrozen",
        "LayerThawed",
        "LayerSettling",
        "SettingChanged",
        "SamplesSieved",
        "SamplesDiscarded",
        "MaskUpdated",
    )

    def told(seen: dict[str, Any]) -> list[str]:
        return [event for event in seen["events"] if event.split()[1] in kinds]

    expected = told(everything[1][0])
    assert {event.split()[1] for event in expected} >= set(kinds[:6])
    assert sum("LayerFrozen" in event for event in expected) >= 2  # by hand, and by the rule
    for seen in everything[size]:
        assert told(seen) == expected
        assert seen["masks"] == everything[1][0]["masks"] > 4


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_are_bit_identical_after_100_steps(everything: dict[int, Seen], size: int) -> None:
    assert len({seen["digest"] for seen in everything[size]}) == 1
    assert len({json.dumps(seen["losses"]) for seen in everything[size]}) == 1
    assert len({seen["evaluation"] for seen in everything[size]}) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_frozen_layers_send_no_bytes(everything: dict[int, Seen], size: int) -> None:
    for seen in everything[size]:
        assert {frozen for frozen, _, _ in seen["sent"]} >= {0, 1}
        for _, sent, trained in seen["sent"]:
            assert sent == trained
    exchange = everything[size][0]["exchange"]
    assert exchange["bytes"] == sum(sent for _, sent, _ in everything[size][0]["sent"]) < exchange["full_bytes"]
    assert everything[1][0]["exchange"] is None


def test_the_model_is_left_with_its_plain_names(everything: dict[int, Seen]) -> None:
    assert everything[2][0]["keys"] == everything[1][0]["keys"]


def test_batch_norm_dropout_an_unused_layer_and_the_cache(tmp_path: Path) -> None:
    one = ranks("own_model", 1, tmp_path / "1")[0]
    two = ranks("own_model", 2, tmp_path / "2")
    assert len({seen["digest"] for seen in two}) == 1  # although each rank began from weights of its own
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["valid"] == two[1]["valid"]
    assert two[0]["valid"][-1] == pytest.approx(two[0]["evaluation"])
    assert all(seen["still"] for seen in two)
    served = sum(seen["hits"] for seen in two) / sum(seen["hits"] + seen["misses"] for seen in two)
    alone = one["hits"] / (one["hits"] + one["misses"])
    assert served > 0.8 * alone > 0.4  # a sample goes to the rank that has its row


def test_a_step_that_one_rank_cannot_make_is_made_by_none(tmp_path: Path) -> None:
    found = ranks("failing", 2, tmp_path)
    assert sorted("sample 40 is broken" in seen["raised"] for seen in found) == [False, True]
    assert sum("another rank could not make this step" in seen["raised"] for seen in found) == 1
    assert all(seen["same"] for seen in found)
    assert found[0]["step"] == found[1]["step"]


def test_ranks_that_were_asked_for_different_things_are_refused(tmp_path: Path) -> None:
    for seen in ranks("unequal", 2, tmp_path):
        assert "lr is 0.1 on rank 0 and 0.2 on rank 1" in seen["error"]


def test_a_killed_rank_ends_the_others_and_the_run_goes_on_with_fewer(tmp_path: Path) -> None:
    processes = start("killed", 2, tmp_path / "killed")
    printed = [process.communicate(timeout=200)[0] for process in processes]
    first = json.loads((tmp_path / "killed" / "rank0.json").read_text())
    assert "another rank died or was silent too long" in first["error"], printed
    assert "resume" in first["error"]
    assert processes[1].returncode == -9
    expected = ranks("whole", 1, tmp_path / "whole")[0]["losses"]
    fewer = ranks("resumed", 1, tmp_path / "resumed1")[0]
    assert fewer["from"] == 5  # nothing is lost but the interval
    assert fewer["losses"] == pytest.approx(expected, rel=1e-4)
    more = ranks("resumed", 4, tmp_path / "resumed4")
    assert more[0]["losses"] == pytest.approx(expected, rel=1e-4)
    assert len({seen["digest"] for seen in more}) == 1


def test_rank_0_pauses_steers_and_stops_all(tmp_path: Path) -> None:
    first, second = ranks("steered", 2, tmp_path)
    assert first["state"] == second["state"] == "stopped"
    assert first["steps"] == second["steps"]
    assert first["digest"] == second["digest"]
    assert first["landed"] == second["landed"]
    assert [line.split(" ", 1)[1].split(" by")[0] for line in first["landed"]][:2] == [
        "layers.0 frozen", "layers.1 frozen",
    ]  # fmt: skip
    assert "commands are taken from rank 0" in second["rejected"]
    assert first["fork"].startswith("fork() works in a single process")
    assert all((tmp_path / f"{name}.ckpt").exists() for name in ("rank0", "rank1", "again"))
