"""Where each operation runs: scopes, the placement of eager operations, the log."""

from stratagem.placement import presence as presence  # connects scopes with what runs
from stratagem.placement.log import PlacementLog, log_placement
from stratagem.placement.modules import place
from stratagem.placement.residence import device_of
from stratagem.placement.scopes import Operation, device
from stratagem.placement.spread import spread_variables

__all__ = ["Operation", "PlacementLog", "device", "device_of", "log_placement", "place", "spread_variables"]
