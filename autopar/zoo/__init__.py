"""Published model configurations as data, and the `MODEL` argument of the command line.

Used by the command line, the benchmarks and the tests; the compiler does not depend on it.
"""

from autopar.zoo.construction import build, example_inputs
from autopar.zoo.load import load, read_config
from autopar.zoo.spec import Spec, names, spec

__all__ = ["Spec", "build", "example_inputs", "load", "names", "read_config", "spec"]
