"""What is installed in this environment and what Tether ships, for the SBOM and the table of licences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
UNKNOWN = "not stated"
# What classifiers call a licence -> its SPDX name.
SPDX = {
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "BSD License": "BSD",  # which of them is not said
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Library or Lesser General Public License (LGPL)": "LGPL",
    "The Unlicense (Unlicense)": "Unlicense",
}
SHORT = {
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache-2.0 license": "Apache-2.0",
    "Apache": "Apache-2.0",
    "MIT License": "MIT",
    "MIT license": "MIT",
    "BSD License": "BSD",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD 3-Clause": "BSD-3-Clause",
}


@dataclass(frozen=True)
class Package:
    """An installed package, or one that is shipped inside Tether."""

    name: str
    version: str
    licence: str
    requires: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    place: str = ""  # in Tether's own package, where it is shipped there


VENDORED = (
    Package("uplot", "", "MIT", place="src/tether/studio/static/vendor/uplot"),
    Package("demo-data", "", "Apache-2.0", place="src/tether/demo/data"),
)
"""Files of others, or data, in Tether's wheel. The page has no fonts of its own: it uses the system's."""


def normal(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


INSTALLABLE = (
    "torch.txt",
    "dev.txt",
    "cuda.txt",
    "docs.txt",
    "extras.txt",
    "ci-triton.txt",
    "ci-node.txt",
    "ci-reasoning.txt",
)


def locked(*files: str) -> dict[str, tuple[str, ...]]:
    """`name==version` -> the hashes of its files, over these locks; over all that go into .venv if none is named."""
    found: dict[str, tuple[str, ...]] = {}
    for name in files or INSTALLABLE:
        for block in re.split(r"\n(?=\S)", (HERE / name).read_text(encoding="utf-8")):
            head = re.match(r"([^\s;=]+==[^\s;]+)", block)
            if head:
                found[head[1]] = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", block))
    return found


def packages() -> list[Package]:
    """All that is installed, but for Tether and pip, by name."""
    hashes = locked()
    found: dict[str, Package] = {}
    for one in distributions():
        name = normal(one.metadata["Name"])
        if name not in ("tether-rl", "pip"):
            known = hashes.get(f"{name}=={one.version.partition('+')[0]}", ())
            found[name] = Package(name, one.version, licence_of(one), tuple(_requires(one)), known)
    return [found[name] for name in sorted(found)]


def vendored() -> list[Package]:
    """What is shipped inside Tether, with the version that its own file tells."""
    text = (ROOT / VENDORED[0].place / "uPlot.esm.js").read_text(encoding="utf-8")[:2000]
    told = re.search(r"v(\d+\.\d+\.\d+)", text)
    plot, data = VENDORED
    version = told[1] if told else "unknown"
    own = distribution("tether-rl").version
    return [
        Package(plot.name, version, plot.licence, place=plot.place),
        Package(data.name, own, data.licence, place=data.place),
    ]


def licence_of(one: Distribution) -> str:
    """The licence, as an SPDX expression where that can be told."""
    meta = one.metadata
    if "License-Expression" in meta:
        return meta["License-Expression"]
    said = [line.rpartition(" :: ")[2] for line in meta.get_all("Classifier") or () if line.startswith("License ::")]
    said = [SPDX.get(one, one) for one in said if one != "OSI Approved"]
    if said:
        return " AND ".join(dict.fromkeys(said))
    short = meta["License"].strip() if "License" in meta else ""
    if short and "\n" not in short and len(short) < 60:
        return SHORT.get(short, short)
    return UNKNOWN


def _requires(one: Distribution) -> Iterator[str]:
    """The packages that it needs here, without those of extras."""
    for line in one.requires or ():
        requirement, _, marker = line.partition(";")
        if "extra" not in marker:
            name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            if name:
                yield normal(name[0])
