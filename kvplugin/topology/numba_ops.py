"""Not written yet."""

from kvplugin.topology.reference import apply_into as apply_into
from kvplugin.topology.reference import lift_into as lift_into
