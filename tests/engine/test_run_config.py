"""A session as a TOML file: the same again when read, honest about what no file can hold, and harmless."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.engine.run_config import RunConfig, _toml
from egeria_lab.engine.run_file import KINDS, read_config
from egeria_lab.presets import PRESETS

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {"freeze": None, "scheduler": None, "save_every_minutes": None},
    "plasticity": {"freeze": lab.Plasticity(tolerance=0.3, max_frozen=0.5, guard=0.02, thaw="never")},
    "schedule": {"freeze": lab.Schedule(saving=0.2, interval_epochs=1), "sparsity": lab.SET(sparsity=0.5)},
    "gradient": {"freeze": lab.GradientNorm(interval_steps=7), "sieve": lab.LossSieve(fraction=0.3)},
    "sieves": {"sieve": lab.CirculantSieve(fraction=0.25, class_shares=True)},
    "random": {"sieve": lab.RandomSieve(fraction=0.1), "sparsity": lab.RigL(dense=("layers.1",))},
    "one shot": {"sieve": lab.OneShotSieve(), "sparsity": lab.StaticSparsity(sparsity=0.5, scheme="2:4")},
    "mest": {"sparsity": lab.MEST(sparsity=0.8, elastic=(0.01, 0.0))},
    "cache": {"cache": lab.ActivationCache(dtype="int8", max_bytes=10**6), "augment": lab.Augment(noise=0.1)},
    "egeria": lab.presets.egeria(),
    "spfde": lab.presets.spfde(saving=0.15, sieve=0.15),
    "everything": lab.presets.everything(),
}


def session(**more: Any) -> lab.Session:
    return lab.Session("mlp", "digits", **{"epochs": 8, **more})


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text('model = "mlp"\ndata = "digits"\nepochs = 2\n' + text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SETTINGS)
def test_config_to_session_to_config_is_the_same(name: str, tmp_path: Path) -> None:
    first = session(seed=3, lr=1e-5, **SETTINGS[name])
    path = first.config.write(tmp_path / "run.toml")
    second = lab.Session.from_config(path)
    assert second.config == first.config
    assert dict(second.config) == dict(first.config)
    for key, value in SETTINGS[name].items():
        assert second.config[key] == value
        assert type(second.config[key]) is type(value)
    assert second.config.to_toml(tmp_path) == path.read_text(encoding="utf-8")


def test_the_file_says_every_argument_so_that_other_defaults_change_nothing() -> None:
    config = session().config
    assert list(config) == [name for name in inspect.signature(lab.Session).parameters if name != "cluster"]
    said = tomllib.loads(config.to_toml())
    assert said["save_every_minutes"] == 5.0
    assert said["freeze"]["kind"] == "Plasticity"
    assert "sieve" not in said  # None is what an absent key means


def test_both_train_the_same(tmp_path: Path) -> None:
    first = session(seed=5, freeze=lab.Plasticity(interval_steps=2), sieve=lab.CirculantSieve(fraction=0.25))
    second = lab.Session.from_config(first.config.write(tmp_path / "run.toml"))
    assert [first.step().loss for _ in range(15)] == [second.step().loss for _ in range(15)]


def test_a_short_file_takes_defaults_and_a_table_without_kind_changes_them(tmp_path: Path) -> None:
    made = lab.Session.from_config(write(tmp_path, "[freeze]\ntolerance = 0.4\n"))
    assert made.config["freeze"] == lab.Plasticity(tolerance=0.4)
    assert made.config["batch_size"] == 128


def test_presets_by_name_and_with_options(tmp_path: Path) -> None:
    config = read_config(lab.Session, write(tmp_path, 'preset = "spfde"\n[sparsity]\nsparsity = 0.8\n'), PRESETS)
    assert config["freeze"] == lab.Schedule(saving=0.25)
    assert config["sparsity"] == lab.MEST(sparsity=0.8)
    text = 'sieve = "none"\n[preset]\nname = "spfde"\nsaving = 0.1\n'
    config = read_config(lab.Session, write(tmp_path, text), PRESETS)
    assert config["freeze"] == lab.Schedule(saving=0.1)
    assert config["sieve"] is None


def test_every_settings_class_of_the_constructor_has_its_name_here() -> None:
    for name, kinds in KINDS.items():
        for kind in kinds:
            config = RunConfig({name: getattr(lab, kind)()}, {})
            assert type(config[name]).__name__ == kind


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch = 3", "run.toml: Unknown key 'epoch'. Did you mean 'epochs'? Known: model, data"),
        ("[frezee]\ntolerance = 1", "Unknown key 'frezee'. Did you mean 'freeze'?"),
        ("[freeze]\ntolerence = 1", "Unknown setting of Plasticity 'tolerence'. Did you mean 'tolerance'?"),
        ('[sieve]\nkind = "CirculentSieve"', "Unknown kind of sieve 'CirculentSieve'. Did you mean 'CirculantSieve'?"),
        ('[freeze]\nkind = "MEST"', "Unknown kind of freeze 'MEST'"),
        ("[sieve]\nfraction = 0.2", "[sieve] needs kind = one of CirculantSieve"),
        ("sieve = 3", "sieve must be a table with kind = one of CirculantSieve"),
        ('preset = "spfed"', "Unknown preset 'spfed'. Did you mean 'spfde'?"),
        ('[preset]\nname = "spfde"\nsavings = 0.1', "Unknown option of the preset spfde 'savings'. Did you mean"),
        ('[preset]\nname = "spfde"\nsaving = "much"', "preset.saving must be a number"),
        ("[freeze]\npatience = 0", "Plasticity.patience must be a whole number >= 1, got 0."),
        ('[freeze]\ntolerance = "high"', "Plasticity.tolerance must be >= 0, got 'high'."),
        ('[sparsity]\nkind = "MEST"\nphases = ["a", "b"]', "MEST"),
        ("[model]\nname = 3", "model must be a text, a number"),
        ("lr = 1979-05-27", "lr must be a text, a number"),
        ("model", "is no TOML file"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(lab.EgeriaLabError) as caught:
        lab.Session.from_config(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["batch_size = 0", "seed = 1.5", "lr = -1.0", 'deterministic = "yes"', "paused = 1", 'precision = "fp12"']
)
def test_values_are_checked_by_the_constructor(text: str, tmp_path: Path) -> None:
    name, _, value = text.partition(" = ")
    with pytest.raises(lab.EgeriaLabError) as of_file:
        lab.Session.from_config(write(tmp_path, text))
    with pytest.raises(lab.EgeriaLabError) as of_call:
        session(**{name: tomllib.loads(text)[name]})
    assert str(of_file.value) == str(of_call.value)
    assert value.strip('"') in str(of_call.value)


def test_own_objects_are_named_and_have_to_be_given_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    own = {"loss": nn.CrossEntropyLoss(), "freeze": lab.Plasticity(thaw=lambda rates: False)}
    made = lab.Session(model, "digits", epochs=1, **own)
    assert made.config.own == ("model", "loss", "freeze")
    path = made.config.write(tmp_path / "run.toml")
    assert tomllib.loads(path.read_text(encoding="utf-8"))["own"]["model"] == "Sequential"
    with pytest.raises(lab.InvalidSettingError) as caught:
        lab.Session.from_config(path, loss=nn.CrossEntropyLoss())
    assert "model= (Sequential), freeze= (Plasticity(thaw=" in str(caught.value)
    assert "Session.from_config(…, model=…, freeze=…)" in str(caught.value)
    again = lab.Session.from_config(path, model=model, **own)
    assert again.config == made.config


def test_a_path_in_a_file_stays_in_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "here"
    place.mkdir()
    (place / "link").symlink_to(tmp_path)
    for path in ("../out", "/tmp/out", "runs/../../out", "link/out"):
        for text in (f'run_dir = "{path}"', f'[cache]\ndirectory = "{path}"'):
            with pytest.raises(lab.InvalidSettingError, match="leads out of"):
                lab.Session.from_config(write(place, text))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here"]
    inside = read_config(lab.Session, write(place, 'run_dir = "runs/a"\n[cache]\ndirectory = "c"'), PRESETS)
    assert inside["run_dir"] == (place / "runs" / "a").resolve()
    assert inside["cache"].directory == (place / "c").resolve()


def test_a_path_given_by_hand_may_lead_anywhere(tmp_path: Path) -> None:
    place = tmp_path / "here"
    place.mkdir()
    made = lab.Session.from_config(write(place, 'run_dir = "runs"'), run_dir=tmp_path / "out")
    made.step()
    made.close()
    assert (tmp_path / "out").is_dir()
    text = made.config.to_toml(place)
    assert "run_dir" not in tomllib.loads(text)
    assert "leads out of this folder: give run_dir again" in text
    config = read_config(lab.Session, write(place, ""), PRESETS, [f"run_dir={tmp_path}/else"])
    assert config["run_dir"] == tmp_path / "else"


def test_overrides_change_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, 'sieve = "CirculantSieve"\npreset = "egeria"\n')
    asked = ["freeze.tolerance=0.35", "optimizer=adam", "sieve.fraction=0.3", "preset.cache=false", "layers=['a']"]
    config = read_config(lab.Session, path, PRESETS, asked)
    assert config["freeze"] == lab.Plasticity(tolerance=0.35)
    assert config["optimizer"] == "adam"
    assert config["sieve"] == lab.CirculantSieve(fraction=0.3)
    assert config["cache"] is None
    assert config["layers"] == ["a"]
    for wrong in ("tolerance", "=3", "a.b.c=1", "epochs.x=1"):
        with pytest.raises(lab.EgeriaLabError):
            read_config(lab.Session, path, PRESETS, [wrong])


def test_texts_survive_whatever_is_in_them(tmp_path: Path) -> None:
    odd = 'quote " backslash \\ newline \n tab \t umlaut ü emoji 🙂 delete \x7f bell \x07'
    text = RunConfig({"model": odd}, {}).to_toml()
    assert tomllib.loads(text)["model"] == odd


def test_writing_over_a_folder_or_into_none_is_one_sentence(tmp_path: Path) -> None:
    config = session().config
    for place in (tmp_path, tmp_path / "no" / "run.toml"):
        with pytest.raises(lab.InvalidSettingError, match="cannot write"):
            config.write(place)
    assert list(tmp_path.iterdir()) == []


UNUSABLE = {"": "an empty text", "a\0": "a null character", "a" * 300: "too long", "b/" * 2100: "too long"}


@pytest.mark.parametrize("path", UNUSABLE)
def test_a_path_that_no_file_can_have_is_one_sentence(path: str, tmp_path: Path) -> None:
    made = session()
    calls: dict[str, Callable[[], Any]] = {
        "config.write: path": lambda: made.config.write(path),
        "Session.from_config: path": lambda: lab.Session.from_config(path),
        "Session.save: path": lambda: made.save(path),
        "Session.load: path": lambda: lab.Session.load(path),
        "run_dir": lambda: session(run_dir=path),
        "run.toml: run_dir": lambda: read_config(lab.Session, write(tmp_path, f"run_dir = {_toml(path)}"), PRESETS),
    }
    for name, call in calls.items():
        with pytest.raises(lab.InvalidSettingError, match=UNUSABLE[path]) as caught:
            call()
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 250


def test_the_longest_name_can_be_written_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / ("a" * 250 + ".toml")
    assert session().config.write(target) == target
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_written_through_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "run.toml"
    link.symlink_to(tmp_path / "real" / "run.toml")
    made = session()
    assert made.config.write(link) == link
    assert link.is_symlink()
    assert (tmp_path / "real" / "run.toml").read_text(encoding="utf-8") == made.config.to_toml(tmp_path / "real")
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(lab.InvalidSettingError, match="cannot write"):
        made.config.write(circle)


def test_home_is_home_by_hand_and_refused_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, 'run_dir = "~/runs"')
    with pytest.raises(lab.InvalidSettingError, match=r"run_dir = '~/runs' leads out of"):
        lab.Session.from_config(file)
    made = session(run_dir="~/runs", epochs=1)
    made.step()
    made.close()
    assert made.config["run_dir"] == tmp_path / "home" / "runs"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "run.toml"]
    with pytest.raises(lab.InvalidSettingError, match="there is no such home directory"):
        made.config.write("~nobody-of-this-name/run.toml")


def test_a_paused_session_waits_for_resume() -> None:
    made = session(paused=True, freeze=None)
    made.start(steps=3)
    assert not made.wait(timeout=0.3)
    assert (made.state, made.steps_done) == ("paused", 0)
    made.override("optimizer.lr", 0.05)
    made.resume()
    assert made.wait(timeout=60)
    assert made.steps_done == 3
    made.start(steps=2)  # only the first run waits
    assert made.wait(timeout=60)
    assert made.steps_done == 5
    ready = session(paused=True, freeze=None)
    ready.resume()
    ready.start(steps=2)
    assert ready.wait(timeout=60)
    assert ready.steps_done == 2
    for one in (made, ready):
        one.close()


def test_a_loaded_or_forked_session_does_not_wait_again(tmp_path: Path) -> None:
    made = session(paused=True, freeze=None)
    made.step(2)
    again = lab.Session.load(made.save(tmp_path / "a.ckpt"))
    for other in (again, made.fork()):
        other.start(steps=1)
        assert other.wait(timeout=60)
        assert other.steps_done == 3
        other.close()
