"""Put ``mtrain_trace.pth`` beside the package of a wheel, where Python reads it at every start.

setuptools has no setting for a file at the root of site-packages. The file does nothing unless ``MTRAIN_TRACE`` is set.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "mtrain_trace.pth"


class BuildWithStartupFile(build_py):
    """Copy the package, and the startup file beside it."""

    def run(self) -> None:
        """Copy all files into the folder of the build."""
        super().run()
        if not self.editable_mode:  # an editable installation is joined by PYTHONPATH, as one without the wheel is
            shutil.copyfile(Path(__file__).with_name(NAME), Path(self.build_lib) / NAME)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001, FBT002  (setuptools' signature)
        """Return the files of the build."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / NAME)]


setup(cmdclass={"build_py": BuildWithStartupFile})
