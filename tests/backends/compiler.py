"""Whether this machine has a C compiler: the only reason for which tests of the kernels may be skipped.

Whether the kernels *load* is no such reason, because a wrong kernel is refused as it is loaded.
"""

import pytest

from mtrain.core.compiling import CannotCompileError, _compiler


def has_compiler() -> bool:
    try:
        return bool(_compiler())
    except CannotCompileError:
        return False


needs_a_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C compiler here")
