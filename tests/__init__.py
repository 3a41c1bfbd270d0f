"""The tests; what must be set before any of them imports torch."""

import os

# Threads of OpenMP that wait for work sleep. They would burn a core otherwise, and tests share cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
