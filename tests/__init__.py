"""The tests of stratagem; what must be set before torch is first imported."""

import os

# Two processes run tests on the cores of one machine, and each has threads of torch for all of them. By default such
# a thread spins while it waits for another that has no core: most of the suite's processor time went into that.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
