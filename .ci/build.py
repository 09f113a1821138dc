"""`make build`: the wheel and the sdist in dist/, checked, and the wheel tried in an environment of its own.

1. hatchling builds both from the files of this checkout; the time in them is that of the last commit.
2. The wheel has every file of src/tether that git knows, and nothing else. twine checks the metadata.
3. A new environment gets the wheel and only what the wheel says it needs, by the hashes in locks/. There
   `pip check`, `tether --version` and `tether conformance` must pass.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SOURCE = "src/tether/"
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/tether/__init__.py", "tests/conftest.py")
sys.path.insert(0, str(ROOT / "locks"))

from installed import normal  # noqa: E402
from lock import Blocks, name_of, read_blocks  # noqa: E402


def main() -> None:
    """Build, check, try."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--twine", default="twine", help="the program that checks the metadata")
    twine: str = parser.parse_args().twine
    wheel, sdist = build()
    check_files(wheel, sdist)
    run([twine, "check", "--strict", str(wheel), str(sdist)])
    try_wheel(wheel)
    for path in (wheel, sdist):
        print(f"build: {path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")


def build() -> tuple[Path, Path]:
    """The new wheel and sdist; older ones are removed."""
    for old in [*DIST.glob("tether_rl-*.whl"), *DIST.glob("tether_rl-*.tar.gz")]:
        old.unlink()
    commit_time = run(["git", "log", "-1", "--format=%ct"], ROOT).strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": commit_time}
    run([sys.executable, "-m", "hatchling", "build", "-d", str(DIST)], ROOT, environment)
    [wheel], [sdist] = DIST.glob("tether_rl-*.whl"), DIST.glob("tether_rl-*.tar.gz")
    return wheel, sdist


def check_files(wheel: Path, sdist: Path) -> None:
    """Everything that git knows under src/tether is in the wheel, and nothing else is."""
    tracked = run(["git", "ls-files", "-z", SOURCE], ROOT).split("\0")
    expected = {path.removeprefix("src/") for path in tracked if path and (ROOT / path).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    if missing := sorted(expected - shipped):
        sys.exit(f"build: the wheel lacks {len(missing)} files, such as {missing[:3]}")
    if extra := sorted(shipped - expected):
        sys.exit(f"build: the wheel has {len(extra)} files that git does not know, such as {extra[:3]}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if lacking := [name for name in IN_SDIST if name not in packed]:
        sys.exit(f"build: the sdist lacks {lacking}")
    data = sum(not name.endswith(".py") for name in shipped)
    print(f"build: the wheel has {len(shipped)} files, {data} of them data; the sdist has {len(packed)}")


def try_wheel(wheel: Path) -> None:
    """Install the wheel away from this checkout and run it there."""
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="tether-wheel-") as name:
        folder = Path(name)
        run([sys.executable, "-m", "venv", str(folder / "venv")])
        python, tether = (str(folder / "venv" / "bin" / program) for program in ("python", "tether"))
        install_dependencies(python, folder)
        run([python, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", str(wheel)], folder)
        print(f"build: {run([python, '-m', 'pip', 'check'], folder).strip()}")
        said = run([tether, "--version"], folder).strip()
        if said != f"tether {version}":
            sys.exit(f"build: the wheel is {version}, and its command says {said!r}")
        print(f"build: {said}")
        print(f"build: {run([tether, 'conformance'], folder).strip().splitlines()[-1].strip()}")


def install_dependencies(python: str, folder: Path) -> None:
    """Install what the wheel needs from the locks; a PyTorch in a folder of yours goes first, as in `make setup`."""
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--require-hashes", "--no-deps"]
    pip += ["--only-binary", ":all:"]
    torch = ["-r", str(ROOT / "locks" / "torch.txt")]
    if subprocess.run([*pip, "--no-index", *torch], capture_output=True, check=False).returncode != 0:  # noqa: S603
        run([*pip, *torch])
    needed = runtime_names()
    locked: Blocks = read_blocks((ROOT / "locks" / "dev.txt").read_text(encoding="utf-8"))
    chosen = folder / "runtime.txt"
    chosen.write_text("".join(f"{block}\n" for head, block in locked.items() if name_of(head) in needed))
    run([*pip, "-r", str(chosen)])
    checked = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)  # noqa: S603
    if re.search(r"^torch .* is not installed", checked.stdout, flags=re.MULTILINE):  # PyTorch's build for CUDA
        run([*pip, "-r", str(ROOT / "locks" / "cuda.txt")])


def runtime_names() -> set[str]:
    """The packages that Tether needs without any extra, and those that they need."""
    found: set[str] = set()
    waiting = ["tether-rl"]
    while waiting:
        for line in distribution(waiting.pop()).requires or ():
            requirement, _, marker = line.partition(";")
            name = normal(re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0])
            if "extra ==" in marker or name in found:
                continue
            found.add(name)
            if _is_installed(name):
                waiting.append(name)
    return found


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except ModuleNotFoundError:  # for another platform or Python
        return False
    return True


def run(words: list[str], folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """What a program printed; where it failed, this ends with what it said."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        sys.exit(f"build: {' '.join(words[:4])} failed:\n{(done.stdout + done.stderr).strip()[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
