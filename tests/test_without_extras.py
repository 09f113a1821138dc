"""Tether as `pip install tether-rl` leaves it, without a package of any extra: what can be imported, and a training.

The packages are hidden from every process that a test starts, by a `sitecustomize` on its search path.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tether

ROOT = Path(__file__).parents[1]
SOURCE = Path(tether.__file__).parent

# What the packages of the extras are imported as. The extra `dev` has no part in what is installed.
IMPORTED_AS = {
    "matplotlib": {"matplotlib"},
    "pyarrow": {"pyarrow"},
    "datasets": {"datasets"},
    "fastapi": {"fastapi", "starlette"},
    "uvicorn": {"uvicorn"},
    "psycopg": {"psycopg", "psycopg_binary"},
    "tensorboard": {"tensorboard"},
    "wandb": {"wandb"},
    "trackio": {"trackio"},
    "bitsandbytes": {"bitsandbytes"},
    "gymnasium": {"gymnasium", "mujoco"},
    "math-verify": {"math_verify", "latex2sympy2_extended"},
    "reasoning-gym": {"reasoning_gym"},
    "lm-eval": {"lm_eval", "evaluate"},
    "optuna": {"optuna"},
    "ray": {"ray"},
    "mkdocs-material": {"mkdocs"},
}
OF_DEVELOPERS = {"httpx", "openai", "gguf", "playwright", "schemathesis", "pandas"}
TRITON = "triton"  # comes with the builds of torch for CUDA, and with no other

# Modules that cannot be imported without an extra, or packages all of whose modules may need it.
NEED = {
    "tether.distributed.ray_driver": "ray",
    "tether.rewards.math_verified": "math",
    "tether.server": "serve",
    "tether.store.database.patience": "postgres",
    "tether.studio": "studio",
}
NEED_TRITON = {
    "tether.accel.decode_gpu.fused_step",
    "tether.accel.fused_pass.fused_layer",
    "tether.accel.fused_pass.fused_pass",
    "tether.accel.fused_pass.linear",
    "tether.accel.kernels",
}

HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
IMPORT_ALL = """
import importlib, json, pkgutil, tether

failed = {}
for module in pkgutil.walk_packages(tether.__path__, "tether."):
    if module.name != "tether.__main__" and ".migrations" not in module.name:  # those run on import
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            failed[module.name] = str(error)
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds no package of an extra."""
    folder = tmp_path_factory.mktemp("bare")
    hidden = {name for names in IMPORTED_AS.values() for name in names} | OF_DEVELOPERS | {TRITON}
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{SOURCE.parent}", "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)


def needs(module: str, names: set[str] | dict[str, str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def test_every_package_of_every_extra_is_hidden(bare: dict[str, str]):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.split(r"[^A-Za-z0-9_-]", one)[0] for name, extra in extras.items() if name != "dev" for one in extra}
    assert wanted == IMPORTED_AS.keys()
    assert set(NEED.values()) <= extras.keys()
    done = run(bare, "-c", "import math_verify")
    assert "No module named 'math_verify'" in done.stderr


def test_only_what_needs_an_extra_cannot_be_imported(bare: dict[str, str]):
    done = run(bare, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout)
    wrong = {module: error for module, error in failed.items() if not needs(module, {*NEED, *NEED_TRITON})}
    assert not wrong, "import the package where it is used, with the sentence that names the extra"
    stale = {name for name in {*NEED, *NEED_TRITON} if not any(needs(module, {name}) for module in failed)}
    assert not stale, "these need nothing"


def test_a_tiny_training(bare: dict[str, str], tmp_path: Path):
    recipe = str(ROOT / "recipes" / "tiny-ppo.yaml")
    done = run(
        *(bare, "-m", "tether", "train", "ppo", recipe, "--json"),
        *("--run.steps", "1", "--run.directory", str(tmp_path), "--run.name", "one"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["tokens/sampled"] > 0


def test_a_reward_by_math_verify_names_the_extra(bare: dict[str, str], tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    done = run(
        *(bare, "-m", "tether", "train", "ppo", "--model.path", "tiny-bytes", "--run.directory", str(tmp_path)),
        *("--run.steps", "1", "--task.prompts", str(prompts), "--reward.parts", '[{"kind": "math_verify"}]'),
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'tether-rl[math]'" in done.stderr


@pytest.mark.parametrize(("command", "extra"), [("studio", "studio"), ("serve tiny-bytes", "serve")])
def test_a_server_names_its_extra(bare: dict[str, str], command: str, extra: str):
    done = run(bare, "-m", "tether", *command.split(), "--port", "0")
    assert done.returncode == 2, done.stderr
    assert f"pip install 'tether-rl[{extra}]'" in done.stderr
