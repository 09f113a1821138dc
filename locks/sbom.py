"""`make sbom`: a bill of materials in CycloneDX's JSON, of what is installed and of what is shipped inside Tether."""

from __future__ import annotations

import argparse
import json
import uuid
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from installed import ROOT, UNKNOWN, Package, packages, vendored

SPDX_OPERATORS = (" AND ", " OR ", " WITH ", "(")


def component(one: Package) -> dict[str, Any]:
    """A package as CycloneDX has it; the hashes are of all files that the lock allows for it."""
    ref = f"pkg:{'generic' if one.place else 'pypi'}/{one.name}@{one.version}"
    made: dict[str, Any] = {"type": "library", "bom-ref": ref, "name": one.name, "version": one.version, "purl": ref}
    if one.licence != UNKNOWN:
        made["licenses"] = licences(one.licence)
    if one.hashes:
        made["externalReferences"] = [
            {
                "type": "distribution",
                "url": ref,
                "comment": "the files that locks/ allows",
                "hashes": [{"alg": "SHA-256", "content": sha256} for sha256 in one.hashes],
            }
        ]
    if one.place:
        made["properties"] = [{"name": "tether:place", "value": one.place}]
    return made


def licences(text: str) -> list[dict[str, Any]]:
    """One SPDX expression, or a name."""
    if any(operator in text for operator in SPDX_OPERATORS) and "LicenseRef" not in text and "," not in text:
        return [{"expression": text}]
    return [{"license": {"name": text}}]


def bill() -> dict[str, Any]:
    """The whole document."""
    own = distribution("tether-rl")
    root = f"pkg:pypi/tether-rl@{own.version}"
    there, shipped = packages(), vendored()
    refs = {one.name: component(one)["bom-ref"] for one in [*there, *shipped]}
    graph = [
        {"ref": refs[one.name], "dependsOn": sorted({refs[name] for name in one.requires if name in refs})}
        for one in there
    ]
    direct = sorted({*(ref for name, ref in refs.items())})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "tether-rl",
                "version": own.version,
                "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": [component(one) for one in [*there, *shipped]],
        "dependencies": [{"ref": root, "dependsOn": direct}, *graph],
    }


def main() -> None:
    """Write the file, and say what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "sbom.cdx.json")
    output: Path = parser.parse_args().output
    made = bill()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(f"{output}: {len(made['components'])} components (CycloneDX {made['specVersion']})")


if __name__ == "__main__":
    main()
