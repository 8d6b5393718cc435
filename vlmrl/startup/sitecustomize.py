"""The start-up hook of every Python process of the stack: Ray workers, vLLM's engine cores, the subprocesses in which
vLLM inspects model classes, and plain `python` in an environment that `make setup` made. It imports nothing heavy.

Why it exists: registries hand out CUDA builds of torchvision. Beside the CPU build of torch its compiled operators do
not load, and `import torchvision` then stops at "operator torchvision::nms does not exist", though only its Python
transforms are needed. Declaring the two missing schemas in time mends it. Where torchvision loads, nothing happens.

Python runs it in one of two ways, and the second does nothing more: as a module of its own in site-packages, which
`install.py` writes beside a .pth file that imports it; or under the name `sitecustomize`, because its folder is on
PYTHONPATH, in environments made otherwise.
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
            # The library un-declares what it declared when it is collected: the class keeps it for good.
            type(self)._library = library


def install() -> None:
    """Arm the hook in this process, once."""
    is_armed = any(type(finder).__name__ == "_DeclareTorchvisionOperators" for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not is_armed:
        sys.meta_path.insert(0, _DeclareTorchvisionOperators())


install()
