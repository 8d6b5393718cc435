"""The start-up hook of every Python process in a run. It imports nothing heavy.

It runs in Ray workers, vLLM's engine cores, the subprocesses in which vLLM inspects model classes, and in plain
`python` of an environment that `make setup` created.

Registries serve CUDA builds of torchvision. With the CPU build of torch their compiled operators do not load, and
`import torchvision` fails with "operator torchvision::nms does not exist", although only its Python transforms are
needed. The hook declares the two missing operators first. Where torchvision loads, it does nothing.

Python runs it as a separate module in site-packages, which `install.py` writes next to a .pth file that imports it;
in other environments under the name `sitecustomize`, because its folder is on PYTHONPATH. A second run does nothing.
"""

import sys


class _DeclareTorchvisionOperators:
    """Declares `torchvision::nms` and `torchvision::qnms` right before the module that registers their meta kernels."""

    _library: object = None

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname != "torchvision._meta_registrations":
            return
        sys.meta_path.remove(self)
        import torch

        try:
            torch.ops.torchvision.nms  # noqa: B018 - looking it up is the test
        except (AttributeError, RuntimeError):
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # When the library is garbage-collected, its declarations are removed: the class keeps it alive.
            type(self)._library = library


def install() -> None:
    """Install the hook in this process. Idempotent."""
    is_installed = any(type(finder).__name__ == "_DeclareTorchvisionOperators" for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not is_installed:
        sys.meta_path.insert(0, _DeclareTorchvisionOperators())


install()
