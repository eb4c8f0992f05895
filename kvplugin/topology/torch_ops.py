"""placeholder"""

from kvplugin.topology.reference import apply_into, lift_into
