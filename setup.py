"""Write the keys of a spec as types, which are made of its sections: into a wheel, and for an editable installation beside the schema."""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NAME = "mtrain/spec/typed.py"


class BuildWithTypes(build_py):
    """Copy the package, and write the types."""

    def run(self) -> None:
        """Copy all files into the folder of the build."""
        super().run()
        words = [str(ROOT / NAME)] if self.editable_mode else ["--core", str(Path(self.build_lib) / NAME)]
        subprocess.run([sys.executable, ROOT / "scripts/spec-types", *words], check=True)  # noqa: S603 - ours

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001, FBT002  (setuptools' signature)
        """Return the files of the build."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / NAME)]


setup(cmdclass={"build_py": BuildWithTypes})
