"""Which tokens a row attends to: structure, merge, witnesses, counters."""

from kvplugin.config import MOST_ARMS
from kvplugin.topology.counters import BYPASS_REASONS, PHASE_ROWS, Counter, new_counters, read_counters
from kvplugin.topology.op import apply_topology_policy, lift_structural_scores, raise_recorded
from kvplugin.topology.params import PolicyParams, lower
from kvplugin.topology.table import PolicyTable
from kvplugin.topology.witnesses import block_centroids, centroid_drift

__all__ = [
    "BYPASS_REASONS",
    "MOST_ARMS",
    "PHASE_ROWS",
    "Counter",
    "PolicyParams",
    "PolicyTable",
    "apply_topology_policy",
    "block_centroids",
    "centroid_drift",
    "lift_structural_scores",
    "lower",
    "new_counters",
    "raise_recorded",
    "read_counters",
]
