"""The package as users get it: from a clone, an editable install, a wheel, and its script.

Environments are made without network: they see this interpreter's other packages by a .pth file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "minivllm", "conf")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
WAYS = ("clone", "editable", "editable script", "wheel", "wheel script")


def checked(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of what is packaged, since a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("project")
    for name in PROJECT:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(project, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checked([sys.executable, "-m", "pip", "wheel", *OFFLINE, "-w", folder, project], folder)
    (file,) = folder.glob("*.whl")
    return file


def environment(folder: Path, *requirement: str | Path) -> Path:
    """A new environment with one thing installed; returns its folder of programs."""
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "others.pth").write_text("\n".join(sorted(paths)))
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", *OFFLINE]
    checked([*pip, "--ignore-installed", *requirement], folder)
    return programs


@pytest.fixture(scope="module")
def ways(project, wheel, tmp_path_factory) -> dict[str, tuple[list[str | Path], Path, Path]]:
    """Each way to call the program: its command, working folder, and where its files must be."""
    empty = tmp_path_factory.mktemp("empty")
    editable = environment(tmp_path_factory.mktemp("editable"), "-e", project)
    installed = environment(tmp_path_factory.mktemp("installed"), wheel)
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    module = ["-m", "minivllm.run"]
    return {
        "clone": ([sys.executable, *module], project, project / "conf"),
        "editable": ([editable / "python", *module], empty, project / "conf"),
        "editable script": ([editable / "minivllm"], empty, project / "conf"),
        "wheel": ([installed / "python", *module], empty, packages / "minivllm" / "conf"),
        "wheel script": ([installed / "minivllm"], empty, packages / "minivllm" / "conf"),
    }


@pytest.mark.parametrize("way", WAYS)
def test_the_command_works(ways, way):
    command, cwd, conf = ways[way]
    before = sorted(cwd.rglob("*.yaml"))
    job = checked([*command, "+model=tiny", "--cfg", "job"], cwd)
    assert "path: asset://tiny" in job.stdout
    assert "max_num_batched_tokens: 8192" in job.stdout
    search = checked([*command, "--info", "searchpath"], cwd)
    assert f"file://{conf.resolve()} " in search.stdout
    assert "model: miniqwen08b, tiny" in checked([*command, "--help"], cwd).stdout
    nope = subprocess.run([*command, "+model=nope"], cwd=cwd, capture_output=True, text=True)
    assert (nope.returncode, nope.stdout) == (2, "")
    assert nope.stderr.startswith("error: model: 'nope' is not one of: miniqwen08b, tiny")
    assert sorted(cwd.rglob("*.yaml")) == before


@pytest.mark.parametrize("way", ["clone", "editable", "wheel"])
def test_the_embedded_model_is_found(ways, way):
    command, cwd, conf = ways[way]
    code = (
        "from minivllm import presets; from minivllm.model.source import resolve_model; "
        "print(presets.conf_dir()); print(resolve_model('asset://tiny', None))"
    )
    found = checked([command[0], "-c", code], cwd).stdout.splitlines()
    assert Path(found[0]) == conf.resolve()
    root = conf.resolve().parent
    assets = root / "assets" if way == "wheel" else root / "minivllm" / "assets"
    assert Path(found[1]) == assets / "tiny"
    assert (assets / "tiny" / "model.safetensors").stat().st_size > 1_000_000


def test_the_wheel_holds_the_package_its_yaml_and_its_model(wheel, project):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    code = {str(f.relative_to(project)) for f in (project / "minivllm").rglob("*.py")}
    yaml = {f"minivllm/{f.relative_to(project)}" for f in (project / "conf").rglob("*.yaml")}
    assets = {
        str(f.relative_to(project))
        for f in (project / "minivllm" / "assets").rglob("*")
        if f.is_file()
    }
    assert len(yaml) == 6
    assert names == code | yaml | assets
    assert "Requires-Python: <3.14,>=3.10" in text
    assert "License-Expression: MIT" in text
    for extra in ("cuda", "dev", "train"):
        assert f"Provides-Extra: {extra}" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist")]
    always = " ".join(line for line in required if "extra ==" not in line)
    assert "torch>=2.11" in always
    for cuda_only in ("flash", "triton"):
        assert cuda_only not in always
