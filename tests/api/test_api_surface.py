"""The Python API's names and signatures, frozen; and `import tether` stays light."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import tether

FILE = Path(__file__).with_name("surface.json")


def surface() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in tether.__all__:
        thing = getattr(tether, name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            public = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
            fields = getattr(thing, "__dataclass_fields__", {})
            members = dict.fromkeys(fields, "field")
            members |= {key: _shown(value) for key, value in public if callable(value) or isinstance(value, property)}
            found[name] = members
        else:
            found[name] = "error" if inspect.isclass(thing) else _shown(thing)
    return found


def _shown(thing: object) -> str:
    return "property" if isinstance(thing, property) else str(inspect.signature(thing))  # pyright: ignore


def test_the_surface_is_what_was_promised():
    assert surface() == json.loads(FILE.read_text()), (
        "The Python API changed. If that is meant, run `python tests/api/test_api_surface.py` and note it in "
        "CHANGELOG.md."
    )


def test_every_public_name_says_what_it_is():
    for name in tether.__all__:
        thing = getattr(tether, name)
        assert thing.__doc__, name
        if name == "Run":
            members = [value for key, value in vars(thing).items() if not key.startswith("_")]
            assert all(value.__doc__ for value in members)


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_tether_imports_nothing_heavy():
    heavy = "[name for name in ('torch', 'transformers', 'numpy', 'pandas', 'pydantic', 'rich') if name in sys.modules]"
    assert _python(f"import sys, tether; tether.__all__; dir(tether); print({heavy})") == "[]"
    torch_free = "import sys, tether, tether.cli; tether.Stopped; print('torch' in sys.modules)"
    assert _python(torch_free) == "False"


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(tether, "pppo")
    assert {"ppo", "sft", "Run", "__version__"} <= set(dir(tether))


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=2) + "\n")
