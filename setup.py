"""Packages of the distribution: `minivllm` as it lies here, and conf/ as `minivllm.conf`.

All else stands in pyproject.toml, which cannot both discover packages and add one to them.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["minivllm", "minivllm.*"]), "minivllm.conf"],
    package_dir={"minivllm.conf": "conf"},
)
