"""Where each operation runs.

- `scopes`: the stack of `sg.device(...)` scopes; what they ask for
- `names`: operations named as TensorFlow names them
- `resolution`: from what is asked for to a device; soft placement
- `residence`: which device a tensor is on, how full each is
- `functions`, `arguments`, `eager`, `presence`: places eager operations, copies their inputs
- `modules`: moves parts of a model
- `log`, `records`, `pictures`: what ran where, as lines, data and pictures
- `graph`, `graph_*`, `trace`, `trace_*`: graphs of operations; `session`, `session_*`: what runs them
- `remote`, `remote_*`: parts of graphs as they travel to other tasks
"""

from stratagem.placement import presence as presence  # connects scopes with what runs
from stratagem.placement.log import PlacementLog, log_placement
from stratagem.placement.modules import place
from stratagem.placement.residence import device_of
from stratagem.placement.scopes import Operation, device

__all__ = ["Operation", "PlacementLog", "device", "device_of", "log_placement", "place"]
