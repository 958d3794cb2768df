"""These tests run with AUTOPAR_TESTS_ON_GPU=1, see CONTRIBUTING.md; without a GPU on the CPU."""

from tests.support.chips import ON_GPU

collect_ignore_glob = [] if ON_GPU else ["test_*.py"]
