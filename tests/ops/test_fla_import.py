"""What importing FLA brings along, on a package that is made as FLA's is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# as fla-core 0.6 has it: extensions that are missing are done without
INIT = """
import importlib

def optional(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise

layers = optional("fla.layers")
models = optional("fla.models")
"""
FILES = {
    "__init__.py": INIT,
    "layers/__init__.py": "import fla.modules\n",
    "models/__init__.py": "from fla.layers import *\n",
    "modules/__init__.py": "",
    "utils.py": "FLA_DISABLE_TENSOR_CACHE = False\n",
}


PROGRAM = """
import sys
from minivllm.ops.fla import _prepare, prepare

prepare()
import fla.utils
print(fla.layers, fla.models, "fla.layers" in sys.modules, fla.utils.FLA_DISABLE_TENSOR_CACHE)
import fla.models, fla.layers
print(fla.models.__name__, fla.layers.__name__)

# somebody was here before
for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
    del sys.modules[name]
_prepare.cache_clear()
import fla
prepare()
print(fla.layers.__name__, fla.models.__name__, fla.utils.FLA_DISABLE_TENSOR_CACHE)
"""


def test_neither_layers_nor_models(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "fla" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "None None False True",
        "fla.models fla.layers",
        "fla.layers fla.models True",
    ]
