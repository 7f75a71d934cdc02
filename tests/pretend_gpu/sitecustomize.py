"""Loaded by every Python process that has this folder on PYTHONPATH: puts the pretend GPU into torch once that is
imported.  Not before, because a command sets its environment before it imports torch."""

import importlib.abc
import importlib.machinery
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec:
            load = spec.loader.exec_module

            def exec_module(module) -> None:
                sys.meta_path.remove(self)
                load(module)
                import pretended

                pretended.install()

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PRETEND_GPU"):
    sys.meta_path.insert(0, _AfterTorch())
